"""Backward of one attention layer on one worker. In: home dO and what forward kept. Out: home dQ,
dK, dV.

With `save` only dO travels to the worker that computes; with `refetch` Q, O and dO of a token
travel as one row, and K and V a second time. dK and dV are summed over the rounds and over the
chunks that share kv heads in float32 (float64 for float64), travel home in the inputs' dtype and
are summed there in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from megatron_libra.executor.bind import BoundPlan
from megatron_libra.executor.forward import ComputedChunk, kv_rows, query_rows, returned_buffer
from megatron_libra.executor.pipeliner import run_chunks
from megatron_libra.executor.transfers import (
    PendingRows,
    start_chunk,
    start_dispatch,
    start_return,
    sum_at_home,
)

__all__ = ["HomeTensors", "run_backward"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class HomeTensors:
    """What `refetch` sends again: the layer's tensors at home, and the log-sum-exp that stayed
    where it was made."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: tuple[tuple[torch.Tensor, ...], ...]
    """By chunk and round."""


def run_backward(
    dout: torch.Tensor, kept: list[ComputedChunk] | HomeTensors, bound: BoundPlan, scale: float
) -> Gradients:
    """Gradients of this worker's tokens. Collective: every worker of the pool, in reverse layer
    order.

    Args:
        dout: (T, N, D); need not be contiguous.
        kept: the chunks of forward (`save`) or the home tensors (`refetch`); the same kind on every
            worker.

    Returns:
        dq (T, N, D), dk and dv (T, G, D), in dout's dtype; exactly zero for tokens of the padding
        tail.
    """
    refetch = isinstance(kept, HomeTensors)
    layer = (_Refetched if refetch else _Saved)(dout, kept, bound, scale)
    run_chunks(bound.heads.chunks, layer)
    tokens, shape = bound.plan.num_local_tokens, bound.plan.shape
    dq = layer.returned_dq.index_select(0, bound.query_rows_at_home)
    dk, dv = sum_at_home(layer.returned_dkv, bound.kv_sum)
    kv_shape = (tokens, shape.kv_heads, shape.head_dim)
    return dq.view(dout.shape), dk.view(kv_shape), dv.view(kv_shape)


class _Backward(ABC):
    """State of one backward; dispatch, compute and send_home are the pipeliner's stages."""

    def __init__(self, dout: torch.Tensor, bound: BoundPlan, scale: float) -> None:
        self.bound, self.scale = bound, scale
        self.dout_rows = query_rows(dout, bound)
        heads, head_dim = bound.heads, bound.plan.shape.head_dim
        self.returned_dq = returned_buffer(self.dout_rows, heads.chunks, bound.query.num_sent)
        kv_like = self.dout_rows.new_empty(0, 2 * heads.kv_heads_per_chunk * head_dim)
        self.returned_dkv = returned_buffer(kv_like, heads.kv_pieces, bound.kv.num_sent)
        self.dkv: torch.Tensor | None = None

    @abstractmethod
    def dispatch(self, chunk: int) -> list[PendingRows]:
        """Start what backward needs of a chunk on its way."""

    @abstractmethod
    def arrived_chunk(
        self, chunk: int, arrived: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ComputedChunk]:
        """dO of a chunk, and what forward computed with and made of it."""

    def compute(
        self, chunk: int, arrived: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """dQ rows of a chunk, and the rows of dK and dV if no later chunk adds to them."""
        dout, c = self.arrived_chunk(chunk, arrived)
        k, v = c.kv.unbind(1)
        dqs = [dout[:0]]
        for r, lse in zip(self.bound.rounds, c.lse, strict=True):
            rows = r.queries
            dq, dk, dv = self.bound.runtime.kernel.backward(
                dout[rows], c.q[rows], k[r.keys], v[r.keys], c.out[rows], lse, r, self.scale
            )
            dqs.append(dq)
            self._add(c.kv, r.key_stop, dk, dv)
        dkv_rows = self._take(c.kv) if self.bound.finishes_kv(chunk) else None
        return (dqs[1] if len(dqs) == 2 else torch.cat(dqs)).flatten(1), dkv_rows

    def send_home(
        self, chunk: int, gradients: tuple[torch.Tensor, torch.Tensor | None]
    ) -> list[PendingRows]:
        bound, (dq_rows, dkv_rows) = self.bound, gradients
        num_sent = bound.query.num_sent
        home = self.returned_dq[chunk * num_sent : (chunk + 1) * num_sent]
        pending = [start_return(dq_rows, bound.query, home, bound.runtime.return_)]
        if dkv_rows is not None:
            piece, num_sent = bound.heads.kv_piece_of(chunk), bound.kv.num_sent
            home = self.returned_dkv[piece * num_sent : (piece + 1) * num_sent]
            pending.append(start_return(dkv_rows, bound.kv, home, bound.runtime.return_))
        return pending

    def _add(self, kv: torch.Tensor, key_stop: int, dk: torch.Tensor, dv: torch.Tensor) -> None:
        """Add one call's dK and dV; the first call of a piece covers every resident row."""
        if self.dkv is None:
            wide = torch.float64 if kv.dtype == torch.float64 else torch.float32
            self.dkv = torch.empty(kv.shape, dtype=wide, device=kv.device)
            self.dkv[:, 0].copy_(dk)
            self.dkv[:, 1].copy_(dv)
        else:
            self.dkv[:key_stop, 0] += dk
            self.dkv[:key_stop, 1] += dv

    def _take(self, kv: torch.Tensor) -> torch.Tensor:
        """The summed dK and dV of a piece as rows, in the inputs' dtype."""
        dkv, self.dkv = self.dkv, None
        return (torch.zeros_like(kv) if dkv is None else dkv.to(kv.dtype)).flatten(1)


class _Saved(_Backward):
    """backward_kv = save: everything but dO is already here."""

    def __init__(
        self, dout: torch.Tensor, kept: list[ComputedChunk], bound: BoundPlan, scale: float
    ) -> None:
        super().__init__(dout, bound, scale)
        self.kept = kept

    def dispatch(self, chunk: int) -> list[PendingRows]:
        return [
            start_dispatch(self.dout_rows, self.bound.query, chunk, self.bound.runtime.dispatch)
        ]

    def arrived_chunk(
        self, chunk: int, arrived: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ComputedChunk]:
        kept = self.kept[chunk]
        return arrived[0].view(kept.q.shape), kept


class _Refetched(_Backward):
    """backward_kv = refetch: Q, O, dO and K, V travel again."""

    def __init__(
        self, dout: torch.Tensor, kept: HomeTensors, bound: BoundPlan, scale: float
    ) -> None:
        super().__init__(dout, bound, scale)
        self.lse = kept.lse
        self.rows = torch.cat(
            [query_rows(kept.q, bound), query_rows(kept.out, bound), self.dout_rows], dim=1
        )
        self.kv_rows = kv_rows(kept.k, kept.v, bound)
        self.resident = self.kv_rows

    def dispatch(self, chunk: int) -> list[PendingRows]:
        return start_chunk(self.rows, self.kv_rows, self.bound, chunk)

    def arrived_chunk(
        self, chunk: int, arrived: list[torch.Tensor]
    ) -> tuple[torch.Tensor, ComputedChunk]:
        heads, head_dim = self.bound.heads, self.bound.plan.shape.head_dim
        q, out, dout = arrived[0].view(-1, 3, heads.query_heads_per_chunk, head_dim).unbind(1)
        if len(arrived) > 1:
            self.resident = arrived[1].view(-1, 2, heads.kv_heads_per_chunk, head_dim)
        return dout, ComputedChunk(q, self.resident, out, self.lse[chunk])
