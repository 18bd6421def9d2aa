"""The drop-in attention operator. In: this worker's q, k, v and a bound plan. Out: its attention
output; autograd.

Tensors: q (T, N, D), k and v (T, G, D): T local tokens in the layout's order, N query and G kv
heads, D head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from megatron_libra.executor.backward import Gradients, HomeTensors, run_backward
from megatron_libra.executor.bind import BoundPlan
from megatron_libra.executor.forward import ComputedChunk, run_forward

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
    out = run_forward(q, k, v, bound_plan, scale, keep=False).out
    assert out is not None
    return out


def saved_bytes(bound_plan: BoundPlan, *, backward_kv: str, bytes_per_element: int) -> int:
    """Bytes that one layer keeps from forward to backward on this worker.

    `save` keeps what was received and computed. `refetch` keeps the home tensors, which a training
    framework mostly holds anyway, and the log-sum-exp.
    """
    heads, shape = bound_plan.heads, bound_plan.plan.shape
    lse = bound_plan.query.num_rows * heads.query_heads_per_shard * max(4, bytes_per_element)
    if backward_kv == "refetch":
        elements = bound_plan.plan.num_local_tokens * 2 * (shape.query_heads + shape.kv_heads)
    else:
        elements = 2 * bound_plan.query.num_rows * heads.query_heads_per_shard
        elements += 2 * bound_plan.kv.num_rows * heads.kv_heads_per_shard
    return elements * shape.head_dim * bytes_per_element + lse


class _LibraAttention(torch.autograd.Function):
    """Saved tensors, flat: for each chunk q, out and its lse; then K/V pieces (save) or q, k, v,
    out (refetch)."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bound: BoundPlan, scale: float
    ) -> torch.Tensor:
        result = run_forward(q, k, v, bound, scale, keep=True)
        ctx.bound, ctx.scale = bound, scale
        ctx.refetch = bound.runtime.config.backward_kv == "refetch"
        lses = [lse for chunk in result.chunks for lse in chunk.lse]
        if ctx.refetch:
            ctx.save_for_backward(q, k, v, result.out, *lses)
        else:
            pieces = [c.kv for m, c in enumerate(result.chunks) if bound.brings_kv(m)]
            both = [tensor for chunk in result.chunks for tensor in (chunk.q, chunk.out)]
            ctx.save_for_backward(*pieces, *both, *lses)
        assert result.out is not None
        return result.out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        bound, tensors = ctx.bound, ctx.saved_tensors
        kept = _home_tensors(tensors, bound) if ctx.refetch else _computed_chunks(tensors, bound)
        gradients: Gradients = run_backward(dout, kept, bound, ctx.scale)
        return (*gradients, None, None)


def _by_chunk(
    lses: tuple[torch.Tensor, ...], bound: BoundPlan
) -> tuple[tuple[torch.Tensor, ...], ...]:
    rounds = len(bound.rounds)
    return tuple(lses[m * rounds : (m + 1) * rounds] for m in range(bound.heads.chunks))


def _home_tensors(tensors: tuple[torch.Tensor, ...], bound: BoundPlan) -> HomeTensors:
    q, k, v, out, *lses = tensors
    return HomeTensors(q, k, v, out, _by_chunk(tuple(lses), bound))


def _computed_chunks(tensors: tuple[torch.Tensor, ...], bound: BoundPlan) -> list[ComputedChunk]:
    heads = bound.heads
    pieces, rest = tensors[: heads.kv_pieces], tensors[heads.kv_pieces :]
    lses = _by_chunk(rest[2 * heads.chunks :], bound)
    return [
        ComputedChunk(rest[2 * m], pieces[heads.kv_piece_of(m)], rest[2 * m + 1], lses[m])
        for m in range(heads.chunks)
    ]


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
