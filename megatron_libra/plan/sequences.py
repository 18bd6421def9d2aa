"""Read the packed sequences of one pool.

In: P lists of sample lengths. Out: one row per sample.

A zero length is a sample without tokens (a repeated entry of cu_seqlens); it is dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["SamplePool", "check_lengths", "read_samples"]

Int64 = NDArray[np.int64]
MAX_TOKENS = 2**31
"""Positions travel as int32."""


@dataclass(frozen=True, slots=True, eq=False)
class SamplePool:
    """Samples of a pool as columns, slot-major and in token order."""

    lengths: tuple[tuple[int, ...], ...]
    """The sample lengths as they were given, one tuple a slot."""
    num_tokens: Int64
    """(P,) tokens inside samples; what lies behind them is the padding tail."""
    slot: Int64
    """(S,) slot of a sample."""
    start: Int64
    """(S,) first token of a sample in its packed sequence."""
    length: Int64
    """(S,) tokens of a sample."""

    @property
    def num_slots(self) -> int:
        """P, packed sequences of the pool."""
        return len(self.lengths)


def check_lengths(lengths: Sequence[int], slot: int) -> Int64:
    """The lengths as int64; ValueError names the first that is not an integer of at least 0."""
    array = np.asarray(lengths)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        bad = next((x for x in lengths if isinstance(x, bool) or not isinstance(x, int)), lengths)
        raise ValueError(
            f"sequences[{slot}] holds {bad!r}; sample lengths must be integers; "
            "write for example [1200, 3000]."
        )
    if array.min() < 0:
        at = int(array.argmin())
        raise ValueError(
            f"sequences[{slot}][{at}] ({array[at]}) is negative; "
            "sample lengths must be 0 or more tokens; remove the sample or give its true length."
        )
    if array.max() >= MAX_TOKENS:
        raise ValueError(
            f"sequences[{slot}] holds {array.max()}; a sample has fewer than {MAX_TOKENS} tokens; "
            "cut it into shorter samples."
        )
    return array.astype(np.int64)


def read_samples(sequences: Sequence[Sequence[int]], seq_length: int) -> SamplePool:
    """Columns of a pool's samples.

    Args:
        sequences: P lists of sample lengths in tokens.
        seq_length: L, tokens of a packed sequence.

    Raises:
        ValueError: a length is no integer or negative, or a sequence is longer than seq_length.
    """
    columns = [check_lengths(lengths, slot) for slot, lengths in enumerate(sequences)]
    for slot, column in enumerate(columns):
        if column.sum() > seq_length:
            raise ValueError(
                f"sequences[{slot}] sums to {column.sum()} tokens; seq_length ({seq_length}) is "
                "the limit; drop samples or raise seq_length."
            )
    kept = [column[column > 0] for column in columns]
    none = np.zeros(0, np.int64)
    return SamplePool(
        lengths=tuple(tuple(column.tolist()) for column in columns),
        num_tokens=np.array([column.sum() for column in columns], np.int64),
        slot=np.repeat(np.arange(len(kept)), [len(column) for column in kept]).astype(np.int64),
        start=np.concatenate([np.cumsum(column) - column for column in kept] or [none]),
        length=np.concatenate(kept or [none]),
    )
