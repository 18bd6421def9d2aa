"""Backward of one attention layer on one worker. In: home dO and what forward kept. Out: home dQ,
dK, dV.

With `save` only dO travels to the worker that computes; with `refetch` Q, O and dO of a token
travel as one row, and K and V a second time. dK and dV are summed over the rounds and over the
chunks that share kv heads in float32 (float64 for float64) when they leave, travel home in the
inputs' dtype and are summed there in float32.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.computed import Computed, KVGradient
from megatron_libra.executor.local_part import LocalBackward, local_rows
from megatron_libra.executor.pipeliner import run_steps
from megatron_libra.executor.row_moves import RowPart, add_at_home
from megatron_libra.executor.transfers import Dispatch, Return

__all__ = ["Gradients", "HomeTensors", "SavedTensors", "run_backward"]

Gradients = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class SavedTensors:
    """What `save` keeps: everything that the worker computed with, and its results."""

    local: Computed
    steps: list[Computed]


@dataclass(frozen=True, slots=True, eq=False)
class HomeTensors:
    """What `refetch` sends again: the layer's tensors at home, and the log-sum-exp that stayed
    where it was made."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    local_lse: tuple[torch.Tensor, ...]
    """By call."""
    lse: tuple[tuple[torch.Tensor, ...], ...]
    """By step and round."""


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
    run_steps(len(bound.steps), layer)
    return layer.result()


class _Backward(ABC):
    """State of one backward; satisfies Stages."""

    def __init__(self, dout: torch.Tensor, bound: BoundPlan, scale: float) -> None:
        self.dout, self.bound, self.scale = dout, bound, scale
        self.dkv: dict[int, KVGradient] = {}
        """By part."""

    @abstractmethod
    def dispatch(self) -> None:
        """Start what backward needs of all steps on its way."""

    @abstractmethod
    def arrived(self, step: int) -> tuple[torch.Tensor, Computed]:
        """dO of a step, and what forward computed with and made of it."""

    @abstractmethod
    def local_computed(self) -> Computed:
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
        if early:  # its copies, if any, are made when the dispatch is under way
            computed = self.local_computed()
            self.local = LocalBackward(self.dout, computed, self.bound, self.scale)
        self.local.run(early=early)

    def compute(self, step: int) -> None:
        dout, c = self.arrived(step)
        part = self.bound.steps[step].part
        if self.bound.steps[step].brings_kv:
            self.dkv[part] = KVGradient(c.k)
        dq = dout.new_empty(dout.shape)
        for r, lse in zip(self.bound.rounds[part], c.lse, strict=True):
            rows, keys = r.queries, r.keys
            _, dk, dv = self.bound.runtime.kernel.backward(
                dout[rows], c.q[rows], c.k[keys], c.v[keys], c.out[rows], lse, r, self.scale,
                dq=dq[rows],
            )  # fmt: skip
            self.dkv[part].add(r, dk, dv)
        self.returning.send(step, dq.flatten(1), self._finished_dkv(step))

    def _finished_dkv(self, step: int) -> list[RowPart] | None:
        """Parts of dK and dV if no later step adds to them."""
        if not self.bound.steps[step].finishes_kv:
            return None
        return self.dkv.pop(self.bound.steps[step].part).take()

    def result(self) -> Gradients:
        """Bring everything home."""
        shape = self.bound.plan.shape
        size = (self.dout.shape[0], shape.kv_heads, shape.head_dim)
        dk, dv = self.local.keys_at_home(size, self.dout.dtype)
        if not self.bound.steps:
            return self.local.bring_home(None, self.dout), dk, dv
        dq_rows, dkv_rows = self.returning.wait()
        dq = self.local.bring_home(dq_rows, self.dout)
        add_at_home(dk, dv, dkv_rows, self.bound.kv_sum)
        self.returning.close()
        return dq, dk, dv


class _Saved(_Backward):
    """backward_kv = save: everything but dO is already here."""

    def __init__(
        self, dout: torch.Tensor, kept: SavedTensors, bound: BoundPlan, scale: float
    ) -> None:
        super().__init__(dout, bound, scale)
        self.kept = kept

    def dispatch(self) -> None:
        self.arriving = Dispatch(self.bound, (self.dout,))
        self.open_return()

    def arrived(self, step: int) -> tuple[torch.Tensor, Computed]:
        kept = self.kept.steps[step]
        return self.arriving.arrived(step)[0].view(kept.q.shape), kept

    def local_computed(self) -> Computed:
        return self.kept.local


class _Refetched(_Backward):
    """backward_kv = refetch: Q, O, dO and K, V travel again."""

    def __init__(
        self, dout: torch.Tensor, kept: HomeTensors, bound: BoundPlan, scale: float
    ) -> None:
        super().__init__(dout, bound, scale)
        self.kept = kept
        self.resident: dict[int, tuple[torch.Tensor, ...]] = {}
        """K and V by part."""

    def dispatch(self) -> None:
        kept = self.kept
        queries = (kept.q, kept.out, self.dout)
        self.arriving = Dispatch(self.bound, queries, (kept.k, kept.v))
        self.open_return()

    def arrived(self, step: int) -> tuple[torch.Tensor, Computed]:
        heads, head_dim = self.bound.heads, self.bound.plan.shape.head_dim
        part = self.bound.steps[step].part
        rows, kv = self.arriving.arrived(step)
        q, out, dout = rows.view(-1, 3, heads.query_heads_per_chunk, head_dim).unbind(1)
        if kv is not None:
            self.resident[part] = kv.view(-1, 2, heads.kv_heads_per_chunk, head_dim).unbind(1)
        return dout, Computed(q, *self.resident[part], out, self.kept.lse[step])

    def local_computed(self) -> Computed:
        kept = self.kept
        return local_rows(kept.q, kept.k, kept.v, kept.out, kept.local_lse, self.bound)
