"""Batch size schedules by hand; equality with Megatron's calculator is in test_megatron."""

from __future__ import annotations

import pytest

from megatron_libra.data.schedule import constant_batch_size, parse_step_batch_size


def test_sizes_change_at_their_thresholds() -> None:
    schedule = parse_step_batch_size("0:64 1K:128, 1.5k:96")
    at = {0: 64, 63: 64, 999: 64, 1000: 128, 1499: 128, 1500: 96, 10**12: 96}
    assert {consumed: schedule(consumed) for consumed in at} == at


def test_tokens_become_samples() -> None:
    schedule = parse_step_batch_size("0:8 1M:16", seq_length=4096)
    assert (schedule(243), schedule(244)) == (8, 16)


def test_constant() -> None:
    assert constant_batch_size(32)(10**9) == 32


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("64", "entry '64' must be THRESHOLD:GBS"),
        ("0:x", "entry '0:x' must be THRESHOLD:GBS"),
        ("K:8", "entry 'K:8'"),
        ("0:1e999", "entry '0:1e999' must be THRESHOLD:GBS"),
        ("5:8", r"thresholds \(5,\) \(in samples\) must rise from 0"),
        ("0:8 0:9", r"thresholds \(0, 0\)"),
        ("", r"thresholds \(\)"),
        ("0:0", r"batch sizes \(0,\) must be at least 1"),
        ("0:-4", r"batch sizes \(-4,\) must be at least 1"),
    ],
)
def test_bad_schedules(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_step_batch_size(text)
