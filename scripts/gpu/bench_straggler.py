"""Several GPUs: the slowest worker of Libra against that of Ulysses on the same packed sequences.

    python scripts/gpu/bench_straggler.py [--workers N] [--layouts 2x1 1x2] [--seq-length 65536 ...]

Windows of the long-tailed presets, every length scaled so that a pack has --seq-length tokens. A
layout PxCP has N / (P CP) pools. Ulysses computes a window in sampler order, Libra in VRSP order
with the default placer, through the same executor, kernel and transport. A microbatch's straggler
time is the largest of all workers for forward + backward of one layer, started together; a window's
is the sum over its microbatches.

speedup       straggler time of ulysses over that of libra
bound, pairs  sum of the heaviest workers' pairs over the sum of the means, placed as ulysses does
bound, time   the same with each worker's measured bare kernel calls instead of its pairs: what
              perfect balance at no cost would give on this kernel
share         speedup over bound. Accepted: 0.95 of both bounds.
step ...      the same if workers only meet after the window: the largest of the sums

Where Libra's time goes, as ratios over the ideal: the mean over workers of Ulysses' bare kernel
calls, which perfect balance at no cost would take; each the slowest worker's, as above.

kernels       bare kernel calls of Libra's plan: above 1 by imbalance and by how tiles cut samples
compute       its layer with a transport that moves nothing: the kernels, and rows packed, arranged
              and summed on the device
layer         the layer: what transfers add

Ends by its budget on two H200s, 235 s. Longer packs take turns less often, at least twice: a window
of 262,144 tokens and 32q4kv128 takes about 40 to 65 s.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from bench_alone import KernelCalls, without_transfers
from bench_common import (
    TOKEN_PAIRS,
    Case,
    Job,
    World,
    arguments,
    one_line,
    read_rows,
    run_cases,
    show,
    verdict,
)
from bench_timing import alternate, medians
from bench_work import HEADS, Layer, runtime_of, scaled_rows, shape_of

from megatron_libra import LibraConfig, PoolPlan, order_window, plan_pool
from megatron_libra.data.corpora import CORPORA
from megatron_libra.executor.runtime import PoolRuntime

LIMIT = 0.95
MOST_S = 3.0
"""Of a microbatch's turns."""
LEAST = 2
"""Turns, however long they take."""
IMPLEMENTATIONS = ("ulysses", "libra")
PARTS = {"kernels": "kernels", "compute": "compute", "layer": "libra"}
"""Columns that are ratios over the ideal, and what was measured for them."""
COLUMNS = (
    *("preset", "seq_length", "layout", "heads", "kernel", "transport", "window"),
    *("ulysses_ms", "libra_ms", "speedup", "bound_pairs", "share_pairs", "bound_time"),
    *("share_time", "ok", "ideal_ms", *PARTS, "chunks", "step_speedup", "step_bound_time"),
    "libra_imbalance",
)


def layouts_of(num_workers: int) -> list[str]:
    """Every P x CP of one pool of all workers, and with CP = 1 every smaller P above 1."""
    divisors = [n for n in range(1, num_workers + 1) if num_workers % n == 0]
    whole = [(p, num_workers // p) for p in reversed(divisors)]
    parts = [(p, 1) for p in divisors[1:-1]]
    return [f"{p}x{cp}" for p, cp in (*whole, *parts)]


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """Windows outside presets and layouts, so that all have one when the time is over; the lengths
    of packs outside all."""
    for seq_length, heads, window, preset, layout in itertools.product(
        args.seq_length, args.heads, range(args.windows), args.presets, args.layouts
    ):
        yield {
            "preset": preset,
            "layout": layout,
            "heads": heads,
            "window": window,
            "seq_length": seq_length,
            "microbatches": args.microbatches,
            "repeats": args.repeats,
            "kernel": args.kernel,
            "transport": args.transport,
            "block_size": args.block_size,
            "head_split": args.head_split,
            "asked_chunks": args.chunks,
            "load_slack": args.load_slack,
            "token_pairs": args.token_pairs,
        }


def measure(world: World, case: Case, seed: int) -> Case:
    """One window on this worker."""
    pool_size, cp = map(int, case["layout"].split("x"))
    width = pool_size * cp
    first = world.worker // width * width
    shape = shape_of(case["heads"])
    names = ("block_size", "head_split", "load_slack", "token_pairs", "kernel", "transport")
    chosen = {name: case[name] for name in names}
    config = LibraConfig(pool_size=pool_size, chunks=case["asked_chunks"], **chosen)
    runtime = runtime_of(world, config, shape, range(first, first + width))
    times, pairs, imbalance, chunks = [], [], [], set()
    for plans in microbatches(case, config, world.num_workers // cp, seed + case["window"]):
        mine = {name: pools[first // width] for name, pools in plans.items()}
        times.append(time_of(mine, runtime, world.worker - first, world, case["repeats"]))
        pairs.append(np.concatenate([pool.loads for pool in plans["ulysses"]]).tolist())
        imbalance.append(max(pool.imbalance for pool in plans["libra"]))
        chunks |= {pool.heads.chunks for pool in plans["libra"]}
    base = {"kernel": runtime.kernel.name, "transport": runtime.dispatch.name}
    base["chunks"] = sorted(chunks)
    return base | summary(world.gather(times), np.array(pairs), max(imbalance))


def time_of(
    plans: dict[str, PoolPlan], runtime: PoolRuntime, worker: int, world: World, repeats: int
) -> dict[str, float]:
    """Median times of one microbatch on this worker: layers and bare calls, on the same q, k, v and
    dout. What they need on the device is given back.

    Args:
        plans: of this worker's pool, by implementation.
        worker: among the workers of its pool.
    """
    ulysses, libra = (plans[name] for name in IMPLEMENTATIONS)
    base = Layer(ulysses, worker, replace(runtime, config=ulysses.config), world)
    ours = replace(runtime, config=libra.config)
    alone = without_transfers(ours, world)
    calls = {
        "ulysses": base,
        "libra": Layer(libra, worker, ours, world, inputs_of=base),
        "compute": Layer(libra, worker, alone, world, inputs_of=base),
        "bare": KernelCalls(ulysses.worker_plan(worker), runtime.kernel, world),
        "kernels": KernelCalls(libra.worker_plan(worker), runtime.kernel, world),
    }
    both = {name: call.both for name, call in calls.items()}
    measured = alternate(both, world, repeats=repeats, warmup=1, most_s=MOST_S, least=LEAST)
    del both, calls, base
    if world.on_gpu:
        torch.cuda.empty_cache()
    return medians(measured)


def microbatches(
    case: Case, config: LibraConfig, data_parallel_size: int, seed: int
) -> Iterator[dict[str, list[PoolPlan]]]:
    """For each microbatch of a window, the plans of all pools by implementation."""
    size, count = config.pool_size, case["microbatches"]
    rows = scaled_rows(case["preset"], case["seq_length"], count * data_parallel_size, seed)
    order = order_window(rows, pool_size=size, data_parallel_size=data_parallel_size, scope="auto")
    shape, cp = shape_of(case["heads"]), int(case["layout"].split("x")[1])
    for number in range(count):
        start = number * data_parallel_size
        here = range(start, start + data_parallel_size)
        orders = {"ulysses": list(here), "libra": [order.order[i] for i in here]}
        yield {
            name: [
                plan_pool(
                    [rows[i] for i in orders[name][pool : pool + size]],
                    context_parallel_size=cp,
                    shape=shape,
                    config=config if name == "libra" else replace(config, placer="ulysses"),
                    seq_length=case["seq_length"],
                )
                for pool in range(0, data_parallel_size, size)
            ]
            for name in IMPLEMENTATIONS
        }


def summary(
    by_worker: Sequence[Sequence[dict[str, float]]], pairs: np.ndarray, imbalance: float
) -> Case:
    """Speedups, bounds and breakdown of a window.

    Args:
        by_worker: for each worker and microbatch the median times.
        pairs: (microbatches, workers) pairs as ulysses places them.
    """
    times = {
        name: np.array([[one[name] for one in worker] for worker in by_worker]).T
        for name in (*IMPLEMENTATIONS, "compute", "bare", "kernels")
    }
    straggler = {name: float(array.max(axis=1).sum()) for name, array in times.items()}
    ideal = float(times["bare"].mean(axis=1).sum())
    step = {name: float(times[name].sum(axis=0).max()) for name in IMPLEMENTATIONS}
    speedup = straggler["ulysses"] / straggler["libra"]
    bound_pairs, bound_time = bound_of(pairs), bound_of(times["bare"])
    shares = speedup / bound_pairs, speedup / bound_time
    return {
        **{f"{name}_ms": straggler[name] for name in IMPLEMENTATIONS},
        "speedup": speedup,
        "bound_pairs": bound_pairs,
        "share_pairs": shares[0],
        "bound_time": bound_time,
        "share_time": shares[1],
        "ok": verdict(min(shares), at_least=LIMIT),
        "ideal_ms": ideal,
        **{column: straggler[name] / ideal for column, name in PARTS.items()},
        "step_speedup": step["ulysses"] / step["libra"],
        "step_bound_pairs": float(pairs.sum(axis=0).max() / pairs.sum(axis=0).mean()),
        "step_bound_time": float(
            times["bare"].sum(axis=0).max() / times["bare"].sum(axis=0).mean()
        ),
        "libra_imbalance": imbalance,
        "times": {name: array.tolist() for name, array in times.items()},
    }


def bound_of(work: np.ndarray) -> float:
    """Heaviest over mean work of (microbatches, workers), a microbatch after the other."""
    return float(work.max(axis=1).sum() / work.mean(axis=1).sum())


def main() -> int:
    parser = arguments(__doc__, seconds=235)
    parser.add_argument("--workers", type=int, default=None, help="GPUs; by default all")
    parser.add_argument("--layouts", nargs="+", default=None, help="P x CP; by default all")
    parser.add_argument("--presets", nargs="+", choices=CORPORA, default=list(CORPORA))
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS)[:2])
    parser.add_argument("--seq-length", type=int, nargs="+", default=[65536])
    parser.add_argument("--windows", type=int, default=3)
    parser.add_argument("--microbatches", type=int, default=4, help="of a window")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--head-split", type=int, default=1)
    parser.add_argument("--chunks", type=int, default=None, help="by default the plan's choice")
    parser.add_argument("--load-slack", type=float, default=0.01)
    parser.add_argument("--token-pairs", type=int, default=TOKEN_PAIRS)
    parser.set_defaults(case_seconds=180)
    args = parser.parse_args()
    if args.device == "cpu":
        args.heads, args.block_size = ["8q2kv16"], 64
        args.seq_length = [min(512 * 2**i, n) for i, n in enumerate(args.seq_length)]
        args.windows, args.microbatches, args.repeats = 1, 2, 2
    workers = args.workers or (torch.cuda.device_count() if args.device == "cuda" else 2)
    args.layouts = args.layouts or layouts_of(workers)
    job = Job.of("straggler", args, workers)
    job.path.unlink(missing_ok=True)
    failed = run_cases(
        partial(measure, seed=args.seed), cases(args), job, line=partial(one_line, columns=COLUMNS)
    )
    show(f"straggler speedup over ulysses, {workers} workers", read_rows(job.path), COLUMNS)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
