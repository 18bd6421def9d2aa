"""Forward of one attention layer on one worker. In: home Q, K, V. Out: home O, and what backward
needs.

Shapes: T local tokens, N query heads, G kv heads, D head dim; rows are one token x one head shard
(x one chunk).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.computed import Computed
from megatron_libra.executor.local_part import LocalForward
from megatron_libra.executor.pipeliner import run_steps
from megatron_libra.executor.transfers import Dispatch, Return

__all__ = ["ForwardResult", "run_forward"]


@dataclass(slots=True, eq=False)
class ForwardResult:
    """Output of one layer."""

    out: torch.Tensor
    """(T, N, D) at home."""
    local: Computed
    steps: list[Computed] = field(default_factory=list)
    """By step; empty unless asked for, or if nothing is exchanged."""


def run_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: BoundPlan, scale: float, *, keep: bool
) -> ForwardResult:
    """Compute the attention of this worker's tokens. Collective: every worker of the pool, in layer
    order.

    Args:
        q: (T, N, D), k and v (T, G, D), same dtype; need not be contiguous.
        keep: return what was received and computed, for backward.
    """
    layer = _Forward(q, k, v, bound, scale, keep)
    run_steps(len(bound.steps), layer)
    return layer.result()


class _Forward:
    """State of one forward; satisfies Stages."""

    def __init__(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bound: BoundPlan,
        scale: float,
        keep: bool,
    ) -> None:
        self.home, self.bound, self.scale, self.keep = (q, k, v), bound, scale, keep
        self.steps: list[Computed] = []
        self.resident: dict[int, tuple[torch.Tensor, ...]] = {}
        """K and V by part."""

    def dispatch(self) -> None:
        q, k, v = self.home
        heads, head_dim = self.bound.heads, self.bound.plan.shape.head_dim
        self.arriving = Dispatch(self.bound, (q,), (k, v))
        width = heads.query_heads_per_chunk * head_dim
        self.returning = Return(self.bound, q.dtype, query_width=width)

    def compute_local(self, *, early: bool) -> None:
        if early:  # its copies, if any, are made when the dispatch is under way
            self.local = LocalForward(*self.home, self.bound, self.scale)
        self.local.run(early=early)

    def compute(self, step: int) -> None:
        heads, head_dim = self.bound.heads, self.bound.plan.shape.head_dim
        part = self.bound.steps[step].part
        q_rows, kv_rows = self.arriving.arrived(step)
        q = q_rows.view(-1, heads.query_heads_per_chunk, head_dim)
        if kv_rows is not None:
            kv = kv_rows.view(-1, 2, heads.kv_heads_per_chunk, head_dim)
            self.resident[part] = kv.unbind(1)
        k, v = self.resident[part]
        kernel, out, lses = self.bound.runtime.kernel, torch.empty_like(q), []
        for r in self.bound.rounds[part]:
            rows, keys = r.queries, r.keys
            _, lse = kernel.forward(q[rows], k[keys], v[keys], r, self.scale, out=out[rows])
            lses.append(lse)
        self.returning.send(step, out.flatten(1))
        if self.keep:
            self.steps.append(Computed(q, k, v, out, tuple(lses)))

    def result(self) -> ForwardResult:
        """Bring everything home."""
        if not self.bound.steps:
            return ForwardResult(self.local.bring_home(None, self.home[0]), self.local.computed)
        (mailbox_rows,) = self.returning.wait()
        out = self.local.bring_home(mailbox_rows, self.home[0])
        self.returning.close()
        return ForwardResult(out, self.local.computed, self.steps)
