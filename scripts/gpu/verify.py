"""Verify the executor on the GPUs of one machine. In: nothing. Out: one JSON line for each pool.

    python scripts/gpu/verify.py [--workers 2] [--pool-sizes 1 2] [--kernel auto] [--every 1]

Runs bfloat16 with FlashAttention against float64 dense attention of the same rounded inputs: every
split of the workers into pool size x context parallel size, head shapes from MHA to MQA with head
dims 64, 128 and 256, both layouts, all placers, save and refetch; the transports take turns, and
every third pool goes over each of them, where outputs must have the same bits. Beside it stands
what the kernel alone makes of the same pool in one call on one GPU. Exits 1 if a pool is above the
tolerance or if bits differ. One set of processes for each pool size.
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

from megatron_libra import AttentionShape, LibraConfig, PoolPlan, plan_pool
from megatron_libra.executor.dense import dense_attention
from megatron_libra.executor.inputs import PoolInputs
from megatron_libra.executor.kernels import BoundRound, pick_kernel
from megatron_libra.executor.verify import Verification, error_of, verify_plans
from megatron_libra.plan.worker_plan import Round

SHAPES = ((8, 8, 64), (8, 2, 128), (16, 4, 128), (8, 1, 128), (8, 2, 256))
"""Query heads, kv heads, head dim."""
TRANSPORTS = ("nccl", "symmetric")
"""All that there are between GPUs of one host."""
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


def pool_sizes(num_workers: int) -> list[int]:
    """P of every P x CP that is the number of workers."""
    return [p for p in range(1, num_workers + 1) if num_workers % p == 0]


def plans(num_workers: int, num_tokens: int) -> Iterator[PoolPlan]:
    """The matrix of pools."""
    rng = np.random.default_rng(0)
    for pool_size, shape, variant in itertools.product(pool_sizes(num_workers), SHAPES, VARIANTS):
        query_heads, kv_heads, head_dim = shape
        fields = {"head_split": 2, "chunks": 2, "block_size": num_tokens // 32, **variant}
        yield plan_pool(
            sequences_of(pool_size, num_tokens, rng),
            context_parallel_size=num_workers // pool_size,
            shape=AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim),
            config=LibraConfig(pool_size=pool_size, **fields),
            seq_length=num_tokens,
        )


def kernel_alone(plan: PoolPlan, inputs: PoolInputs) -> dict[str, float]:
    """Errors of the kernel on the whole pool in one call, measured as verify does."""
    tensors, device = inputs.of(plan), inputs.device
    inside = [slice(0, sum(lengths)) for lengths in plan.sequences]
    q, k, v, dout = (
        torch.cat([tensors[name][slot, rows] for slot, rows in enumerate(inside)])
        for name in ("q", "k", "v", "dout")
    )
    scale = plan.shape.head_dim**-0.5
    kernel = pick_kernel(
        plan.config.kernel, device=device, dtype=torch.bfloat16, head_dim=plan.shape.head_dim
    )
    lengths = [length for row in plan.sequences for length in row]
    cu, longest, stop = np.cumsum([0, *lengths]).astype(np.int32), max(lengths), sum(lengths)
    prepared = kernel.prepare(Round(0, stop, 0, stop, cu, cu, longest, longest), device)
    cu_t = torch.from_numpy(cu).to(device)
    whole = BoundRound(0, stop, 0, stop, cu_t, cu_t, longest, longest, prepared)
    out, lse = kernel.forward(q, k, v, whole, scale)
    results = (out, *kernel.backward(dout, q, k, v, out, lse, whole, scale))
    dense = dense_attention(tensors, plan.sequences)
    return {
        name: error_of(
            actual.double(),
            torch.cat([dense[name][slot, rows] for slot, rows in enumerate(inside)]),
        )
        for name, actual in zip(("out", "dq", "dk", "dv"), results, strict=True)
    }


def with_transport(plan: PoolPlan, transport: str, kernel: str) -> PoolPlan:
    """The same plan on another transport."""
    config = dataclasses.replace(plan.config, transport=transport, kernel=kernel)
    return dataclasses.replace(plan, config=config)


def runs_of(
    chosen: list[PoolPlan], transports: list[str], kernel: str
) -> Iterator[tuple[int, PoolPlan]]:
    """Number of a pool and its plan on a transport: they take turns, and every third pool goes over
    each."""
    for number, plan in enumerate(chosen):
        for turn in range(len(transports) if number % 3 == 0 else 1):
            transport = transports[(number + turn) % len(transports)]
            yield number, with_transport(plan, transport, kernel)


def line_of(
    result: Verification, others: list[Verification], inputs: PoolInputs
) -> dict[str, object]:
    """One pool's JSON line; others are the same plan over other transports."""
    choices = dataclasses.asdict(result.plan.config)
    names = ("pool_size", "head_split", "chunks", "placer", "layout", "backward_kv")
    report = ("kernel", "transport", "errors", "relative", "tolerance", "passed")
    line = {name: choices[name] for name in names} | {k: result.report[k] for k in report}
    line["context_parallel_size"] = result.plan.context_parallel_size
    line["heads"] = dataclasses.astuple(result.plan.shape)[:3]
    line["kernel_alone"] = kernel_alone(result.plan, inputs)
    if others:
        line["same_output_bits"] = all(
            np.array_equal(result.arrays["out"], other.arrays["out"]) for other in others
        )
    return line


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2, help="GPUs to use")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of a packed sequence")
    parser.add_argument("--transports", default=",".join(TRANSPORTS), help="to take turns")
    parser.add_argument("--pool-sizes", type=int, nargs="+", help="of these; by default all")
    parser.add_argument("--kernel", default="auto", help="attention kernel")
    parser.add_argument("--every", type=int, default=1, help="only every n-th pool of the matrix")
    args = parser.parse_args()
    unknown = set(args.pool_sizes or ()) - set(pool_sizes(args.workers))
    if unknown:
        sys.exit(
            f"error: pool sizes {sorted(unknown)} must divide the {args.workers} workers; try some "
            f"of {pool_sizes(args.workers)}."
        )
    if torch.cuda.device_count() < args.workers:
        sys.exit(
            f"error: {args.workers} workers need as many GPUs, here are "
            f"{torch.cuda.device_count()}; libra verify --device cpu needs none."
        )
    start, failed, num_runs = time.monotonic(), 0, 0
    made = list(plans(args.workers, args.tokens))[:: args.every]
    wanted = args.pool_sizes or pool_sizes(args.workers)
    chosen = [plan for plan in made if plan.config.pool_size in wanted]
    runs = list(runs_of(chosen, args.transports.split(","), args.kernel))
    inputs = PoolInputs(0, torch.bfloat16, torch.device("cuda"))
    for _, group in itertools.groupby(runs, key=lambda run: run[1].config.pool_size):
        numbers, batch = zip(*group, strict=True)
        num_runs += len(batch)
        results = zip(numbers, verify_plans(batch, device="cuda"), strict=True)
        for _, same in itertools.groupby(results, key=lambda pair: pair[0]):
            first, *others = (result for _, result in same)
            line = line_of(first, others, inputs)
            print(json.dumps(line), flush=True)
            passed = all(result.passed for result in (first, *others))
            failed += not (passed and line.get("same_output_bits", True))
    seconds = round(time.monotonic() - start)
    last = {"pools": len(chosen), "runs": num_runs, "failed": failed, "seconds": seconds}
    print(json.dumps(last))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
