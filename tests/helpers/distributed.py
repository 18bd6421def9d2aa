"""Worlds of local processes. In: a function of a test module. Out: what every rank returns.

A thin use of executor/local.py: fork server with torch preloaded, file:// rendezvous, no ports; a
failing rank ends the world and shows its trace.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from megatron_libra.executor.bind import bind
from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.groups import create_pool_groups
from megatron_libra.executor.local import run_workers
from megatron_libra.executor.runtime import PoolRuntime, pool_runtime
from megatron_libra.plan.pool_plan import PoolPlan

__all__ = ["bound_plan", "runtime_here", "world"]

TIMEOUT_S = 100.0


def world(fn: Callable[..., Any], num_workers: int, *args: Any, backend: str = "gloo") -> list[Any]:
    """Results of fn(*args) on every rank of a fresh world."""
    return run_workers(fn, num_workers, *args, backend=backend, timeout_s=TIMEOUT_S)


def runtime_here(
    plan: PoolPlan, *, device: str = "cpu", dtype: torch.dtype = torch.float64, **libra: Any
) -> PoolRuntime:
    """A runtime whose pool is the world. Collective on every rank of it."""
    groups = create_pool_groups(
        range(dist.get_world_size()),
        backend="nccl" if device.startswith("cuda") else "gloo",
        plan_ranks=[dist.get_rank()],
    )
    config = replace(plan.config, **libra)
    return pool_runtime(groups, config, device=device, dtype=dtype, head_dim=plan.shape.head_dim)


def bound_plan(plan: PoolPlan, **options: Any) -> BoundPlan:
    """This rank's part of a plan, for libra_attention. Collective; options of runtime_here."""
    return bind(plan.worker_plan(dist.get_rank()), runtime_here(plan, **options))
