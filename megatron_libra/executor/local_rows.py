"""Rows of this worker's own tensors that the local part computes with.

In: row numbers in compute order. Out: reading and writing them; a contiguous range is a view and
costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["LocalRows"]


@dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """Rows of a tensor at home, in compute order, each at most once."""

    start: int | None
    """First row of a contiguous range in order; None if the rows are scattered."""
    count: int
    index: torch.Tensor
    """(count,) int64."""
    is_all: bool
    """True if they are all rows of the tensor, in order."""

    @classmethod
    def of(cls, rows: NDArray[np.int32], on_device: torch.Tensor, num_rows: int) -> LocalRows:
        """Rows given on the host and on the device, of tensors with num_rows rows."""
        count = len(rows)
        start = int(rows[0]) if count else 0
        in_order = bool((rows == np.arange(start, start + count)).all())
        return cls(
            start=start if in_order else None,
            count=count,
            # index_copy_ and index_add_ take no other type
            index=on_device.long(),
            is_all=in_order and count == num_rows,
        )

    def take(self, home: torch.Tensor) -> torch.Tensor:
        """(count, ...) the rows in compute order; a view where they are contiguous."""
        if self.start is not None:
            return home[self.start : self.start + self.count]
        return home.index_select(0, self.index)

    def put(self, home: torch.Tensor, values: torch.Tensor) -> None:
        """Overwrite the rows."""
        if self.start is not None:
            home[self.start : self.start + self.count].copy_(values)
        elif self.count:
            home.index_copy_(0, self.index, values.to(home.dtype))

    def add(self, home: torch.Tensor, values: torch.Tensor) -> None:
        """Add to the rows; home may be wider than values."""
        if self.start is not None:
            home[self.start : self.start + self.count] += values
        elif self.count:
            home.index_add_(0, self.index, values.to(home.dtype))

    def spread(self, values: torch.Tensor, num_rows: int) -> torch.Tensor:
        """(num_rows, ...) the rows of a new tensor that is zero elsewhere; values itself if it is
        all of it."""
        if self.is_all:
            return values
        home = values.new_zeros(num_rows, *values.shape[1:])
        self.put(home, values)
        return home
