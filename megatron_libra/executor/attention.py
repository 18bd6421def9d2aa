"""The drop-in attention operator. In: this worker's q, k, v and a bound plan. Out: its attention
output; autograd.

Tensors: q (T, N, D), k and v (T, G, D): T local tokens in the layout's order, N query and G kv
heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_libra.executor.backward import (
    Gradients,
    HomeTensors,
    SavedTensors,
    run_backward,
)
from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.computed import Computed
from megatron_libra.executor.forward import run_forward

__all__ = ["libra_attention", "saved_bytes"]


def libra_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bound_plan: BoundPlan,
    *,
    softmax_scale: float | None = None,
) -> torch.Tensor:
    """Causal attention inside every sample of the pool, balanced over its workers (paper 4.3, 4.4,
    section 5).

    Collective: every worker of the pool calls it in the same layer order, and so does its backward.
    Nothing waits for the device. Without gradients nothing is kept.

    Args:
        q: (T, N, D) queries of this worker's tokens; k, v: (T, G, D). Need not be contiguous.
        bound_plan: from `bind`, of the pool that these tokens belong to.
        softmax_scale: by default 1 / sqrt(D).

    Returns:
        (T, N, D) in q's dtype; exactly zero, as are the gradients, for tokens behind the last
        sample.

    Raises:
        ValueError: a tensor does not fit the plan.
    """
    _check(q, k, v, bound_plan)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        return _LibraAttention.apply(q, k, v, bound_plan, scale)
    return run_forward(q, k, v, bound_plan, scale, keep=False).out


def saved_bytes(bound_plan: BoundPlan, *, backward_kv: str, bytes_per_element: int) -> int:
    """Bytes that one layer keeps from forward to backward on this worker, counted without running
    it. For people who plan memory; training does not call it.

    `save` keeps what was received and computed. `refetch` keeps the home tensors, which a training
    framework mostly holds anyway, and the log-sum-exp.
    """
    heads, plan, shape = bound_plan.heads, bound_plan.plan, bound_plan.plan.shape
    in_place = bound_plan.local.rows.index is None
    tokens = plan.num_local_tokens if in_place else plan.local.query.num_rows
    query = plan.num_query_rows * heads.query_heads_per_shard + tokens * shape.query_heads
    kv = plan.num_kv_rows * heads.kv_heads_per_shard + tokens * shape.kv_heads
    lse = plan.num_query_rows * heads.query_heads_per_shard + bound_plan.local.calls.num_query_rows
    if backward_kv == "refetch":
        elements = plan.num_local_tokens * 2 * (shape.query_heads + shape.kv_heads)
    else:
        elements = 2 * query + 2 * kv
    return elements * shape.head_dim * bytes_per_element + lse * max(4, bytes_per_element)


class _LibraAttention(torch.autograd.Function):
    """Saved tensors, flat: q, k, v, out of the layer (refetch) or of the local part and of each
    step, K/V once a piece (save); then the log-sum-exps of the local part and of each step."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: BoundPlan, scale: float
    ) -> torch.Tensor:
        result = run_forward(q, k, v, bound, scale, keep=True)
        ctx.bound, ctx.scale = bound, scale
        ctx.refetch = bound.runtime.config.backward_kv == "refetch"
        if ctx.refetch:
            kept = [q, k, v, result.out]
        else:
            # computed in place, these are the inputs and the output themselves
            local, in_place = result.local, bound.local.rows.index is None
            kept = [local.q, local.k, local.v, result.out if in_place else local.out]
            for step, computed in zip(bound.steps, result.steps, strict=True):
                kept += [computed.q, computed.out]
                kept += [computed.k, computed.v] if step.brings_kv else []
        lses = [lse for computed in (result.local, *result.steps) for lse in computed.lse]
        ctx.save_for_backward(*kept, *lses)
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved = iter(ctx.saved_tensors)
        read = _home_tensors if ctx.refetch else _saved_tensors
        gradients: Gradients = run_backward(dout, read(saved, ctx.bound), ctx.bound, ctx.scale)
        return (*gradients, None, None)


Tensors = Iterator[torch.Tensor]


def _home_tensors(saved: Tensors, bound: BoundPlan) -> HomeTensors:
    q, k, v, out = islice(saved, 4)
    local = tuple(islice(saved, len(bound.local.calls)))
    return HomeTensors(q, k, v, out, local, tuple(_lses(saved, bound)))


def _saved_tensors(saved: Tensors, bound: BoundPlan) -> SavedTensors:
    q, k, v, out = islice(saved, 4)
    steps: list[tuple[torch.Tensor, ...]] = []
    keys: dict[int, tuple[torch.Tensor, ...]] = {}
    for step in bound.steps:
        step_q, step_out = islice(saved, 2)
        if step.brings_kv:
            keys[step.part] = tuple(islice(saved, 2))
        steps.append((step_q, *keys[step.part], step_out))
    local = Computed(q, k, v, out, tuple(islice(saved, len(bound.local.calls))))
    lses = _lses(saved, bound)
    return SavedTensors(local, [Computed(*s, lse) for s, lse in zip(steps, lses, strict=True)])


def _lses(saved: Tensors, bound: BoundPlan) -> list[tuple[torch.Tensor, ...]]:
    """By step and round."""
    return [tuple(islice(saved, len(bound.rounds[step.part]))) for step in bound.steps]


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: BoundPlan) -> None:
    plan, shape, device = bound.plan, bound.plan.shape, bound.runtime.device
    num_heads = {"q": shape.query_heads, "k": shape.kv_heads, "v": shape.kv_heads}
    for name, tensor in (("q", q), ("k", k), ("v", v)):
        expected = (plan.num_local_tokens, num_heads[name], shape.head_dim)
        if tuple(tensor.shape) != expected:
            raise ValueError(
                f"{name} {tuple(tensor.shape)} must be (local tokens, heads, head dim) = "
                f"{expected} for this plan; pass this worker's tokens in the order of "
                "TokenLayout.positions(cp_rank)."
            )
        if tensor.dtype != q.dtype or tensor.device != q.device:
            raise ValueError(
                f"{name} ({tensor.dtype}, {tensor.device}) must match q ({q.dtype}, {q.device})."
            )
    if q.device.type != device.type or device.index not in (None, q.device.index):
        raise ValueError(
            f"q is on {q.device}, the plan is bound to {device}; bind it with a runtime of that "
            "device."
        )
