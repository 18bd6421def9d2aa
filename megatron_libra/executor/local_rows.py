"""Rows of this worker's own tensors that the local part computes with.

In: tokens in compute order. Out: reading and writing them; a contiguous range is a view, so that
inputs are used and results are written where they are.
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

    @classmethod
    def of(cls, rows: NDArray[np.int32], on_device: torch.Tensor) -> LocalRows:
        """Rows given on the host and on the device."""
        count = len(rows)
        start = int(rows[0]) if count else 0
        in_order = bool((rows == np.arange(start, start + count)).all())
        # index_copy_ and index_add_ take no other type
        return cls(start if in_order else None, count, on_device.long())

    @property
    def is_view(self) -> bool:
        """True if the rows are a part of the home tensor and not a copy."""
        return self.start is not None and self.count > 0

    def take(self, home: torch.Tensor) -> torch.Tensor:
        """(count, ...) the rows in compute order; a view where they are contiguous."""
        if not self.count:  # not a view: it would keep the home tensor alive
            return home.new_empty(0, *home.shape[1:])
        if self.start is not None:
            return home[self.start : self.start + self.count]
        return home.index_select(0, self.index)

    def results(self, like: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor]:
        """A new tensor like the home's and, in it, the rows (count, ...) to be computed. Scattered
        rows have no home yet: None, and a tensor of their own."""
        if self.start is None:
            return None, like.new_empty(self.count, *like.shape[1:])
        home = like.new_empty(like.shape)
        return home, self.take(home)

    def bring_home(
        self,
        results: tuple[torch.Tensor | None, torch.Tensor],
        like: torch.Tensor,
        returned: tuple[torch.Tensor, torch.Tensor] | None,
    ) -> torch.Tensor:
        """The whole tensor at home: the computed rows where they belong, and around them what other
        workers returned, or zero.

        Args:
            results: from `results`, computed.
            like: a tensor of the home's shape.
            returned: rows of a mailbox, and for every part of a home row which of them it is.
        """
        home, local = results
        if home is None:
            home = like.new_empty(like.shape) if returned else like.new_zeros(like.shape)
            _gather(home, returned)
            home.index_copy_(0, self.index, local)
            return home
        assert self.start is not None
        num_rows = len(home)
        for first, last in ((0, self.start), (self.start + self.count, num_rows)):
            if first == last:
                continue
            if returned is None:
                home[first:last].zero_()
            else:
                rows, index = returned
                parts = len(index) // num_rows
                _gather(home[first:last], (rows, index[first * parts : last * parts]))
        return home

    def add(self, home: torch.Tensor, values: torch.Tensor) -> None:
        """Add to the rows; home may be wider than values."""
        if self.start is not None:
            home[self.start : self.start + self.count] += values
        elif self.count:
            home.index_add_(0, self.index, values.to(home.dtype))


def _gather(home: torch.Tensor, returned: tuple[torch.Tensor, torch.Tensor] | None) -> None:
    """Fill home rows from a mailbox."""
    if returned is not None and len(home):
        rows, index = returned
        torch.index_select(rows, 0, index, out=home.view(len(index), rows.shape[1]))
