"""Random tensors of a pool and each worker's share of them; for `libra verify` and tests.

In: a PoolPlan and a seed. Out: q, k, v, dout of whole packed sequences, or of one worker's tokens.
"""

from __future__ import annotations

import torch

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.pool_plan import PoolPlan

__all__ = ["INPUTS", "RESULTS", "gather_workers", "pool_tensors", "worker_tensors"]

INPUTS = ("q", "k", "v", "dout")
RESULTS = ("out", "dq", "dk", "dv")


def pool_tensors(plan: PoolPlan, seed: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """Random q, dout (P, L, N, D) and k, v (P, L, G, D) on the CPU; the same on every host."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name in INPUTS:
        heads = plan.shape.kv_heads if name in ("k", "v") else plan.shape.query_heads
        size = (len(plan.sequences), plan.seq_length, heads, plan.shape.head_dim)
        tensors[name] = torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)
    return tensors


def worker_tensors(
    plan: PoolPlan, worker: int, tensors: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """One worker's tokens (T, heads, D) of every tensor, in local order."""
    slot, positions = _local_tokens(plan, worker)
    return {name: tensor[slot, positions] for name, tensor in tensors.items()}


def gather_workers(plan: PoolPlan, parts: list[torch.Tensor]) -> torch.Tensor:
    """The inverse of worker_tensors: (T, heads, D) by worker -> (P, L, heads, D)."""
    whole = parts[0].new_empty(len(plan.sequences), plan.seq_length, *parts[0].shape[1:])
    for worker, part in enumerate(parts):
        whole[_local_tokens(plan, worker)] = part
    return whole


def _local_tokens(plan: PoolPlan, worker: int) -> tuple[int, torch.Tensor]:
    """Slot and positions of a worker's tokens, in local order."""
    slot, cp_rank = divmod(worker, plan.context_parallel_size)
    layout = TokenLayout(plan.config.layout, plan.seq_length, plan.context_parallel_size)
    return slot, torch.from_numpy(layout.positions(cp_rank))
