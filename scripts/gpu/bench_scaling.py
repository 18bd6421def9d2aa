"""Several GPUs: tokens per second of a GPU as data parallelism grows, and pipeline microbatches.

    python scripts/gpu/bench_scaling.py [--gpus N] [--context-parallel CP] [--seconds 1200]

bench_train.py for DP = 1, 2, 4, ... up to N / CP, the work of a GPU kept (--microbatches a
replica). Efficiency is tokens per second of a GPU over that of the same implementation at DP 1,
where a step has no replica to wait for. Then PP 2 with DP = N / (2 CP): how uneven the pools of a
step are, whose forward times the stages see one after the other, in Megatron's order and in
VRSP's. About 60 s for each run; two runs a size.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import asdict

from bench_common import Case, Job, append, read_rows, show
from bench_train import COLUMNS, IMPLEMENTATIONS, compare, flags, measure_rate, settle, train_both

SCALING_COLUMNS = (
    *("dp", "cp", "ulysses_tokens_s_gpu", "ulysses_efficiency", "libra_tokens_s_gpu"),
    *("libra_efficiency", "speedup", "bound_time", "bound_flops", "max_loss_difference"),
)
PIPELINE_COLUMNS = (
    *("dp", "cp", "pp", "ulysses_spread", "libra_spread", "ulysses_tokens_s", "libra_tokens_s"),
    *("speedup", "max_loss_difference"),
)


def sizes(most: int) -> list[int]:
    """1, 2, 4, ... up to most."""
    return [2**power for power in range(most.bit_length()) if 2**power <= most]


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


def main() -> int:
    parser = flags(__doc__, seconds=580)
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--turns", type=int, default=1, help="runs of each implementation")
    args = parser.parse_args()
    model = settle(args)
    cp, replicas = args.context_parallel, args.gpus // args.context_parallel
    job = Job.of("scaling", args, args.gpus)
    job.path.unlink(missing_ok=True)
    rate, base, failed = measure_rate(args, model), None, 0
    layouts = [(dp, cp, 1) for dp in sizes(replicas)]
    layouts += [(replicas // 2, cp, 2)] if replicas % 2 == 0 else []
    for layout in layouts:
        done = train_both(args, model, job, layout=layout, turns=args.turns)
        if not all(done.values()):
            failed += 1
            continue
        result = compare(args, model, done, rate, layout=layout)
        if layout == (1, cp, 1):
            base = result | per_gpu(result, None)
        result |= per_gpu(result, base)
        for name in IMPLEMENTATIONS:
            result[f"{name}_spread"] = spread(done[name][0]["telemetry"][args.warmup :])
        append(job.path, {"comparison": True, **result, "model": asdict(model)})
    rows = [row for row in read_rows(job.path) if "comparison" in row]
    show("end to end", rows, COLUMNS)
    show("scaling", [row for row in rows if row["pp"] == 1], SCALING_COLUMNS)
    show("pipeline", [row for row in rows if row["pp"] == 2], PIPELINE_COLUMNS)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
