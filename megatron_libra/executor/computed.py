"""What a worker computed with and made, and the gradients that it adds up.

In: tensors of one head chunk, or of the local part. Shapes: D head dim; rows are tokens of head
shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_libra.executor.kernels import BoundRound
from megatron_libra.executor.row_moves import MOST_PARTS, RowPart, gather_sums, wide_dtype

__all__ = ["Computed", "KVGradient"]


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """What a worker computed with, and made: of one head chunk, or of its local part."""

    q: torch.Tensor
    """(query rows, heads, D)."""
    k: torch.Tensor
    """(kv rows, kv heads, D); chunks that share kv heads share it."""
    v: torch.Tensor
    out: torch.Tensor
    """(query rows, heads, D)."""
    lse: tuple[torch.Tensor, ...]
    """For each call, (heads, queries of the call)."""


class KVGradient:
    """dK and dV of some resident rows: results of several calls, added when they leave.

    Results stay in the dtype in which the kernel gave them; more of them than one sum takes are
    summed in float32 (float64 for float64) before.
    """

    def __init__(self, k: torch.Tensor) -> None:
        self._k = k
        self._parts: list[RowPart] = []

    def add(self, r: BoundRound, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add one call's part; the first one has all rows."""
        assert self._parts or len(dk) == len(self._k)
        if len(self._parts) == MOST_PARTS:
            self._parts = [self._added()]
        self._parts.append(RowPart(r.key_start, (dk.flatten(1), dv.flatten(1))))

    def take(self) -> list[RowPart]:
        """What to add up, (kv rows, width) each; zero if there was no call."""
        if not self._parts:
            zero = torch.zeros_like(self._k).flatten(1)
            return [RowPart(0, (zero, zero))]
        return self._parts

    def _added(self) -> RowPart:
        width, dtype = self._k.shape[1] * self._k.shape[2], wide_dtype(self._k.dtype)
        total = self._k.new_empty(len(self._k), 2 * width, dtype=dtype)
        gather_sums(self._parts, None, total)
        return RowPart(0, total.split(width, dim=1))
