"""Summaries of lengths and skew, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_libra.data.rows import LengthRows
from megatron_libra.data.summary import summarize_lengths, summarize_skew


def test_lengths_by_hand() -> None:
    summary = summarize_lengths(np.array([1, 0, 2, 3, 10]))
    assert (summary.samples, summary.tokens, summary.max) == (4, 16, 10)
    assert (summary.mean, summary.median) == (4.0, 2.5)
    assert summary.half_work_length == 10, "100 of 114 pairs are in the longest"


def test_skew_by_hand() -> None:
    """Equal tokens, work 16, 8, 16 + 0: mean 40 / 3."""
    skew = summarize_skew(LengthRows.from_rows([[4], [2, 2], [4]]), 8)
    assert (skew.sequences, skew.fill) == (3, 0.5)
    assert skew.mean_samples == pytest.approx(4 / 3)
    assert skew.imbalance == pytest.approx(16 / (40 / 3) - 1)
    assert skew.p99_over_median == pytest.approx(1.0)


def test_nothing_to_describe_is_refused() -> None:
    with pytest.raises(ValueError, match="no sample with tokens"):
        summarize_lengths(np.array([0]))
    with pytest.raises(ValueError, match="no sequence with tokens"):
        summarize_skew(LengthRows.from_rows([[]]), 8)
