"""Forward and backward of the local part: queries and keys of this worker alone, not in chunks.

In: home tensors. Out: what was computed, and home tensors with the results. `local_calls` has the
kernel calls.
"""

from __future__ import annotations

import torch

from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.computed import Computed
from megatron_libra.executor.local_calls import LocalCall
from megatron_libra.executor.row_moves import wide_dtype

__all__ = ["LocalBackward", "LocalForward", "bring_queries_home", "local_rows"]


def _half(bound: BoundPlan, *, early: bool) -> tuple[LocalCall, ...]:
    return bound.local.calls.early if early else bound.local.calls.late


def local_rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: tuple[torch.Tensor, ...],
    bound: BoundPlan,
) -> Computed:
    """What the local part computes with and makes, of home tensors."""
    take = bound.local.rows.take
    return Computed(take(q), take(k), take(v), take(out), lse)


class LocalForward:
    """Output rows of the local part."""

    def __init__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: BoundPlan, scale: float
    ) -> None:
        self.bound, self.scale = bound, scale
        rows = bound.local.rows
        self.q, self.k, self.v = rows.take(q), rows.take(k), rows.take(v)
        self.out = rows.results(q)
        self._lse: list[torch.Tensor] = []

    def run(self, *, early: bool) -> None:
        """Compute one half; the early one first."""
        for call in _half(self.bound, early=early):
            r, kv = call.bound_round, call.kv_heads
            _, lse = self.bound.runtime.kernel.forward(
                self.q[r.queries, call.query_heads], self.k[r.keys, kv], self.v[r.keys, kv],
                r, self.scale, out=self.out[r.queries, call.query_heads],
            )  # fmt: skip
            self._lse.append(lse)

    @property
    def computed(self) -> Computed:
        """For backward; in place, the home tensors themselves."""
        return Computed(self.q, self.k, self.v, self.out, tuple(self._lse))

    def bring_home(self, returned: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """(T, N, D) the layer's output; see bring_queries_home."""
        return bring_queries_home(self.out, returned, like, self.bound)


class LocalBackward:
    """Gradients of the local part."""

    def __init__(
        self, dout: torch.Tensor, computed: Computed, bound: BoundPlan, scale: float
    ) -> None:
        self.bound, self.scale, self.computed = bound, scale, computed
        rows = bound.local.rows
        self.dout, self.dq = rows.take(dout), rows.results(dout)
        # kv heads that several calls share are summed wide
        self._shares = bound.local.calls.shares_kv
        wide = wide_dtype(dout.dtype) if self._shares else dout.dtype
        self.dk, self.dv = (x.new_empty(x.shape, dtype=wide) for x in (computed.k, computed.v))

    def run(self, *, early: bool) -> None:
        """Compute one half; the early one first."""
        c = self.computed
        for call in _half(self.bound, early=early):
            r, at = call.bound_round, (call.bound_round.queries, call.query_heads)
            kv = (r.keys, call.kv_heads)
            targets = {} if self._shares else {"dk": self.dk[kv], "dv": self.dv[kv]}
            _, dk, dv = self.bound.runtime.kernel.backward(
                self.dout[at], c.q[at], c.k[kv], c.v[kv], c.out[at], c.lse[call.number], r,
                self.scale, dq=self.dq[at], **targets,
            )  # fmt: skip
            if self._shares:
                for total, part in ((self.dk[kv], dk), (self.dv[kv], dv)):
                    total.copy_(part) if call.is_first else total.add_(part)

    def bring_home(self, returned: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
        """(T, N, D) dQ of the layer; see bring_queries_home."""
        return bring_queries_home(self.dq, returned, like, self.bound)

    def keys_at_home(
        self, size: tuple[int, int, int], dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(T, G, D) dK and dV of the local part; zero where it has no keys."""
        rows, homes = self.bound.local.rows, []
        for results in (self.dk.to(dtype), self.dv.to(dtype)):
            if rows.index is None:
                for first, last in self.bound.local.unread:
                    results[first:last].zero_()
                homes.append(results)
            else:
                home = results.new_zeros(size)
                rows.put(home, results)
                homes.append(home)
        return homes[0], homes[1]


def bring_queries_home(
    results: torch.Tensor, returned: torch.Tensor | None, like: torch.Tensor, bound: BoundPlan
) -> torch.Tensor:
    """(T, N, D) the local results, what other workers returned, and zero for padding.

    Args:
        results: of the local part, from LocalRows.results.
        returned: rows of the return's mailbox; None if nothing is exchanged.
        like: (T, N, D).
    """
    rows = bound.local.rows
    home = results if rows.index is None else results.new_empty(like.shape)
    parts = bound.heads.head_split * bound.heads.chunks
    for first, last in bound.local.gaps:
        if returned is None:
            home[first:last].zero_()
        else:
            gather = bound.query_rows_at_home[first * parts : last * parts]
            torch.index_select(
                returned, 0, gather, out=home[first:last].view(len(gather), returned.shape[1])
            )
    if rows.index is not None:
        rows.put(home, results)
    return home
