"""Several GPUs, end to end: tokens per second of libra over ulysses in scripts/pretrain_gpt.py.

    python scripts/gpu/bench_train.py [--gpus N] [--context-parallel CP] [--model dense] ...

A GPT (bench_models.py), by default one whose attention is most of the work, on a synthetic corpus
with the long tail of a preset, scaled to --seq-length tokens a pack; DP = N / CP, one pool of all
replicas. Runs alternate; the first iterations of each are left out. Both see the same sequences in
every step.

tokens_s        tokens of the iterations over the sum of their times, median of the runs
share_flops     of attention, on the mean worker; what is recomputed counts, experts that a token
                does not use do not
share_time      of libra's iterations: pairs times what the bare kernel needs for one, measured,
                with a second forward where layers are recomputed
bound_flops     iterations with the heaviest worker's attention over those with the mean worker's
bound_time      ulysses' measured time over the same without what its heaviest worker computes above
                the mean: what perfect balance at no cost would give
max_loss_difference      of an iteration, between the first run of each
ulysses_loss_difference  the same between ulysses' first run and its others: the kernel's backward
                         adds in a free order, and training makes the difference grow
About 200 s on two H200s (four runs).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import traceback
from dataclasses import asdict, replace

import torch
from bench_common import (
    TOKEN_PAIRS,
    Case,
    Job,
    append,
    arguments,
    print_block,
    read_rows,
    require_device,
    run_cases,
    show,
)
from bench_models import MODELS, Model
from bench_runs import Run, kernel_rate, write_corpus

from megatron_libra.data.corpora import CORPORA

IMPLEMENTATIONS = ("ulysses", "libra")
Layout = tuple[int, int, int]
"""Data, context and pipeline parallel size."""
AT_LEAST_ONE = (
    *("gpus", "context_parallel", "turns", "seq_length", "microbatches", "iterations", "seconds"),
    *("layers", "hidden", "ffn", "block_size", "head_split"),
)
LEAST = dict.fromkeys(AT_LEAST_ONE, 1) | {"warmup": 0, "token_pairs": 0}
"""Of the flags that are sizes."""
COLUMNS = (
    *("dp", "cp", "pp", "pool", "kernel", "transport", "seq_length", "ulysses_tokens_s"),
    *("libra_tokens_s", "speedup", "bound_time", "bound_flops", "share_time", "share_flops"),
    *("max_loss_difference", "ulysses_loss_difference", "runs"),
)


def flags(doc: str, seconds: float, *, turns: int) -> argparse.ArgumentParser:
    """The flags of this benchmark and of bench_scaling.py."""
    parser = arguments(doc, seconds=seconds)
    parser.add_argument("--gpus", type=int, default=None, help="by default all")
    parser.add_argument("--context-parallel", type=int, default=1)
    parser.add_argument("--turns", type=int, default=turns, help="runs of each implementation")
    parser.add_argument("--preset", choices=CORPORA, default="longtail-256k")
    parser.add_argument("--seq-length", type=int, default=65536)
    parser.add_argument("--microbatches", type=int, default=2, help="of a replica in a step")
    parser.add_argument("--iterations", type=int, default=20)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--model", choices=MODELS, default="small", help="see bench_models.py")
    parser.add_argument("--layers", type=int, help="instead of the model's")
    parser.add_argument("--hidden", type=int, help="the same")
    parser.add_argument("--ffn", type=int, help="the same, of the MLP or of each expert")
    parser.add_argument("--kernel", default="auto")
    parser.add_argument("--transport", default="auto")
    parser.add_argument("--block-size", type=int, default=1024)
    parser.add_argument("--head-split", type=int, default=1)
    parser.add_argument("--load-slack", type=float, default=0.01)
    parser.add_argument("--token-pairs", type=int, default=TOKEN_PAIRS)
    parser.add_argument(
        "--connections",
        choices=("1", "unset"),
        default="1",
        help="CUDA_DEVICE_MAX_CONNECTIONS; CUDA has several queues with both, and one with 1 and "
        "--extra --libra-keep-one-queue",
    )
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="Megatron's flags")
    return parser


def settle(args: argparse.Namespace, parser: argparse.ArgumentParser) -> Model:
    """Fill in what depends on other flags; returns the model. Leaves with a line where a size
    cannot be."""
    if args.gpus is None:
        args.gpus = torch.cuda.device_count() if args.device == "cuda" else 2
    check_sizes(args, parser)
    args.out = args.out.resolve()  # trainings run in the repository's root
    if args.tiny:
        args.seq_length, args.iterations, args.warmup, args.block_size = 512, 2, 1, 64
    model = MODELS[args.model]
    if args.device == "cpu":
        args.kernel, args.transport, model = "reference", "gloo", model.tiny
    given = {"num_layers": args.layers, "hidden_size": args.hidden, "ffn_size": args.ffn}
    return replace(model, **{name: size for name, size in given.items() if size is not None})


def check_sizes(args: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Leave with a line where a size is too small, or CP does not divide the GPUs."""
    for name, least in LEAST.items():
        size = getattr(args, name)
        if size is not None and size < least:
            parser.error(f"--{name.replace('_', '-')} ({size}) must be at least {least}.")
    if args.gpus % args.context_parallel:
        parser.error(
            f"--context-parallel ({args.context_parallel}) must divide the {args.gpus} GPUs."
        )


def run_of(
    args: argparse.Namespace,
    model: Model,
    implementation: str,
    *,
    layout: Layout,
    cost_model: str | None = None,
) -> Run:
    """A run of an implementation.

    Args:
        cost_model: given, forwards are timed and predicted (pretrain_timed.py).
    """
    data, context, pipeline = layout
    steps, batch = args.warmup + args.iterations, args.microbatches * pipeline * data
    tokens = steps * batch * args.seq_length
    choices = {
        "context-parallel-impl": implementation,
        "libra-pool-size": data,
        "libra-block-size": args.block_size,
        "libra-head-split": args.head_split,
        "libra-load-slack": args.load_slack,
        "libra-token-pairs": args.token_pairs,
        "libra-kernel": args.kernel,
        "libra-transport": args.transport,
    }
    name = f"{implementation}-dp{data}-cp{context}-pp{pipeline}"
    timed = ("gpu/pretrain_timed.py", f"--forwards={args.out / name}", f"--cost-model={cost_model}")
    return Run(
        name=name,
        script=("pretrain_gpt.py",) if cost_model is None else timed,
        model=model,
        gpus=data * context * pipeline,
        context_parallel=context,
        pipeline_parallel=pipeline,
        global_batch=batch,
        seq_length=args.seq_length,
        iterations=steps,
        device=args.device,
        corpus=write_corpus(args.out, args.preset, args.seq_length, tokens + tokens // 8),
        libra=(*(f"--{name}={value}" for name, value in choices.items()), *args.extra),
        connections=args.connections,
    )


def train_both(
    args: argparse.Namespace,
    model: Model,
    job: Job,
    *,
    layout: Layout,
    turns: int,
    cost_model: str | None = None,
) -> dict[str, list[Case]]:
    """Runs of both implementations in turn; one that fails is printed and left out. Arguments are
    those of run_of."""
    done: dict[str, list[Case]] = {name: [] for name in IMPLEMENTATIONS}
    for turn in range(turns):
        for name in IMPLEMENTATIONS:
            left = job.deadline - time.time()
            if left <= 0:
                print(f"{name}, turn {turn}: no time left", flush=True)
                continue
            run = run_of(args, model, name, layout=layout, cost_model=cost_model)
            try:
                record = run.train(args.out, left)
            except Exception:
                trace = traceback.format_exc()
                print_block(f"{run.name}, turn {turn} failed", trace)
                append(job.path, {"run": run.name, "turn": turn, "error": trace[-4000:]})
                continue
            spent = sum(record["elapsed_ms"][args.warmup :])
            tokens = run.global_batch * run.seq_length * args.iterations
            record |= {"ms": spent, "tokens_s": tokens / spent * 1e3}
            done[name].append(record)
            append(job.path, {"run": run.name, "turn": turn, **record})
            print(run_line(run.name, record), flush=True)
    return done


def run_line(name: str, record: Case) -> str:
    """Speed, and where the time of the whole run went."""
    before = max(record["startup_s"].values(), default=0.0)
    iterations = sum(record["elapsed_ms"]) / 1e3
    return (
        f"{name}: {record['tokens_s']:.0f} tokens/s; {before:.0f} s before its iterations, "
        f"{record['elapsed_ms'][0] / 1e3:.0f} s the first, {iterations:.0f} s all, "
        f"{record['wall_s']:.0f} s the run"
    )


def measure_rate(args: argparse.Namespace, model: Model) -> Case:
    """The bare kernel's milliseconds of a pair; {} if it cannot be measured."""
    job = Job.of("kernel_rate", args, 1)
    job.path.unlink(missing_ok=True)
    shape = asdict(model.shape)
    case = {"shape": shape, "kernel": args.kernel, "preset": args.preset}
    case["seq_length"] = args.seq_length
    run_cases(kernel_rate, [case], job, line=rate_line)
    rows = read_rows(job.path)
    return rows[-1] if rows else {}


def rate_line(record: Case) -> str:
    """One line for the rate."""
    return f"{record['kernel']}: {record['ms_per_pair'] * 1e9:.1f} ms for 1e9 pairs of a layer"


def compare(
    args: argparse.Namespace,
    model: Model,
    done: dict[str, list[Case]],
    rate: Case,
    *,
    layout: Layout,
) -> Case:
    """Speedup, shares and bounds of a layout; needs a run of each implementation."""
    data, context, pipeline = layout
    base, ours = (statistics.median(r["tokens_s"] for r in done[n]) for n in IMPLEMENTATIONS)
    ulysses, libra = done["ulysses"][0], done["libra"][0]
    records = ulysses["telemetry"][args.warmup :]
    heaviest = sum(record["step_straggler_pairs"] for record in records)
    mean = sum(record["mean_pairs"] for record in records)
    batch = args.microbatches * pipeline * data
    tokens = len(records) * batch * args.seq_length / (data * context)
    dense, pair = tokens * model.dense_flops, model.attention_flops
    result = {
        **{"dp": data, "cp": context, "pp": pipeline, "pool": data},
        **{"kernel": rate.get("kernel", args.kernel), "transport": args.transport},
        "seq_length": args.seq_length,
        "ulysses_tokens_s": base,
        "libra_tokens_s": ours,
        "speedup": ours / base,
        "share_flops": mean * pair / (dense + mean * pair),
        "bound_flops": (dense + heaviest * pair) / (dense + mean * pair),
        "max_loss_difference": loss_difference(ulysses, libra),
        "ulysses_loss_difference": max(
            (loss_difference(ulysses, again) for again in done["ulysses"][1:]), default="none"
        ),
        "runs": [len(done[name]) for name in IMPLEMENTATIONS],
    }
    if "ms_per_pair" in rate and pipeline == 1:
        again = rate["forward_ms_per_pair"] * (model.num_forwards - 1)
        ms = (rate["ms_per_pair"] + again) * model.num_layers
        ulysses_ms = statistics.median(r["ms"] for r in done["ulysses"])
        libra_ms = statistics.median(r["ms"] for r in done["libra"])
        result["share_time"] = mean * ms / libra_ms
        result["bound_time"] = ulysses_ms / (ulysses_ms - (heaviest - mean) * ms)
    return result


def loss_difference(run: Case, other: Case) -> float:
    """The largest of an iteration."""
    return max(abs(a - b) for a, b in zip(run["losses"], other["losses"], strict=True))


def main() -> int:
    parser = flags(__doc__, seconds=235, turns=2)
    args = parser.parse_args()
    require_device(args.device)
    model = settle(args, parser)
    args.turns = 1 if args.tiny else args.turns
    layout = (args.gpus // args.context_parallel, args.context_parallel, 1)
    job = Job.of("train", args, args.gpus)
    job.path.unlink(missing_ok=True)
    rate = measure_rate(args, model)
    done = train_both(args, model, job, layout=layout, turns=args.turns)
    if not all(done.values()):
        return 1
    result = compare(args, model, done, rate, layout=layout)
    result |= {"model": asdict(model), "preset": args.preset, "iterations": args.iterations}
    append(job.path, {"comparison": True, **result})
    show("end to end", [row for row in read_rows(job.path) if "comparison" in row], COLUMNS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
