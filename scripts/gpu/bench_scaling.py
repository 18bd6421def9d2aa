"""Several GPUs: tokens per second of a GPU as data parallelism grows, and pipeline microbatches.

    python scripts/gpu/bench_scaling.py [--gpus N] [--context-parallel CP] [--seconds 1200]
    python scripts/gpu/bench_scaling.py --model dense --layouts 1x1x1 8x1x1 [--keep] ...

bench_train.py for DP = 1, 2, 4, ... up to N / CP, the work of a GPU kept (--microbatches a
replica); then PP 2 with DP = N / (2 CP). --layouts DPxCPxPP chooses, and --keep adds to the lines
of earlier calls, whose DP 1 of the same CP, model and sizes is then the base.

efficiency      tokens per second of a GPU over that of the same implementation at DP 1, where a
                step has no replica to wait for
predicted ...   the same from the simulator: attention of each step's very plans by --cost-model,
                the rest of a step as ulysses at DP 1 has it (rest_ms of a microbatch: its measured
                step less its predicted attention). 1 / PP of the rest on each stage; the gradient
                sync is left out, and efficiency says how much it and waiting cost
error_speedup   percent of the predicted speedup above the measured one
work_spread     heaviest over mean pool of a step, by pairs, in Megatron's order and in VRSP's
forward_spread  longest over mean forward time of a step's microbatches on the first stage, all
                replicas, as measured: what the stages see one after the other (the paper's
                Figure 12); mean of the steps after warm-up

About 60 s for each run of the small model on two H200s; two runs a size.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from dataclasses import asdict

from bench_common import Case, Job, append, read_rows, require_device, show
from bench_forwards import attention_of, forward_spread, rest_of, step_ms
from bench_models import Model
from bench_prediction import add_cost_model, cost_model_of, error_percent
from bench_train import (
    COLUMNS,
    IMPLEMENTATIONS,
    Layout,
    compare,
    flags,
    measure_rate,
    settle,
    train_both,
)

SCALING_COLUMNS = (
    *("name", "seq_length", "dp", "cp"),
    *("ulysses_tokens_s_gpu", "ulysses_efficiency", "ulysses_predicted_efficiency"),
    *("libra_tokens_s_gpu", "libra_efficiency", "libra_predicted_efficiency", "speedup"),
    *("predicted_speedup", "error_speedup", "bound_time", "bound_flops"),
    *("max_loss_difference", "ulysses_loss_difference"),
)
PIPELINE_COLUMNS = (
    *("name", "seq_length", "dp", "cp", "pp"),
    *("ulysses_work_spread", "libra_work_spread", "ulysses_forward_spread"),
    *("libra_forward_spread", "ulysses_tokens_s", "libra_tokens_s", "speedup"),
    *("predicted_speedup", "error_speedup"),
    *("max_loss_difference", "ulysses_loss_difference"),
)


def layouts_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> list[Layout]:
    """The layouts that were asked for; by default all that keep CP."""
    cp, replicas = args.context_parallel, args.gpus // args.context_parallel
    if args.layouts is None:
        found = [(dp, cp, 1) for dp in sizes(replicas)]
        return found + ([(replicas // 2, cp, 2)] if replicas % 2 == 0 else [])
    found = []
    for text in args.layouts:
        numbers = [int(size) if size.isdecimal() else 0 for size in text.split("x")]
        if len(numbers) != 3 or not 0 < numbers[0] * numbers[1] * numbers[2] <= args.gpus:
            parser.error(
                f"layout ({text}) must be DPxCPxPP of at most {args.gpus} GPUs; try 1x{cp}x1."
            )
        found.append((numbers[0], numbers[1], numbers[2]))
    return found


def sizes(most: int) -> list[int]:
    """1, 2, 4, ... up to most."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


def base_of(rows: list[Case], result: Case) -> Case | None:
    """The newest DP 1 of the same context parallel size, model, sizes and cost model."""
    same = ("cp", "model", "preset", "seq_length", "microbatches", "kernel", "cost_model")
    found = [
        row
        for row in rows
        if "comparison" in row
        and (row["dp"], row["pp"]) == (1, 1)
        and all(row.get(name) == result[name] for name in same)
    ]
    return found[-1] if found else None


def per_gpu(result: Case, base: Case | None) -> Case:
    """Tokens per second of a GPU, and over that of base (DP 1)."""
    gpus = result["dp"] * result["cp"] * result["pp"]
    scaled: Case = {}
    for name in IMPLEMENTATIONS:
        scaled[f"{name}_tokens_s_gpu"] = result[f"{name}_tokens_s"] / gpus
        if base is not None:
            scaled[f"{name}_efficiency"] = (
                scaled[f"{name}_tokens_s_gpu"] / base[f"{name}_tokens_s_gpu"]
            )
    return scaled


def spread(records: list[Case]) -> float:
    """max / mean of the work of a step's pools, mean of the steps."""
    return statistics.mean(1 + record["inter_pool_imbalance"] for record in records)


def spreads(done: dict[str, list[Case]], warmup: int) -> Case:
    """Of work and of forward times, in the first run of each implementation."""
    found: Case = {}
    for name in IMPLEMENTATIONS:
        found[f"{name}_work_spread"] = spread(done[name][0]["telemetry"][warmup:])
        found[f"{name}_forward_spread"] = forward_spread(done[name][0]["forwards"], warmup)
    return found


def prediction(
    args: argparse.Namespace, model: Model, done: dict[str, list[Case]], result: Case, base: Case
) -> Case:
    """Predicted steps, speedup and efficiency of a layout. base is its own result at DP 1."""
    attention = {
        name: attention_of(done[name][0]["forwards"], args.warmup) for name in IMPLEMENTATIONS
    }
    rest = base.get("rest_ms")
    if base is result:
        measured = statistics.median(run["ms"] for run in done["ulysses"]) / args.iterations
        rest = rest_of(measured, attention["ulysses"], model)
    if rest is None:
        print(
            f"no prediction: at DP 1 the attention of a step of ulysses is predicted longer than "
            f"the whole step was; give a --cost-model of this machine (it was {args.cost_model})",
            flush=True,
        )
        return {}
    found: Case = {"rest_ms": rest}
    for name in IMPLEMENTATIONS:
        found[f"{name}_predicted_ms"] = step_ms(attention[name], model, result["pp"], rest)
    for name in IMPLEMENTATIONS:
        first = (found if base is result else base)[f"{name}_predicted_ms"]
        # a step has equally many tokens for each GPU in every layout
        found[f"{name}_predicted_efficiency"] = first / found[f"{name}_predicted_ms"]
    speedup = found["ulysses_predicted_ms"] / found["libra_predicted_ms"]
    found["predicted_speedup"] = speedup
    found["error_speedup"] = error_percent(speedup, result["speedup"])
    return found


def measure(
    args: argparse.Namespace, model: Model, job: Job, rate: Case, layout: Layout
) -> Case | None:
    """Train both and compare; None if one did not train."""
    done = train_both(args, model, job, layout=layout, turns=args.turns, cost_model=args.cost_model)
    if not all(done.values()):
        return None
    result = compare(args, model, done, rate, layout=layout)
    result |= {"name": args.model, "model": asdict(model), "preset": args.preset}
    result |= {"microbatches": args.microbatches, "cost_model": args.cost_model}
    result |= per_gpu(result, None)
    base = result if layout == (1, layout[1], 1) else base_of(read_rows(job.path), result)
    result |= spreads(done, args.warmup)
    if base is None:
        print(f"no efficiency, no prediction: no run of layout 1x{layout[1]}x1", flush=True)
        return result
    return result | per_gpu(result, base) | prediction(args, model, done, result, base)


def main() -> int:
    parser = flags(__doc__, seconds=580, turns=1)
    parser.add_argument(
        "--layouts", nargs="+", help="DPxCPxPP; by default see above, of --context-parallel"
    )
    parser.add_argument("--keep", action="store_true", help="keep the lines of earlier calls")
    add_cost_model(parser)
    args = parser.parse_args()
    cost_model_of(args, parser)  # leaves where there is none
    require_device(args.device)
    model = settle(args, parser)
    layouts = layouts_of(args, parser)
    job = Job.of("scaling", args, args.gpus)
    if not args.keep:
        job.path.unlink(missing_ok=True)
    rate, failed = measure_rate(args, model), 0
    for layout in layouts:
        result = measure(args, model, job, rate, layout)
        failed += result is None
        if result is not None:
            append(job.path, {"comparison": True, **result})
    rows = [row for row in read_rows(job.path) if "comparison" in row]
    show("end to end", rows, COLUMNS)
    show("scaling", [row for row in rows if row["pp"] == 1], SCALING_COLUMNS)
    show("pipeline", [row for row in rows if row["pp"] > 1], PIPELINE_COLUMNS)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
