"""Random tensors of a pool and each worker's share of them; for `libra verify` and tests.

In: a PoolPlan and a seed. Out: q, k, v, dout of whole packed sequences, or of one worker's tokens.
"""

from __future__ import annotations

import torch

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.pool_plan import PoolPlan

__all__ = [
    "INPUTS",
    "RESULTS",
    "PoolInputs",
    "gather_workers",
    "pool_tensors",
    "worker_tensors",
]

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


class PoolInputs:
    """pool_tensors of one plan after the other, on a device; made again only where sizes change.

    Drawing random numbers takes longer than the attention of a small pool on a GPU.
    """

    def __init__(self, seed: int, dtype: torch.dtype, device: torch.device) -> None:
        self.seed, self.dtype, self.device = seed, dtype, device
        self._sizes: object = None
        self._tensors: dict[str, torch.Tensor] = {}

    def of(self, plan: PoolPlan) -> dict[str, torch.Tensor]:
        """The plan's tensors; not to be written to."""
        sizes = (len(plan.sequences), plan.seq_length, plan.shape)
        if sizes != self._sizes:
            self._tensors = {}  # the former ones are given back before the next are made
            made = pool_tensors(plan, self.seed, self.dtype)
            self._sizes = sizes
            self._tensors = {name: tensor.to(self.device) for name, tensor in made.items()}
        return self._tensors


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
