"""One attention layer of one worker, for tests. Out: bound plans, leaves, results."""

from __future__ import annotations

from typing import Any

import torch

from megatron_libra.config import LibraConfig
from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.inputs import pool_tensors, worker_tensors
from megatron_libra.executor.kernels import AttentionKernel
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.transport import LoopbackTransport
from megatron_libra.plan.pool_plan import PoolPlan
from tests.helpers.cases import CASES, plan_of

__all__ = ["ONE", "alone", "gradients", "leaves"]

ONE = plan_of(CASES["one_worker"])


def alone(plan: PoolPlan = ONE, kernel: AttentionKernel | None = None, **libra: Any) -> BoundPlan:
    """A bound plan of a pool of one worker, without torch.distributed."""
    loop, config = LoopbackTransport(), LibraConfig(**libra)
    runtime = PoolRuntime(loop, loop, kernel or ReferenceKernel(), torch.device("cpu"), config)
    return bind(plan.worker_plan(0), runtime)


def leaves(
    plan: PoolPlan, worker: int = 0, seed: int = 0
) -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v leaves and dout of one worker."""
    tensors = worker_tensors(plan, worker, pool_tensors(plan, seed, torch.float64))
    return [tensors[name].requires_grad_() for name in "qkv"], tensors["dout"]


def gradients(bound: BoundPlan, plan: PoolPlan, worker: int) -> tuple[torch.Tensor, ...]:
    """out, dq, dk, dv without recompute."""
    inputs, dout = leaves(plan, worker)
    out = libra_attention(*inputs, bound)
    return (out.detach(), *torch.autograd.grad(out, inputs, dout))
