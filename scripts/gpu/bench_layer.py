"""One GPU: what the executor adds to its kernel calls when nothing is remote.

    python scripts/gpu/bench_layer.py [--kernels fa4 torch_flash] [--parts sync host time memory]

sync    forward and backward while any wait for the device is an error.
host    launches of a layer and microseconds to enqueue it, and the same of its kernel calls.
time    layer through libra_attention over the sum of its bare kernel calls, forward and backward,
        for layers of about 2, 10 and 40 ms. Accepted: 1.15 at 2 ms, 1.05 from 10 ms on.
        Packs: one long sample; the long tail; the long tail with four head shards; and a worker of
        a pool of 8 in which nothing moves.
memory  peak of forward and backward above the inputs for save and refetch, and growth from the 5th
        to the 50th layer. Accepted: no growth.

About 190 s on one H200.
"""

from __future__ import annotations

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from functools import partial

import torch
from bench_alone import KernelCalls
from bench_common import Case, Job, World, arguments, one_line, read_rows, run_cases, show, verdict
from bench_timing import alternate, count_launches, host_us, medians, peaks
from bench_work import HEADS, Layer, forward_pairs, long_tail, runtime_of, shape_of

from megatron_libra import LibraConfig, PoolPlan, plan_pool
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.transport import LoopbackTransport

PARTS = ("sync", "host", "time", "memory")
LIMITS = {2: 1.15, 10: 1.05, 40: 1.05}
"""Most of layer over kernel calls, by the size of the forward in ms."""
PACKS = {
    "long": {},
    "tail": {},
    "tail, H 4": {"head_split": 4},
    "tail, idle pool": {"pool_size": 8, "placer": "home"},
}
SEQ_MULTIPLE = 128


class IdleTransport(LoopbackTransport):
    """Stands for a pool of 8 whose plan moves nothing: nobody is there."""

    num_workers = 8


def cases(parts: list[str], kernels: list[str], heads: list[str], repeats: int) -> Iterator[Case]:
    """All cases, part by part."""
    for part, kernel, head, ms in itertools.product(parts, kernels, heads, LIMITS):
        case = {"part": part, "kernel": kernel, "heads": head, "ms": ms, "repeats": repeats}
        if part == "time":
            yield from ({**case, "pack": pack} for pack in PACKS)
        elif (part, ms) in (("memory", 10), ("sync", 2)):
            yield from ({**case, "pack": "tail", "backward_kv": b} for b in ("save", "refetch"))
        elif part == "host" and ms != 40:
            yield {**case, "pack": "tail"}


def measure(world: World, case: Case, seed: int) -> Case:
    """One case on this GPU."""
    layer, calls, tokens = build(world, case, seed)
    base = {"kernel": calls.kernel.name, "tokens": tokens, "calls": len(calls.calls)}
    return base | MEASURES[case["part"]](world, case, layer, calls)


def build(world: World, case: Case, seed: int) -> tuple[Layer, KernelCalls, int]:
    """A layer of about the wished size: guessed, measured, scaled once."""
    shape, choices = shape_of(case["heads"]), PACKS[case["pack"]]
    config = LibraConfig(
        **{"pool_size": 1, "kernel": case["kernel"], **choices},
        backward_kv=case.get("backward_kv", "save"),
    )
    runtime = runtime_of(world, config, shape)
    pairs = forward_pairs(case["ms"] if world.on_gpu else 0.2, shape, runtime.kernel.name)
    plan = plan_of(case, pairs, config, seed)
    if world.on_gpu:
        calls = KernelCalls(plan.worker_plan(0), runtime.kernel, world)
        took = medians(alternate({"bare": calls.forward}, world, repeats=3))["bare"]
        del calls
        plan = plan_of(case, round(pairs * case["ms"] / took), config, seed)
    calls = KernelCalls(plan.worker_plan(0), runtime.kernel, world)
    layer = Layer(plan, 0, idle(runtime) if "pool_size" in choices else runtime, world)
    return layer, calls, plan.seq_length


def plan_of(case: Case, pairs: int, config: LibraConfig, seed: int) -> PoolPlan:
    """Every slot holds the same pack: with one replica each, nothing is gained by a move."""
    pack = [int((2 * pairs) ** 0.5)] if case["pack"] == "long" else long_tail(pairs, seed)
    plan = plan_pool(
        [pack] * config.pool_size,
        context_parallel_size=1,
        shape=shape_of(case["heads"]),
        config=config,
        seq_length=-(-sum(pack) // SEQ_MULTIPLE) * SEQ_MULTIPLE,
    )
    assert plan.traffic_bytes.sum() == plan.traffic_bytes.trace()
    return plan


def idle(runtime: PoolRuntime) -> PoolRuntime:
    """The runtime of worker 0 of 8, without the others."""
    return dataclasses.replace(runtime, dispatch=IdleTransport(), return_=IdleTransport())


def measure_time(world: World, case: Case, layer: Layer, calls: KernelCalls) -> Case:
    """Layer over kernel calls."""
    forward = {"bare": calls.forward, "layer": layer.forward}
    backward = {"bare": calls.backward, "layer": layer.backward}
    result: Case = {}
    for name, variants in (("forward", forward), ("backward", backward)):
        times = alternate(variants, world, repeats=case["repeats"])
        middle = medians(times)
        ratio, limit = middle["layer"] / middle["bare"], LIMITS[case["ms"]]
        result |= {
            f"{name}_bare_ms": middle["bare"],
            f"{name}_ms": middle["layer"],
            f"{name}_ratio": ratio,
            f"{name}_ok": verdict(ratio, at_most=limit),
            f"{name}_times": times,
        }
    return result | {"limit": LIMITS[case["ms"]]}


def measure_host(world: World, case: Case, layer: Layer, calls: KernelCalls) -> Case:
    """Launches and host time, of the layer and of its kernel calls."""
    result: Case = {}
    for name in ("forward", "backward"):
        for prefix, owner in (("bare_", calls), ("", layer)):
            call = getattr(owner, name)
            call()
            result[f"{name}_{prefix}us"] = host_us(call, world)
            counted = count_launches(call, world)
            result[f"{name}_{prefix}launches"] = sum(counted.values())
            result[f"{name}_{prefix}launched"] = counted
    return result


def measure_memory(world: World, case: Case, layer: Layer, calls: KernelCalls) -> Case:
    """MiB of a layer; input_mib is q, k, v and dout, which are not counted."""
    inputs = sum(x.nbytes for x in (*layer.leaves, layer.dout)) / 2**20
    calls.calls.clear()
    found = peaks(layer.forward, layer.gradients, rounds=50 if world.on_gpu else 6)
    result = {f"{name}_mib": size for name, size in found.items()}
    return result | {"input_mib": inputs, "growth_ok": verdict(found["growth"], at_most=0)}


def measure_sync(world: World, case: Case, layer: Layer, calls: KernelCalls) -> Case:
    """Raises if forward or backward waits for the device."""
    layer.both()
    if world.on_gpu:
        torch.cuda.set_sync_debug_mode("error")
    try:
        layer.both()
    finally:
        if world.on_gpu:
            torch.cuda.set_sync_debug_mode("default")
    return {"waits": 0}


MEASURES = {
    "time": measure_time,
    "host": measure_host,
    "memory": measure_memory,
    "sync": measure_sync,
}
COLUMNS = {
    "time": (
        *("kernel", "heads", "ms", "pack", "tokens", "limit", "forward_bare_ms", "forward_ms"),
        *("forward_ratio", "forward_ok", "backward_bare_ms", "backward_ms"),
        *("backward_ratio", "backward_ok"),
    ),
    "host": (
        *("kernel", "heads", "ms", "forward_bare_launches", "forward_launches"),
        *("backward_bare_launches", "backward_launches", "forward_bare_us", "forward_us"),
        *("backward_bare_us", "backward_us"),
    ),
    "memory": (
        *("kernel", "heads", "backward_kv", "tokens", "input_mib", "forward_mib", "held_mib"),
        *("backward_mib", "growth_mib", "growth_ok"),
    ),
    "sync": ("kernel", "heads", "backward_kv", "waits"),
}


def line(record: Case) -> str:
    """One line for a record."""
    return one_line(record, COLUMNS[record["part"]])


def main() -> int:
    parser = arguments(__doc__, seconds=230)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--kernels", nargs="+", default=["fa4", "torch_flash"])
    parser.add_argument("--heads", nargs="+", choices=HEADS, default=list(HEADS)[:2])
    parser.add_argument("--repeats", type=int, default=12)
    args = parser.parse_args()
    if args.tiny:
        args.heads, args.repeats = ["8q2kv16"], 3
    if args.device == "cpu":
        args.kernels = ["reference"]
    job = Job.of("layer", args, 1)
    job.path.unlink(missing_ok=True)
    todo = cases(args.parts, args.kernels, args.heads, args.repeats)
    failed = run_cases(partial(measure, seed=args.seed), todo, job, line=line)
    rows = read_rows(job.path)
    for part in args.parts:
        show(part, [row for row in rows if row["part"] == part], COLUMNS[part])
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
