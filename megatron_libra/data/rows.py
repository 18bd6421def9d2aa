"""Hold lists of lengths as two arrays. In: rows of lengths, or a .npz file. Out: LengthRows.

A row is a packed sequence (or one jsonl line, or one document): ten million rows are two NumPy
arrays, never ten million lists.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megatron_libra.data.numpy_files import read_npz
from megatron_libra.data.words import shortened

__all__ = ["Int64", "LengthRows", "as_lengths", "offsets_of", "read_npz", "require_file"]

Int64 = NDArray[np.int64]
MAX_TOKENS = 2**31
"""Positions travel as int32."""


def as_lengths(values: ArrayLike, name: str = "lengths") -> Int64:
    """One-dimensional int64 array of lengths of at least 0 tokens.

    Args:
        values: integers.
        name: what an error calls them.

    Raises:
        ValueError: a value is no integer, is negative, or is too large for a position.
    """
    if isinstance(values, list) and not set(map(type, values)) <= {int}:
        _refuse_first(values, name)
    array = np.asarray(values)
    if array.size == 0 and array.ndim == 1:
        return np.zeros(0, np.int64)
    if array.ndim == 1 and array.dtype.kind == "O":  # Python integers above int64
        _refuse_first(array.tolist(), name)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(
            f"{name} ({array.dtype}, {array.ndim} dimensions) must be a flat list of integers "
            f"below {MAX_TOKENS}; try numpy.asarray({name}, dtype=numpy.int64)."
        )
    if array.min() < 0 or array.max() >= MAX_TOKENS:
        _refuse_first(array.tolist(), name)
    return array.astype(np.int64)


def _is_no_length(value: Any) -> bool:
    is_integer = isinstance(value, Integral) and not isinstance(value, bool)
    return not (is_integer and 0 <= int(value) < MAX_TOKENS)


def _refuse_first(values: Sequence[Any], name: str) -> None:
    """ValueError for the first value that is no length."""
    for at, value in enumerate(values):
        if _is_no_length(value):
            raise ValueError(
                f"{name}[{at}] ({shortened(repr(value))}) must be an integer of 0 to "
                f"{MAX_TOKENS - 1}; remove the entry or give its true length in tokens."
            )


@dataclass(frozen=True, slots=True, eq=False)
class LengthRows:
    """Rows of lengths; a LengthTable.

    Example: the rows [3, 5] and [8] are flat = [3, 5, 8] with offsets = [0, 2, 3].
    """

    flat: Int64
    """(N,) all lengths in tokens, row after row."""
    offsets: Int64
    """(rows + 1,) row i is flat[offsets[i]:offsets[i + 1]]."""

    def __post_init__(self) -> None:
        steps = np.diff(self.offsets)
        if self.offsets.size < 1 or (steps < 0).any() or self.offsets[0] != 0:
            raise ValueError("offsets must rise from 0; write them again with LengthRows.save.")
        if self.offsets[-1] != self.flat.size:
            raise ValueError(
                f"offsets end at {self.offsets[-1]}, but there are {self.flat.size} lengths; they "
                "must agree; write them again with LengthRows.save."
            )

    @classmethod
    def from_rows(cls, rows: Sequence[Sequence[int]]) -> LengthRows:
        """Rows given as lists of lengths; ValueError if one holds anything else."""
        try:
            flat = as_lengths(list(chain.from_iterable(rows)))
        except ValueError:
            for row, values in enumerate(rows):
                as_lengths(list(values), f"lengths[{row}]")  # raises again, with the place
            raise
        return cls(flat, offsets_of(np.fromiter(map(len, rows), np.int64, len(rows))))

    @classmethod
    def from_flat(cls, lengths: ArrayLike) -> LengthRows:
        """One row for each length."""
        flat = as_lengths(lengths)
        return cls(flat, np.arange(flat.size + 1, dtype=np.int64))

    @classmethod
    def concatenate(cls, parts: Sequence[LengthRows]) -> LengthRows:
        """The rows of all parts, in order."""
        flat = [np.zeros(0, np.int64), *(part.flat for part in parts)]
        counts = [np.zeros(0, np.int64), *(np.diff(part.offsets) for part in parts)]
        return cls(np.concatenate(flat), offsets_of(np.concatenate(counts)))

    @classmethod
    def load(cls, path: Path) -> LengthRows:
        """Rows that `save` wrote; ValueError if the file is none of that kind."""
        arrays = read_npz(path)
        if not {"lengths", "offsets"} <= arrays.keys():
            raise ValueError(
                f"{path} holds {sorted(arrays)}; it must hold lengths and offsets; write it with "
                "LengthRows.save."
            )
        lengths, offsets = arrays["lengths"], arrays["offsets"]
        if offsets.ndim != 1 or offsets.dtype.kind not in "iu":
            raise ValueError(
                f"{path}: offsets ({offsets.dtype}, {offsets.ndim} dimensions) must be a flat list "
                "of integers; write it again with LengthRows.save."
            )
        return cls(as_lengths(lengths, f"{path}: lengths"), offsets.astype(np.int64))

    def save(self, path: Path, **extra: str) -> None:
        """Write a .npz with lengths (int32), offsets and `extra`; complete or not at all."""
        scratch = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        arrays: dict[str, Any] = {"lengths": self.flat.astype(np.int32), "offsets": self.offsets}
        try:
            with scratch.open("wb") as stream:
                np.savez(stream, **arrays | extra)
            scratch.replace(path)
        finally:
            scratch.unlink(missing_ok=True)

    def __len__(self) -> int:
        return int(self.offsets.size) - 1

    def lengths(self, sample_index: int) -> tuple[int, ...]:
        """The lengths of one row; IndexError outside [0, len)."""
        if not 0 <= sample_index < len(self):
            raise IndexError(f"row {sample_index} is outside [0, {len(self)}).")
        start, stop = self.offsets[sample_index], self.offsets[sample_index + 1]
        return tuple(self.flat[start:stop].tolist())

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return (self.lengths(row) for row in range(len(self)))

    def row_sums(self, values: Int64 | None = None) -> Int64:
        """(rows,) sum of each row's lengths, or of `values`, one for each length."""
        sums = offsets_of(self.flat if values is None else values)
        return sums[self.offsets[1:]] - sums[self.offsets[:-1]]

    def take(self, order: ArrayLike) -> LengthRows:
        """The rows of `order`, in that order."""
        chosen = np.asarray(order, dtype=np.int64)
        counts = np.diff(self.offsets)[chosen]
        offsets = offsets_of(counts)
        within = np.arange(offsets[-1]) - np.repeat(offsets[:-1], counts)
        return LengthRows(self.flat[np.repeat(self.offsets[:-1][chosen], counts) + within], offsets)


def offsets_of(counts: Int64) -> Int64:
    """(N + 1,) running sums from 0: the offsets of rows with these numbers of lengths."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts, dtype=np.int64)])


def require_file(path: Path) -> Path:
    """The path; ValueError unless it is a file that may be read."""
    if not path.is_file():
        kind = "is a folder" if path.is_dir() else "is no regular file"
        what = kind if path.exists() else "does not exist"
        raise ValueError(f"{path} {what}; give the path of a file.")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path} may not be read by this user; check its permissions.")
    return path
