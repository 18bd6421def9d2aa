"""Read the packed sequences of one pool.

In: P lists of sample lengths. Out: one row per sample.

A zero length is a sample without tokens (a repeated entry of cu_seqlens); it is dropped.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import MAX_INTEGER

__all__ = ["SamplePool", "check_lengths", "read_rows", "read_samples"]

Int64 = NDArray[np.int64]


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


def read_rows(sequences: Iterable[Iterable[int]]) -> list[Sequence[int]]:
    """The sequences as lists that can be read twice: arrays and generators are welcome too.

    Raises:
        ValueError: something else stands where a list should; the lengths are not checked.
    """
    if not isinstance(sequences, Iterable):
        raise ValueError(
            f"sequences ({sequences!r}) must be a list of lists of sample lengths; "
            "write for example [[1200, 3000], [4200]]."
        )
    return [_read_row(row, slot) for slot, row in enumerate(sequences)]


def _is_integers(row: object) -> bool:
    return isinstance(row, np.ndarray) and row.ndim == 1 and row.dtype.kind in "iu"


def _read_row(row: Iterable[int], slot: int) -> Sequence[int]:
    if isinstance(row, list | tuple) or _is_integers(row):
        return row  # type: ignore[return-value]
    if not isinstance(row, Iterable):
        raise ValueError(
            f"sequences[{slot}] ({row!r}) must be a list of sample lengths; "
            "write for example [1200, 3000]."
        )
    return list(row)


def check_lengths(lengths: Sequence[int], slot: int) -> Int64:
    """The lengths as int64; ValueError names the first that is not an integer of at least 0."""
    # a list is not judged by NumPy's dtype, which makes one of True and 20
    for kind in set() if _is_integers(lengths) else set(map(type, lengths)):
        if issubclass(kind, bool) or not issubclass(kind, int | np.integer):
            bad = next(length for length in lengths if type(length) is kind)
            raise ValueError(
                f"sequences[{slot}] holds {bad!r}; sample lengths must be integers; "
                "write for example [1200, 3000]."
            )
    array = np.asarray(lengths)
    if array.size == 0:
        return np.zeros(0, np.int64)
    if array.min() < 0:
        at = int(array.argmin())
        raise ValueError(
            f"sequences[{slot}][{at}] ({array[at]}) is negative; "
            "sample lengths must be 0 or more tokens; remove the sample or give its true length."
        )
    if array.max() > MAX_INTEGER:
        raise ValueError(
            f"sequences[{slot}] holds {max(lengths)}; a sample has fewer than {MAX_INTEGER + 1} "
            "tokens; cut it into shorter samples."
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
