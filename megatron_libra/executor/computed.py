"""What a worker computed with and made, and the gradients that it adds up.

In: tensors of one head chunk, or of the local part. Shapes: D head dim; rows are tokens of head
shards.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_libra.executor.kernels import BoundRound

__all__ = ["Computed", "KVGradient", "wide_dtype"]


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
    """dK and dV of some resident rows, summed over calls in float32 (float64 for float64). The
    result of an only call is taken as it is."""

    def __init__(self, k: torch.Tensor) -> None:
        self._k = k
        self._sum: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_wide = False

    def add(self, r: BoundRound, dk: torch.Tensor, dv: torch.Tensor, *, is_first: bool) -> None:
        """Add one call's part; is_first: no earlier call has touched its keys."""
        if self._sum is None and len(dk) == len(self._k):
            self._sum = dk, dv
            return
        for total, part in zip(self._wide(), (dk, dv), strict=True):
            if is_first:
                total[r.keys].copy_(part)
            else:
                total[r.keys] += part

    def take(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(kv rows, kv heads, D) each, perhaps wide; zero if there was no call."""
        return self._sum or (torch.zeros_like(self._k), torch.zeros_like(self._k))

    def _wide(self) -> tuple[torch.Tensor, torch.Tensor]:
        dtype, shape = wide_dtype(self._k.dtype), self._k.shape
        if self._sum is None:
            self._sum = self._k.new_empty(shape, dtype=dtype), self._k.new_empty(shape, dtype=dtype)
        elif not self._is_wide:
            self._sum = self._sum[0].to(dtype), self._sum[1].to(dtype)
        self._is_wide = True
        return self._sum


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which sums are made."""
    return torch.float64 if dtype == torch.float64 else torch.float32
