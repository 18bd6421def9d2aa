"""Libra without Megatron: one layer of a pool, forward and backward, against dense attention.

    torchrun --nproc-per-node 4 examples/layer.py

In: nothing. Out: one line of rank 0; exit code 1 if the errors are larger than float64 rounding.
Four processes on the CPU, DP 2 x CP 2: two packed sequences share their attention. On GPUs:
backend "nccl", device "cuda" (torch.cuda.set_device first), torch.bfloat16.
"""

from __future__ import annotations

import os
import sys

import torch
import torch.distributed as dist

from megatron_libra import AttentionShape, LibraConfig, libra_attention, plan_pool
from megatron_libra.executor.bind import bind
from megatron_libra.executor.dense import dense_attention
from megatron_libra.executor.groups import create_pool_groups
from megatron_libra.executor.runtime import pool_runtime
from megatron_libra.executor.verify import error_of
from megatron_libra.plan.layout import TokenLayout

P, CP, L = 2, 2, 1024  # packed sequences of the pool, workers and tokens of each
SEQUENCES = [[1024], [300, 500, 224]]  # lengths of their samples; one is long
N, G, D = 8, 2, 16  # query heads, kv heads, head dim
DTYPE = torch.float64
TOLERANCE = 1e-10
START = "start it with torchrun --nproc-per-node 4 examples/layer.py."


def main() -> int:
    """One layer; 0 if it equals dense attention on every rank."""
    processes = os.environ.get("WORLD_SIZE", "none of torchrun")
    if processes != str(P * CP):
        print(f"error: processes ({processes}) must be P x CP = {P * CP}; {START}", file=sys.stderr)
        return 2
    dist.init_process_group("gloo")

    # Once. A job of several pools gives each rank the ranks of its own pool.
    ranks = range(P * CP)
    config = LibraConfig(pool_size=P, block_size=128, head_split=2)
    shape = AttentionShape(query_heads=N, kv_heads=G, head_dim=D)
    groups = create_pool_groups(ranks, backend="gloo")
    runtime = pool_runtime(groups, config, device="cpu", dtype=DTYPE, head_dim=D)

    # Each microbatch.
    plan = plan_pool(SEQUENCES, context_parallel_size=CP, shape=shape, config=config, seq_length=L)
    bound = bind(plan.worker_plan(groups.worker), runtime)

    # Each layer: q, k, v of this worker's tokens, (L / CP, heads, head dim).
    whole = random_pool()
    mine = my_tokens(groups.worker)
    q, k, v = (whole[name][mine].requires_grad_() for name in ("q", "k", "v"))
    out = libra_attention(q, k, v, bound)
    out.backward(whole["dout"][mine])

    # What all of it must equal: attention of whole sequences, without libra.
    dense = dense_attention(whole, SEQUENCES)
    results = {"out": out.detach(), "dq": q.grad, "dk": k.grad, "dv": v.grad}
    errors = {name: error_of(value, dense[name][mine]) for name, value in results.items()}
    largest = torch.tensor(max(errors.values()), dtype=torch.float64)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        at_home, placed = (x.max() / x.mean() for x in (plan.home_loads, plan.loads))
        print(
            f"4 workers: largest error of out, dq, dk, dv {largest:.1e};"
            f" slowest worker {at_home:.2f} -> {placed:.2f} times the mean load"
        )
    dist.destroy_process_group()
    return int(largest > TOLERANCE)


def random_pool() -> dict[str, torch.Tensor]:
    """q and dout (P, L, N, D), k and v (P, L, G, D) of the whole pool, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    heads = {"q": N, "k": G, "v": G, "dout": N}
    return {
        name: torch.randn(P, L, number, D, generator=generator, dtype=DTYPE)
        for name, number in heads.items()
    }


def my_tokens(worker: int) -> tuple[int, torch.Tensor]:
    """Which sequence a worker's tokens are of, and their positions in it, in local order."""
    slot, cp_rank = divmod(worker, CP)
    positions = TokenLayout("zigzag", L, CP).positions(cp_rank)
    return slot, torch.from_numpy(positions)


if __name__ == "__main__":
    sys.exit(main())
