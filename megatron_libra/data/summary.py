"""What a set of lengths looks like, and how much it would stall a job. In: rows. Out: numbers.

Skew is about packed sequences: all have the same number of tokens, but their attention work is the
sum of their squared sample lengths (Eq. 4).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_libra.data.rows import Int64, LengthRows

__all__ = ["LengthSummary", "SkewSummary", "summarize_lengths", "summarize_skew"]


@dataclass(frozen=True, slots=True)
class LengthSummary:
    """Distribution of sample lengths in tokens; samples without tokens do not count."""

    samples: int
    tokens: int
    mean: float
    median: float
    p90: float
    p99: float
    max: int
    half_work_length: int
    """Samples of at least this length do half of the attention work."""


@dataclass(frozen=True, slots=True)
class SkewSummary:
    """Attention work of packed sequences."""

    sequences: int
    mean_samples: float
    """Samples in a packed sequence, on average."""
    fill: float
    """Share of seq_length that holds tokens, on average."""
    imbalance: float
    """max / mean - 1 of the work over all packed sequences."""
    p99_over_median: float
    """Work of the sequence at the 99th percentile over that of the median one."""


def summarize_lengths(lengths: Int64) -> LengthSummary:
    """Describe sample lengths; ValueError if there is no token."""
    lengths = np.sort(lengths[lengths > 0])
    if not lengths.size:
        raise ValueError("there is no sample with tokens; give lengths of at least 1.")
    work = np.cumsum(lengths.astype(np.float64) ** 2)
    p50, p90, p99 = np.percentile(lengths, [50, 90, 99]).tolist()
    return LengthSummary(
        samples=lengths.size,
        tokens=int(lengths.sum()),
        mean=float(lengths.mean()),
        median=p50,
        p90=p90,
        p99=p99,
        max=int(lengths[-1]),
        half_work_length=int(lengths[np.searchsorted(work, work[-1] / 2)]),
    )


def summarize_skew(rows: LengthRows, seq_length: int) -> SkewSummary:
    """Describe the attention work of packed sequences; ValueError if there is no token."""
    work = rows.row_sums(rows.flat**2).astype(np.float64)
    if not work.any():
        raise ValueError("there is no sequence with tokens; give lengths of at least 1.")
    p50, p99 = np.percentile(work, [50, 99]).tolist()
    return SkewSummary(
        sequences=len(rows),
        mean_samples=rows.flat.size / len(rows),
        fill=float(rows.row_sums().mean()) / seq_length,
        imbalance=float(work.max() / work.mean()) - 1,
        p99_over_median=p99 / max(p50, 1.0),
    )
