"""Forward and backward of the local part: queries and keys of this worker alone, all heads at once.

In: home tensors. Out: what was computed, and home tensors that hold the results already where the
local rows are contiguous. Heads are computed in several calls only where one call would be too
large for the kernel.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from megatron_libra.executor.bind import BoundPlan
from megatron_libra.executor.computed import Computed, KVGradient
from megatron_libra.executor.kernels import BoundRound

__all__ = ["LocalBackward", "LocalForward"]


@dataclass(frozen=True, slots=True)
class _Call:
    """One kernel call: a round and a range of heads."""

    number: int
    """Among all calls of the local part: its log-sum-exp."""
    bound_round: BoundRound
    piece: int
    """The range of kv heads."""
    query_heads: slice
    kv_heads: slice


def _calls(bound: BoundPlan, *, early: bool) -> Iterator[_Call]:
    local, heads = bound.local, bound.local.heads
    width, kv_width = heads.query_heads_per_chunk, heads.kv_heads_per_chunk
    for number, bound_round in enumerate(local.rounds):
        if (number < local.num_early_rounds) is not early:
            continue
        for chunk in range(heads.chunks):
            piece = heads.kv_piece_of(chunk)
            yield _Call(
                number * heads.chunks + chunk,
                bound_round,
                piece,
                slice(chunk * width, (chunk + 1) * width),
                slice(piece * kv_width, (piece + 1) * kv_width),
            )


class LocalForward:
    """Output rows of the local part."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: BoundPlan, scale: float
    ) -> None:
        self.bound, self.scale = bound, scale
        self._q = q
        self.q = bound.local.query.take(q)
        self.k, self.v = bound.local.kv.take(k), bound.local.kv.take(v)
        self._results = bound.local.query.results(q)
        self._lse: list[torch.Tensor] = []

    def run(self, *, early: bool) -> None:
        """Compute one half; the early one first."""
        out = self._results[1]
        for call in _calls(self.bound, early=early):
            r, kv = call.bound_round, call.kv_heads
            _, lse = self.bound.runtime.kernel.forward(
                self.q[r.queries, call.query_heads], self.k[r.keys, kv], self.v[r.keys, kv],
                r, self.scale, out=out[r.queries, call.query_heads],
            )  # fmt: skip
            self._lse.append(lse)

    @property
    def computed(self) -> Computed:
        """For backward."""
        return Computed(self.q, self.k, self.v, self._results[1], tuple(self._lse))

    def bring_home(self, returned: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """(T, N, D) the layer's output; see LocalRows.bring_home."""
        return self.bound.local.query.bring_home(self._results, self._q, returned)


class LocalBackward:
    """Gradients of the local part."""

    def __init__(
        self, dout: torch.Tensor, computed: Computed, bound: BoundPlan, scale: float
    ) -> None:
        self.bound, self.scale, self.computed = bound, scale, computed
        self._dout = dout
        self.dout = bound.local.query.take(dout)
        self._results = bound.local.query.results(dout)
        heads = bound.local.heads
        width = heads.kv_heads_per_chunk
        self._dkv = [
            KVGradient(computed.k[:, piece * width : (piece + 1) * width])
            for piece in range(heads.kv_pieces)
        ]

    def run(self, *, early: bool) -> None:
        """Compute one half; the early one first."""
        c, dq, heads = self.computed, self._results[1], self.bound.local.heads
        firsts = {0, self.bound.local.num_early_rounds}
        for call in _calls(self.bound, early=early):
            r, kv = call.bound_round, call.kv_heads
            at = (r.queries, call.query_heads)
            _, dk, dv = self.bound.runtime.kernel.backward(
                self.dout[at], c.q[at], c.k[r.keys, kv], c.v[r.keys, kv], c.out[at],
                c.lse[call.number], r, self.scale, dq=dq[at],
            )  # fmt: skip
            number, chunk = divmod(call.number, heads.chunks)
            is_first = number in firsts and (
                chunk == 0 or heads.kv_piece_of(chunk - 1) != call.piece
            )
            self._dkv[call.piece].add(r, dk, dv, is_first=is_first)

    def take_dkv(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(kv rows, G, D) dK and dV, perhaps wide."""
        pieces = [gradient.take() for gradient in self._dkv]
        if len(pieces) == 1:
            return pieces[0]
        dk, dv = (torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
        return dk, dv

    def bring_home(self, returned: tuple[torch.Tensor, torch.Tensor] | None) -> torch.Tensor:
        """(T, N, D) dQ of the layer; see LocalRows.bring_home."""
        return self.bound.local.query.bring_home(self._results, self._dout, returned)
