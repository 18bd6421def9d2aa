"""What every attention kernel offers, and the round that it is called for.

In: q (Tq, N, D), k and v (Tk, G, D) of one head chunk: T rows, N query heads, G kv heads, D head
dim. Rows may be strided, the last axis is contiguous. Out: tensors of the same shapes. One call is
one varlen attention call of the paper's executor (section 5), causal and bottom-right aligned.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from megatron_libra.plan.worker_plan import Round

__all__ = ["AttentionKernel", "BoundRound", "KernelUnavailable", "bind_round", "written"]


class KernelUnavailable(Exception):
    """A kernel cannot run here; the message says why and the way out."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundRound:
    """One round on the device. Query rows [query_start, query_stop) meet key rows [key_start,
    key_stop)."""

    query_start: int
    query_stop: int
    key_start: int
    key_stop: int
    cu_queries: torch.Tensor
    """(n + 1,) int32, relative to query_start. An entry with zero queries is a filler, and so is
    one with zero keys: its rows of out and dq are not defined."""
    cu_keys: torch.Tensor
    """(n + 1,) int32, relative to key_start; an entry has at least as many keys as queries."""
    max_queries: int
    max_keys: int
    prepared: Any
    """Whatever the kernel's `prepare` made of this round, once per bind."""

    @property
    def queries(self) -> slice:
        """The rows of the compute query buffer that this round computes."""
        return slice(self.query_start, self.query_stop)

    @property
    def keys(self) -> slice:
        """The rows of the resident K/V buffer that this round reads."""
        return slice(self.key_start, self.key_stop)


class AttentionKernel(Protocol):
    """Causal varlen attention of one round. Local: no kernel communicates."""

    name: str
    deterministic: bool
    """True if two backward calls give the same bits."""

    def prepare(self, plan_round: Round, device: torch.device) -> Any:
        """Host work for one round, done once when a plan is bound; the result is
        BoundRound.prepared."""

    def check_sizes(
        self, plan_round: Round, query_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        """Raise ValueError if a call of this round would overflow the kernel's own index type."""

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bound_round: BoundRound,
        scale: float,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out (Tq, N, D) in q's dtype and lse (N, Tq), natural logarithm, float32 (float64
        for float64).

        Args:
            out: where to write it, perhaps a strided view; by default a new tensor.
        """

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bound_round: BoundRound,
        scale: float,
        *,
        dq: torch.Tensor | None = None,
        dk: torch.Tensor | None = None,
        dv: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return dq, dk, dv; rows of fillers are exactly zero. dk and dv may come in a wider dtype
        than k.

        Args:
            dq, dk, dv: where to write them, perhaps strided views; by default new tensors.
        """


def bind_round(
    plan_round: Round,
    kernel: AttentionKernel,
    device: torch.device | str = "cpu",
    *,
    entries: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> BoundRound:
    """A round as a kernel sees it.

    Args:
        entries: cu_queries and cu_keys, if they are on the device already.
    """
    device = torch.device(device)
    if entries is None:
        cu = (plan_round.cu_queries, plan_round.cu_keys)
        cu_queries, cu_keys = (torch.from_numpy(each).to(device) for each in cu)
    else:
        cu_queries, cu_keys = entries
    return BoundRound(
        query_start=plan_round.query_start,
        query_stop=plan_round.query_stop,
        key_start=plan_round.key_start,
        key_stop=plan_round.key_stop,
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=plan_round.max_queries,
        max_keys=plan_round.max_keys,
        prepared=kernel.prepare(plan_round, device),
    )


def written(result: torch.Tensor, target: torch.Tensor | None) -> torch.Tensor:
    """The result, in the target if there is one; for kernels that make their own tensors."""
    return result if target is None else target.copy_(result)
