"""Sequences of an optimizer step. In: consumed samples. Out: the global batch size.

A sampler that looks ahead cannot ask Megatron's calculator, which knows the current step only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["BatchSize", "StepBatchSize", "constant_batch_size", "parse_step_batch_size"]

BatchSize = Callable[[int], int]
"""Consumed samples -> GBS, packed sequences of the step that starts there."""
SUFFIXES = {"K": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


@dataclass(frozen=True, slots=True)
class StepBatchSize:
    """A BatchSize that changes at thresholds: sizes[i] from thresholds[i] consumed samples on."""

    thresholds: tuple[int, ...]
    """Consumed samples, rising from 0."""
    sizes: tuple[int, ...]
    """GBS, one for each threshold."""

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in zip(self.thresholds, self.thresholds[1:], strict=False))
        if not self.thresholds or self.thresholds[0] != 0 or not rising:
            raise ValueError(
                f"batch size thresholds {self.thresholds} (in samples) must rise from 0; "
                "try 0:64 100000:128."
            )
        if len(self.sizes) != len(self.thresholds) or min(self.sizes) < 1:
            raise ValueError(
                f"batch sizes {self.sizes} must be at least 1 and one for each threshold "
                f"{self.thresholds}; try 0:64 100000:128."
            )

    def __call__(self, consumed_samples: int) -> int:
        return self.sizes[bisect_right(self.thresholds, consumed_samples) - 1]


def constant_batch_size(size: int) -> StepBatchSize:
    """The same global batch size at every step."""
    return StepBatchSize((0,), (size,))


def parse_step_batch_size(text: str, *, seq_length: int | None = None) -> StepBatchSize:
    """Read Megatron's --step-batch-size-schedule.

    Args:
        text: "THRESHOLD:GBS ..." with optional suffixes K, M, B, T, such as "0:768 250B:1536".
        seq_length: if given, thresholds are tokens and become samples by floor division.

    Raises:
        ValueError: an entry is unreadable, or thresholds do not rise from 0.
    """
    entries = sorted(map(_entry, text.replace(",", " ").split()))
    return StepBatchSize(
        thresholds=tuple(threshold // (seq_length or 1) for threshold, _ in entries),
        sizes=tuple(size for _, size in entries),
    )


def _entry(text: str) -> tuple[int, int]:
    threshold, colon, size = text.partition(":")
    try:
        if not colon:
            raise ValueError
        return _number(threshold), _number(size)
    except (ValueError, OverflowError):  # of infinity
        raise ValueError(
            f"batch size schedule entry {text!r} must be THRESHOLD:GBS with numbers; try 250B:1536."
        ) from None


def _number(text: str) -> int:
    """A number with an optional suffix; decimal fractions such as 1.5M are allowed."""
    factor = SUFFIXES.get(text[-1:].upper(), 1)
    return int(float(text[:-1] if factor > 1 else text) * factor)
