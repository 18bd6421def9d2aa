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
from megatron_libra.executor.forward import Computed, joined, kv_rows, local_rows, query_rows
from megatron_libra.executor.kernels import BoundRound
from megatron_libra.executor.pipeliner import run_chunks
from megatron_libra.executor.transfers import Dispatch, Return, sum_at_home

__all__ = ["HomeTensors", "SavedTensors", "run_backward"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensors:
    """What `save` keeps: everything that the worker computed with, and its results."""

    local: Computed
    chunks: list[Computed]


@dataclass(frozen=True, slots=True, eq=False)
class HomeTensors:
    """What `refetch` sends again: the layer's tensors at home, and the log-sum-exp that stayed
    where it was made."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    local_lse: tuple[torch.Tensor, ...]
    """By round."""
    lse: tuple[tuple[torch.Tensor, ...], ...]
    """By chunk and round."""


def run_backward(
    dout: torch.Tensor, kept: SavedTensors | HomeTensors, bound: BoundPlan, scale: float
) -> Gradients:
    """Gradients of this worker's tokens. Collective: every worker of the pool, in reverse layer
    order.

    Args:
        dout: (T, N, D); need not be contiguous.
        kept: what forward left; the same kind on every worker.

    Returns:
        dq (T, N, D), dk and dv (T, G, D), in dout's dtype; exactly zero for tokens of the padding
        tail.
    """
    layer: _Backward
    if isinstance(kept, HomeTensors):
        layer = _Refetched(dout, kept, bound, scale)
    else:
        layer = _Saved(dout, kept, bound, scale)
    run_chunks(bound.heads.chunks if bound.exchanges else 0, layer)
    return layer.result()


class _KVGradient:
    """dK and dV of some resident rows, summed over calls. One call's result is taken as it is."""

    def __init__(self, k: torch.Tensor) -> None:
        self._k = k
        self._sum: tuple[torch.Tensor, torch.Tensor] | None = None
        self._is_own = False

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
        dtype = torch.float64 if self._k.dtype == torch.float64 else torch.float32
        if self._sum is None:
            shape = self._k.shape
            self._sum = self._k.new_empty(shape, dtype=dtype), self._k.new_empty(shape, dtype=dtype)
        elif not self._is_own:  # the kernel's result may be narrow
            self._sum = self._sum[0].to(dtype), self._sum[1].to(dtype)
        self._is_own = True
        return self._sum


class _Backward(ABC):
    """State of one backward; satisfies Stages."""

    def __init__(self, dout: torch.Tensor, bound: BoundPlan, scale: float) -> None:
        self.dout, self.bound, self.scale = dout, bound, scale
        self.local_dqs: list[torch.Tensor] = []

    @abstractmethod
    def dispatch(self) -> None:
        """Start what backward needs of all chunks on its way."""

    @abstractmethod
    def arrived(self, chunk: int) -> tuple[torch.Tensor, Computed]:
        """dO of a chunk, and what forward computed with and made of it."""

    @abstractmethod
    def local(self) -> Computed:
        """What forward computed with and made of the local part."""

    def open_return(self) -> None:
        """Mailboxes for dQ, dK and dV."""
        heads, head_dim = self.bound.heads, self.bound.plan.shape.head_dim
        self.returning = Return(
            self.bound,
            self.dout.dtype,
            query_width=heads.query_heads_per_chunk * head_dim,
            kv_width=2 * heads.kv_heads_per_chunk * head_dim,
        )

    def compute_local(self, *, early: bool) -> None:
        local = self.bound.local
        if early:
            self.local_dout = local_rows(self.dout, self.bound, is_query=True)
            self.computed = self.local()
            self.local_dkv = _KVGradient(self.computed.k)
        first, last = (0, local.num_early_rounds) if early else (local.num_early_rounds, None)
        self.local_dqs += self._attend(
            self.local_dout,
            self.computed,
            local.rounds[first:last],
            self.computed.lse[first:last],
            self.local_dkv,
        )

    def compute(self, chunk: int) -> None:
        dout, c = self.arrived(chunk)
        if self.bound.brings_kv(chunk):
            self.dkv, self.is_new = _KVGradient(c.k), True
        dqs = self._attend(dout, c, self.bound.rounds, c.lse, self.dkv, is_new=self.is_new)
        self.is_new = False
        dkv_rows = None
        if self.bound.finishes_kv(chunk):
            dk, dv = self.dkv.take()
            dkv_rows = torch.cat([dk.flatten(1), dv.flatten(1)], dim=1).to(dout.dtype)
        self.returning.send(chunk, joined(dqs, dout).flatten(1), dkv_rows)

    def result(self) -> Gradients:
        """Bring everything home."""
        bound, heads, shape = self.bound, self.bound.heads, self.bound.plan.shape
        tokens, dtype = self.dout.shape[0], self.dout.dtype
        query = (tokens * heads.head_split, heads.query_heads_per_shard, shape.head_dim)
        kv = (tokens * heads.kv_shards, heads.kv_heads_per_shard, shape.head_dim)
        local_dq = joined(self.local_dqs, self.local_dout)
        local_dkv = self.local_dkv.take()
        if bound.exchanges:
            dq_rows, dkv_rows = self.returning.wait()
            dq = dq_rows.index_select(0, bound.query_rows_at_home)
            bound.local.query.put(dq.view(query), local_dq)
            returned = sum_at_home(dkv_rows, bound.kv_sum)
            self.returning.close()
            halves = [
                self._with_local(x.view(kv), y) for x, y in zip(returned, local_dkv, strict=True)
            ]
        else:
            dq = bound.local.query.spread(local_dq, query[0])
            halves = [bound.local.kv.spread(x, kv[0]) for x in local_dkv]
        dk, dv = (x.to(dtype).view(tokens, shape.kv_heads, shape.head_dim) for x in halves)
        return dq.view(self.dout.shape), dk, dv

    def _with_local(self, home: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """What came back, and the local part's share, summed wide."""
        rows = self.bound.local.kv
        if rows.count:
            home = home.to(torch.float64 if home.dtype == torch.float64 else torch.float32)
            rows.add(home, local)
        return home

    def _attend(
        self,
        dout: torch.Tensor,
        c: Computed,
        rounds: tuple[BoundRound, ...],
        lses: tuple[torch.Tensor, ...],
        dkv: _KVGradient,
        *,
        is_new: bool = True,
    ) -> list[torch.Tensor]:
        """dQ of each round; dK and dV are added to dkv, whose rows the first round covers."""
        dqs = []
        for r, lse in zip(rounds, lses, strict=True):
            rows, keys = r.queries, r.keys
            dq, dk, dv = self.bound.runtime.kernel.backward(
                dout[rows], c.q[rows], c.k[keys], c.v[keys], c.out[rows], lse, r, self.scale
            )
            dqs.append(dq)
            dkv.add(r, dk, dv, is_first=is_new and r is rounds[0])
        return dqs


class _Saved(_Backward):
    """backward_kv = save: everything but dO is already here."""

    def __init__(
        self, dout: torch.Tensor, kept: SavedTensors, bound: BoundPlan, scale: float
    ) -> None:
        super().__init__(dout, bound, scale)
        self.kept = kept

    def dispatch(self) -> None:
        self.arriving = Dispatch(self.bound, query_rows(self.dout, self.bound))
        self.open_return()

    def arrived(self, chunk: int) -> tuple[torch.Tensor, Computed]:
        kept = self.kept.chunks[chunk]
        return self.arriving.arrived(chunk)[0].view(kept.q.shape), kept

    def local(self) -> Computed:
        return self.kept.local


class _Refetched(_Backward):
    """backward_kv = refetch: Q, O, dO and K, V travel again."""

    def __init__(
        self, dout: torch.Tensor, kept: HomeTensors, bound: BoundPlan, scale: float
    ) -> None:
        super().__init__(dout, bound, scale)
        self.kept = kept

    def dispatch(self) -> None:
        kept, bound = self.kept, self.bound
        rows = [query_rows(x, bound) for x in (kept.q, kept.out, self.dout)]
        self.arriving = Dispatch(bound, torch.cat(rows, dim=1), kv_rows(kept.k, kept.v, bound))
        self.open_return()

    def arrived(self, chunk: int) -> tuple[torch.Tensor, Computed]:
        heads, head_dim = self.bound.heads, self.bound.plan.shape.head_dim
        rows, kv = self.arriving.arrived(chunk)
        q, out, dout = rows.view(-1, 3, heads.query_heads_per_chunk, head_dim).unbind(1)
        if kv is not None:
            self.resident = kv.view(-1, 2, heads.kv_heads_per_chunk, head_dim).unbind(1)
        return dout, Computed(q, *self.resident, out, self.kept.lse[chunk])

    def local(self) -> Computed:
        kept, bound = self.kept, self.bound
        q, out = (local_rows(x, bound, is_query=True) for x in (kept.q, kept.out))
        k, v = (local_rows(x, bound, is_query=False) for x in (kept.k, kept.v))
        return Computed(q, k, v, out, kept.local_lse)
