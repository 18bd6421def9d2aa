"""Several GPUs: the slowest worker of Libra against that of Ulysses on the same packed sequences.

    python scripts/gpu/bench_straggler.py [--workers N] [--layouts 2x1 1x2] [--seq-length 65536 ...]

Windows of the long-tailed presets, every length scaled so that a pack has --seq-length tokens. A
layout PxCP has N / (P CP) pools; 1x1 has none, so it is what plain data parallelism waits for. By
default every P x CP = N, and every smaller P with CP 1, on the same windows. Ulysses computes a
window in sampler order, Libra in VRSP order with the default placer, through the same executor,
kernel and transport. A microbatch's straggler time is the largest of all workers for forward +
backward of one layer, started together; a window's is the sum over its microbatches.

speedup       straggler time of ulysses over that of libra
bound, pairs  sum of the heaviest workers' pairs over the sum of the means, placed as ulysses does
bound, time   the same with each worker's measured bare kernel calls instead of its pairs: what
              perfect balance at no cost would give on this kernel
share         speedup over bound. Accepted: 0.95 of both bounds; pools smaller than N cannot always
              reach it, and 1x1 is not judged.
step ...      the same if workers only meet after the window: the largest of the sums

Where Libra's time goes, as ratios over the ideal: the mean over workers of Ulysses' bare kernel
calls, which perfect balance at no cost would take; each the slowest worker's, as above.

kernels       bare kernel calls of Libra's plan: above 1 by imbalance and by how tiles cut samples
compute       its layer with a transport that moves nothing: the kernels, and rows packed, arranged
              and summed on the device
exchange      its transfers alone, all dispatches, then all returns
layer         the layer: what transfers add
hidden        1 - (layer - compute) / exchange, as bench_exchange.py has it: layer - compute is the
              median over the turns, summed over microbatches; none where nothing moves

What the simulator makes of the same plans (--cost-model, by default FlashAttention-4 and copy
engines on an H200, inside a node): predicted milliseconds and speedup, and how many percent each
is above what was measured (error).

Ends by its budget on two H200s, 235 s. Longer packs take turns less often, at least twice: a window
of 262,144 tokens and 32q4kv128 takes about 40 to 65 s.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_alone import Exchange, KernelCalls, without_transfers
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
from bench_prediction import add_cost_model, cost_model_of, error_percent, pool_seconds
from bench_timing import alternate, hidden_share, medians, waited_ms
from bench_windows import ALONE, IMPLEMENTATIONS, check_layout, layouts_of, microbatches
from bench_work import HEADS, Layer, runtime_of, shape_of

from megatron_libra import LibraConfig, PoolPlan
from megatron_libra.data.corpora import CORPORA
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.simulator.cost_model import CostModel

LIMIT = 0.95
MOST_S = 3.0
"""Of a microbatch's turns."""
LEAST = 2
"""Turns, however long they take."""
PARTS = {"kernels": "kernels", "compute": "compute", "exchange": "exchange", "layer": "libra"}
"""Columns that are ratios over the ideal, and what was measured for them."""
KINDS = ("predicted_", "error_")
"""What the simulator says, and percent of it above what was measured."""
WINDOW = ("preset", "seq_length", "layout", "heads", "window")
COLUMNS = (
    *(*WINDOW, "kernel", "transport"),
    *("ulysses_ms", "libra_ms", "speedup", "bound_pairs", "share_pairs", "bound_time"),
    *("share_time", "ok", "ideal_ms", *PARTS, "hidden", "chunks", "step_speedup"),
    *("step_bound_time", "libra_imbalance"),
)
PREDICTED = tuple(
    f"{kind}{name}" for name in ("ulysses_ms", "libra_ms", "speedup") for kind in KINDS
)


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
            "cost_model": args.cost_model.name,
        }


def measure(world: World, case: Case, seed: int, model: CostModel) -> Case:
    """One window on this worker."""
    pool_size, cp = map(int, case["layout"].split("x"))
    width = pool_size * cp
    first = world.worker // width * width
    shape = shape_of(case["heads"])
    names = ("block_size", "head_split", "load_slack", "token_pairs", "kernel", "transport")
    chosen = {name: case[name] for name in names}
    config = LibraConfig(pool_size=pool_size, chunks=case["asked_chunks"], **chosen)
    runtime = runtime_of(world, config, shape, range(first, first + width))
    turns, predicted, pairs, imbalance, chunks = [], [], [], [], set()
    for plans in microbatches(case, config, world.num_workers // cp, seed + case["window"]):
        mine = {name: pools[first // width] for name, pools in plans.items()}
        turns.append(turns_of(mine, runtime, world.worker - first, world, case["repeats"]))
        predicted.append([sum(pool_seconds(mine[name], model)) for name in IMPLEMENTATIONS])
        pairs.append(np.concatenate([pool.loads for pool in plans["ulysses"]]).tolist())
        imbalance.append(max(pool.imbalance for pool in plans["libra"]))
        chunks |= {pool.heads.chunks for pool in plans["libra"]}
    base = {"kernel": runtime.kernel.name, "transport": runtime.dispatch.name}
    base["chunks"] = sorted(chunks)
    result = summary(world.gather(turns), np.array(pairs))
    result["libra_imbalance"] = max(imbalance)
    if case["layout"] == ALONE:
        result["ok"] = "none"
    return base | result | prediction(result, np.array(world.gather(predicted)))


def turns_of(
    plans: dict[str, PoolPlan], runtime: PoolRuntime, worker: int, world: World, repeats: int
) -> dict[str, list[float]]:
    """Times of one microbatch on this worker: layers, bare calls and transfers, on the same q, k, v
    and dout. What they need on the device is given back.

    Args:
        plans: of this worker's pool, by implementation.
        worker: among the workers of its pool.
    """
    ulysses, libra = (plans[name] for name in IMPLEMENTATIONS)
    base = Layer(ulysses, worker, replace(runtime, config=ulysses.config), world)
    ours = replace(runtime, config=libra.config)
    mine = libra.worker_plan(worker)
    calls: dict[str, Any] = {
        "ulysses": base,
        "libra": Layer(libra, worker, ours, world, inputs_of=base),
        "compute": Layer(libra, worker, without_transfers(ours), world, inputs_of=base),
        "bare": KernelCalls(ulysses.worker_plan(worker), runtime.kernel, world),
        "kernels": KernelCalls(mine, runtime.kernel, world),
    }
    both: dict[str, Callable[[], Any]] = {name: call.both for name, call in calls.items()}
    # another pool of this microbatch may exchange something, and all measure the same names
    moves = libra.traffic_bytes.sum() > libra.traffic_bytes.trace()
    both["exchange"] = Exchange(mine, ours, world).both if moves else nothing
    measured = alternate(both, world, repeats=repeats, warmup=1, most_s=MOST_S, least=LEAST)
    if not moves:
        measured["exchange"] = [0.0] * len(measured["exchange"])
    del both, calls, base
    if world.on_gpu:
        torch.cuda.empty_cache()
    return measured


def nothing() -> None:
    """The transfers of a pool in which all stays at home."""


def summary(by_worker: Sequence[Sequence[dict[str, list[float]]]], pairs: np.ndarray) -> Case:
    """Speedups, bounds and breakdown of a window.

    Args:
        by_worker: for each worker and microbatch the turns by name.
        pairs: (microbatches, workers) pairs as ulysses places them.
    """
    middle = [[medians(one) for one in worker] for worker in by_worker]
    times = {
        name: np.array([[one[name] for one in worker] for worker in middle]).T
        for name in middle[0][0]
    }
    straggler = {name: float(array.max(axis=1).sum()) for name, array in times.items()}
    ideal = float(times["bare"].mean(axis=1).sum())
    step = {name: float(times[name].sum(axis=0).max()) for name in IMPLEMENTATIONS}
    speedup = straggler["ulysses"] / straggler["libra"]
    bound_pairs, bound_time = bound_of(pairs), bound_of(times["bare"])
    shares = speedup / bound_pairs, speedup / bound_time
    parts = {column: straggler[name] / ideal for column, name in PARTS.items()}
    return {
        **{f"{name}_ms": straggler[name] for name in IMPLEMENTATIONS},
        "speedup": speedup,
        "bound_pairs": bound_pairs,
        "share_pairs": shares[0],
        "bound_time": bound_time,
        "share_time": shares[1],
        "ok": verdict(min(shares), at_least=LIMIT),
        "ideal_ms": ideal,
        **{column: part if straggler[PARTS[column]] else "none" for column, part in parts.items()},
        "hidden": hidden_share(waited(by_worker), straggler["exchange"]),
        "step_speedup": step["ulysses"] / step["libra"],
        "step_bound_pairs": float(pairs.sum(axis=0).max() / pairs.sum(axis=0).mean()),
        "step_bound_time": float(
            times["bare"].sum(axis=0).max() / times["bare"].sum(axis=0).mean()
        ),
        "times": {name: array.tolist() for name, array in times.items()},
    }


def waited(by_worker: Sequence[Sequence[dict[str, list[float]]]]) -> float:
    """Milliseconds of a window that libra's layers take above their compute."""
    return sum(
        float(np.median(waited_ms([w["libra"] for w in workers], [w["compute"] for w in workers])))
        for workers in zip(*by_worker, strict=True)
    )


def prediction(measured: Case, seconds: np.ndarray) -> Case:
    """What was predicted beside what was measured.

    Args:
        seconds: (workers, microbatches, implementations) of the worker's pool.
    """
    ulysses, libra = (1e3 * seconds.max(axis=0).sum(axis=0)).tolist()
    found: Case = {"ulysses_ms": ulysses, "libra_ms": libra, "speedup": ulysses / libra}
    return {f"predicted_{name}": value for name, value in found.items()} | {
        f"error_{name}": error_percent(value, measured[name]) for name, value in found.items()
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
    add_cost_model(parser)
    parser.set_defaults(case_seconds=180)
    args = parser.parse_args()
    args.cost_model = cost_model_of(args, parser)
    if args.device == "cpu":
        args.heads, args.block_size = ["8q2kv16"], 64
        args.seq_length = [min(512 * 2**i, n) for i, n in enumerate(args.seq_length)]
        args.windows, args.microbatches, args.repeats = 1, 2, 2
    workers = args.workers or (torch.cuda.device_count() if args.device == "cuda" else 2)
    args.layouts = args.layouts or layouts_of(workers, args.heads)
    for layout in args.layouts:
        check_layout(layout, workers, args.heads, parser)
    job = Job.of("straggler", args, workers)
    job.path.unlink(missing_ok=True)
    body = partial(measure, seed=args.seed, model=args.cost_model)
    line = partial(one_line, columns=(*COLUMNS, *PREDICTED))
    failed = run_cases(body, cases(args), job, line=line)
    rows = read_rows(job.path)
    show(f"straggler speedup over ulysses, {workers} workers", rows, COLUMNS)
    show("predicted by the simulator", rows, (*WINDOW, "cost_model", *PREDICTED))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
