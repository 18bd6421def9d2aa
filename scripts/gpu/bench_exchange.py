"""Several GPUs: how much of a layer's exchange its compute hides.

    python scripts/gpu/bench_exchange.py [--workers N] [--transports symmetric nccl]

Pools of one replica a GPU (P = N, CP = 1). Every other slot has 1 + x, the others 1 - x of the mean
work, so that x of the work of a light worker is remote: 0.2 or 0.5. All is in samples of about one
length, which sets how long the exchange takes beside the compute: about 10, 25 and 50 %.

kernels   the worker's bare kernel calls, those of its local part included
compute   libra_attention with a transport that moves nothing: the kernels, and rows packed,
          arranged and summed on the device
exchange  the same transfers with nothing packed or computed: all dispatches, then all returns
signals   with symmetric, libra_attention whose copies move no rows: it waits as ever, so what it
          has over compute is waiting, and what layer has over it is the copies' memory traffic
layer     libra_attention
hidden    1 - (layer - compute) / exchange, each of the slowest worker; layer - compute is the
          median over the turns. Accepted: 0.90 with symmetric, 0.60 with nccl.
+-        how well hidden is known: the standard error of that median over exchange. The clock of a
          GPU under load makes single times differ by some percent.

Twice, in fresh processes: CUDA_DEVICE_MAX_CONNECTIONS unset, and 1 as Megatron asks for. The part
`memory` gives MiB of a layer above its inputs on the worker with the most, save and refetch; a wait
for the device in it is an error. About 340 s on two H200s.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch
from bench_alone import Exchange, KernelCalls, copies_rows, signals_alone, without_transfers
from bench_common import Case, Job, World, arguments, one_line, read_rows, run_cases, show, verdict
from bench_timing import alternate, hidden_share, medians, peaks, slowest, waited_ms
from bench_work import HEADS, Layer, forward_pairs, runtime_of, shape_of

from megatron_libra import LibraConfig, PoolPlan, plan_pool
from megatron_libra.executor.runtime import PoolRuntime

SHARES = (0.10, 0.25, 0.50)
"""Exchange over compute, forward."""
LIMITS = {"symmetric": 0.90, "nccl": 0.60, "gloo": -np.inf}
GUESSED_LENGTH = 2700
"""Tokens of a sample whose exchange is as long as its compute on NVLink, both ways."""
MOST_REMOTE = 0.5
FEW = 5
"""Turns of what is not subtracted."""
CONNECTIONS = ("unset", "1")
VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
SEQ_MULTIPLE = 256
COLUMNS = (
    *("connections", "transport", "kernel", "heads", "share", "chunks", "tokens", "direction"),
    *("kernels_ms", "compute_ms", "exchange_ms", "signals_ms", "layer_ms", "exchange/compute"),
    *("hidden", "+-", "limit", "ok"),
)
MEMORY_COLUMNS = (
    *("transport", "kernel", "heads", "share", "backward_kv", "input_mib", "forward_mib"),
    *("held_mib", "backward_mib", "growth_mib", "growth_ok", "outside_mib"),
)


def cases(args: argparse.Namespace) -> Iterator[Case]:
    """All cases, by transport."""
    for transport, heads, share in itertools.product(args.transports, args.heads, args.shares):
        case = {"transport": transport, "heads": heads, "share": share, "kernel": args.kernel}
        case |= {"ms": args.ms, "repeats": args.repeats, "chunks": args.chunks}
        yield case | {"part": "time", "backward_kv": "save"}
    if os.environ.get(VARIABLE) is None:
        for transport, heads, kv in itertools.product(
            args.transports, args.heads, ("save", "refetch")
        ):
            case = {
                "transport": transport,
                "heads": heads,
                "share": args.shares[len(args.shares) // 2],
            }
            case |= {"kernel": args.kernel, "ms": args.ms, "chunks": args.chunks}
            yield case | {"part": "memory", "backward_kv": kv}


def measure(world: World, case: Case, seed: int) -> Case:
    """One case on this worker."""
    shape = shape_of(case["heads"])
    config = LibraConfig(
        pool_size=world.num_workers,
        block_size=1024 if world.on_gpu else 16,
        load_slack=0.01,
        kernel=case["kernel"],
        transport=case["transport"],
        backward_kv=case["backward_kv"],
        chunks=case["chunks"],
    )
    runtime = runtime_of(world, config, shape)
    pairs = forward_pairs(case["ms"], shape, runtime.kernel.name) if world.on_gpu else 600
    remote = min(MOST_REMOTE, 2 * case["share"])
    length = (GUESSED_LENGTH if world.on_gpu else 8) * remote / case["share"]
    plan = pool_of(pairs, length, remote, shape, config, seed=seed)
    if world.on_gpu:
        pairs, length = corrected(world, case, plan, runtime, pairs, length)
        plan = pool_of(pairs, length, remote, shape, config, seed=seed)
    base = {
        "kernel": runtime.kernel.name,
        "transport": runtime.dispatch.name,
        "chunks": plan.heads.chunks,
        "sample_tokens": round(length),
        "remote": remote,
        "tokens": plan.seq_length,
        "imbalance": plan.imbalance,
        "moved_bytes": int(plan.traffic_bytes.sum()),
    }
    return base | MEASURES[case["part"]](world, case, plan, runtime)


def pool_of(
    pairs: int, length: float, remote: float, shape: Any, config: LibraConfig, *, seed: int
) -> PoolPlan:
    """A pool whose mean worker has so many pairs, in samples of 0.8 to 1.2 times a length."""
    rng = np.random.default_rng(seed)
    sequences = []
    for slot in range(config.pool_size):
        left, row = pairs * (1 + remote if slot % 2 == 0 else 1 - remote), []
        while left > 0:
            row.append(max(1, int(length * rng.uniform(0.8, 1.2))))
            left -= row[-1] * (row[-1] + 1) // 2
        sequences.append(row)
    longest = max(map(sum, sequences))
    return plan_pool(
        sequences,
        context_parallel_size=1,
        shape=shape,
        config=config,
        seq_length=-(-longest // SEQ_MULTIPLE) * SEQ_MULTIPLE,
    )


def corrected(
    world: World, case: Case, plan: PoolPlan, runtime: PoolRuntime, pairs: int, length: float
) -> tuple[int, float]:
    """Pairs and sample length that give the wished time and share, from a first measurement."""
    mine = plan.worker_plan(world.worker)
    calls, exchange = KernelCalls(mine, runtime.kernel, world), Exchange(mine, runtime, world)
    times = alternate({"compute": calls.forward, "exchange": exchange.forward}, world, repeats=3)
    compute, moved = (max(world.gather(t)) for t in medians(times).values())
    factor = min(2.0, max(0.5, moved / compute / case["share"]))
    return round(pairs * case["ms"] / compute), length * factor


def measure_time(world: World, case: Case, plan: PoolPlan, runtime: PoolRuntime) -> Case:
    """Both directions; each number is the slowest worker's."""
    mine = plan.worker_plan(world.worker)
    calls, exchange = KernelCalls(mine, runtime.kernel, world), Exchange(mine, runtime, world)
    owners = {
        "kernels": calls,
        "compute": Layer(plan, world.worker, without_transfers(runtime), world),
        "exchange": exchange,
        "layer": Layer(plan, world.worker, runtime, world),
    }
    result = {}
    for name in ("forward", "backward"):
        times = {}
        # a small difference of two long times needs the most turns
        for keys, repeats in (
            (("kernels", "exchange"), FEW),
            (("compute", "layer"), case["repeats"]),
        ):
            variants = {key: getattr(owners[key], name) for key in keys}
            if "layer" in variants and copies_rows(runtime):
                variants["signals"] = partial(without_rows, variants["layer"], runtime)
            times |= alternate(variants, world, repeats=repeats)
        result[name] = summary([*world.gather(times)], LIMITS[base_name(case["transport"])])
    return result


def without_rows(call: Callable[[], Any], runtime: PoolRuntime) -> None:
    """The call, with signals but no rows between the workers."""
    with signals_alone(runtime):
        call()


def base_name(transport: str) -> str:
    """auto is symmetric inside a node."""
    return "symmetric" if transport == "auto" else transport


def summary(workers: list[dict[str, list[float]]], limit: float) -> Case:
    """Numbers of one direction from every worker's times."""
    turns = {name: [times[name] for times in workers] for name in workers[0]}
    middle = medians({name: slowest(each) for name, each in turns.items()})
    differences = waited_ms(turns["layer"], turns["compute"])
    extra = float(np.median(differences))
    hidden = hidden_share(extra, middle["exchange"])
    assert isinstance(hidden, float), "every case moves rows"
    # of a median of normal values: 1.25 times that of their mean
    error = 1.25 * differences.std(ddof=1) / len(differences) ** 0.5
    return {
        **{f"{name}_ms": value for name, value in middle.items()},
        "exchange/compute": middle["exchange"] / middle["compute"],
        "extra_ms": extra,
        "hidden": hidden,
        "+-": float(error / middle["exchange"]),
        "limit": limit if np.isfinite(limit) else "none",
        "ok": verdict(hidden, at_least=limit),
        "times": workers,
    }


def measure_memory(world: World, case: Case, plan: PoolPlan, runtime: PoolRuntime) -> Case:
    """MiB of the worker with the most; waiting for the device is an error."""
    layer = Layer(plan, world.worker, runtime, world)
    layer.both()
    if world.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        layer.both()
    finally:
        if world.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    world.gather(None)
    found = peaks(layer.forward, layer.gradients, rounds=50 if world.on_gpu else 6)
    found["input"] = sum(x.nbytes for x in (*layer.leaves, layer.dout)) / 2**20
    everyone = world.gather(found)
    most = {f"{name}_mib": max(each[name] for each in everyone) for name in found}
    return most | {"growth_ok": verdict(most["growth_mib"], at_most=0)}


MEASURES = {"time": measure_time, "memory": measure_memory}


def directions(record: Case) -> list[Case]:
    """A record's two directions as table rows."""
    return [{**record, "direction": d, **record[d]} for d in ("forward", "backward")]


def line(record: Case) -> str:
    """One line for a record, two for a timed one."""
    if record["part"] == "memory":
        return one_line(record, MEMORY_COLUMNS)
    return "\n".join(one_line(row, COLUMNS) for row in directions(record))


def flags() -> argparse.ArgumentParser:
    parser = arguments(__doc__, seconds=400)
    parser.add_argument("--workers", type=int, default=None, help="GPUs; by default all")
    parser.add_argument("--transports", nargs="+", default=["symmetric", "nccl"])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS)[:2])
    parser.add_argument("--shares", nargs="+", type=float, default=SHARES)
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--chunks", type=int, default=None, help="M; by default by size")
    parser.add_argument("--ms", type=float, default=10, help="forward compute to aim for")
    parser.add_argument("--repeats", type=int, default=41)
    parser.add_argument("--connections", nargs="+", choices=CONNECTIONS, default=CONNECTIONS)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    return parser


def each_setting(args: argparse.Namespace) -> int:
    """This script once more for each setting, with its share of the time."""
    code = 0
    for setting in args.connections:
        environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
        environment |= {} if setting == "unset" else {VARIABLE: setting}
        seconds = args.seconds / len(args.connections)
        words = [*sys.argv[1:], "--child", "--seconds", f"{seconds}"]
        print(f"{VARIABLE} {setting}", flush=True)
        code |= subprocess.call([sys.executable, __file__, *words], env=environment)
    return code


def main() -> int:
    args = flags().parse_args()
    if args.device == "cpu":
        args.transports, args.heads, args.kernel = ["gloo", "symmetric"], ["8q2kv16"], "reference"
        args.repeats, args.chunks = 3, 2
    workers = args.workers or (torch.cuda.device_count() if args.device == "cuda" else 2)
    job = Job.of("exchange", args, workers)
    if args.child:
        failed = run_cases(partial(measure, seed=args.seed), cases(args), job, line=line)
        return int(failed > 0)
    job.path.unlink(missing_ok=True)
    code = each_setting(args)
    rows = read_rows(job.path)
    timed = [each for row in rows if row["part"] == "time" for each in directions(row)]
    show(f"hidden share of the exchange, {workers} workers", timed, COLUMNS)
    show("memory", [row for row in rows if row["part"] == "memory"], MEMORY_COLUMNS)
    return code


if __name__ == "__main__":
    sys.exit(main())
