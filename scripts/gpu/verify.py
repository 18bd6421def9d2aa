"""Verify the executor on the GPUs of one machine. In: nothing. Out: one JSON line for each pool.

    python scripts/gpu/verify.py [--workers 2] [--tokens 4096]

Runs bfloat16 over NCCL with torch's FlashAttention against float64 dense attention of the same
rounded inputs: every split of the workers into pool size x context parallel size, head shapes from
MHA to MQA with head dims 64, 128 and 256, both layouts, all placers, save and refetch. Beside it
stands what the kernel alone makes of the same pool in one call on one GPU. Exits 1 if a pool is
above the tolerance.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch.nn.attention.varlen import varlen_attn

from megatron_libra import AttentionShape, LibraConfig, PoolPlan, plan_pool
from megatron_libra.executor.dense import dense_attention
from megatron_libra.executor.inputs import pool_tensors
from megatron_libra.executor.verify import error_of, verify_plans

SHAPES = ((8, 8, 64), (8, 2, 128), (16, 4, 128), (8, 1, 128), (8, 2, 256))
"""Query heads, kv heads, head dim."""
VARIANTS = (
    {"placer": "home_first", "layout": "zigzag", "backward_kv": "save", "chunks": 2},
    {"placer": "home_first", "layout": "zigzag", "backward_kv": "refetch", "chunks": 4},
    {"placer": "paper", "layout": "contiguous", "backward_kv": "save", "kv_fetch": "group"},
    {"placer": "ulysses", "layout": "zigzag", "backward_kv": "save"},
    {"placer": "home", "layout": "contiguous", "backward_kv": "refetch"},
)


def sequences_of(num_slots: int, num_tokens: int, rng: np.random.Generator) -> list[list[int]]:
    """One outlier against long-tailed slots with a padding tail."""
    sequences = [[num_tokens]]
    while len(sequences) < num_slots:
        lengths = np.exp(rng.normal(np.log(num_tokens / 60), 1.5, 200)).astype(int) + 1
        sequences.append(lengths[np.cumsum(lengths) < num_tokens].tolist())
    return sequences


def plans(num_workers: int, num_tokens: int) -> Iterator[PoolPlan]:
    """The matrix of pools."""
    rng = np.random.default_rng(0)
    sizes = [p for p in range(1, num_workers + 1) if num_workers % p == 0]
    for pool_size, shape, variant in itertools.product(sizes, SHAPES, VARIANTS):
        query_heads, kv_heads, head_dim = shape
        fields = {"head_split": 2, "chunks": 2, "block_size": num_tokens // 32, **variant}
        yield plan_pool(
            sequences_of(pool_size, num_tokens, rng),
            context_parallel_size=num_workers // pool_size,
            shape=AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim),
            config=LibraConfig(pool_size=pool_size, **fields),
            seq_length=num_tokens,
        )


def kernel_alone(plan: PoolPlan) -> dict[str, float]:
    """Errors of torch's varlen attention on the whole pool in one call, measured as verify does."""
    tensors = pool_tensors(plan, 0, torch.bfloat16)
    inside = [slice(0, sum(lengths)) for lengths in plan.sequences]
    flat = {
        name: torch.cat([x[slot, rows] for slot, rows in enumerate(inside)]).cuda()
        for name, x in tensors.items()
    }
    lengths = [length for row in plan.sequences for length in row]
    cu = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device="cuda")
    leaves = [flat[name].requires_grad_() for name in ("q", "k", "v")]
    out = varlen_attn(*leaves, cu, cu, max(lengths), max(lengths), window_size=(-1, 0))
    results = (out.detach(), *torch.autograd.grad(out, leaves, flat["dout"]))
    dense = dense_attention({name: x.cuda() for name, x in tensors.items()}, plan.sequences)
    return {
        name: error_of(
            actual.double(),
            torch.cat([dense[name][slot, rows] for slot, rows in enumerate(inside)]),
        )
        for name, actual in zip(("out", "dq", "dk", "dv"), results, strict=True)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="GPUs to use")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a packed sequence")
    args = parser.parse_args()
    start, failed = time.monotonic(), 0
    for result in verify_plans(list(plans(args.workers, args.tokens)), device="cuda"):
        choices = dataclasses.asdict(result.plan.config)
        names = ("pool_size", "head_split", "chunks", "placer", "layout", "backward_kv")
        line = {name: choices[name] for name in names}
        line["context_parallel_size"] = result.plan.context_parallel_size
        line["heads"] = dataclasses.astuple(result.plan.shape)[:3]
        line["kernel_alone"] = kernel_alone(result.plan)
        print(
            json.dumps(
                line | {k: result.report[k] for k in ("errors", "relative", "tolerance", "passed")}
            )
        )
        failed += not result.passed
    print(json.dumps({"failed": failed, "seconds": round(time.monotonic() - start)}))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
