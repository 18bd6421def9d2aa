"""The command `libra replay`. In: a corpus and a job, or a prepared file. Out: a figure's numbers.

libra replay longtail-256k                                   Figure 13, predicted without a GPU
libra replay longtail-256k --prepare fig13.npz               plans only, on a machine without a GPU
libra replay --load fig13.npz --measure 2 --out fig13.json   kernels really run, on one GPU
"""

from __future__ import annotations

import json
import os
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from megatron_libra.cli.options import MAX_PROCESSES, option, size_option
from megatron_libra.cli.output_files import files_read, require_writable
from megatron_libra.cli.progress import show_progress
from megatron_libra.cli.replay_measuring import Measuring
from megatron_libra.cli.replay_options import check_options
from megatron_libra.cli.replay_request import (
    INTER_NODE_GB_S,
    JobOptions,
    base_choices,
    inter_node,
    linked,
    read_seeds,
    read_windows,
)
from megatron_libra.cli.replay_run import figure_5, finish
from megatron_libra.cli.replay_size import check_samples, check_sizes
from megatron_libra.config import CHOICES
from megatron_libra.replay.archive import load_replay, save_replay
from megatron_libra.replay.figures import FIGURES, Choices
from megatron_libra.replay.grid import MAX_HEADS
from megatron_libra.replay.methods import FIGURE_13, METHODS
from megatron_libra.replay.replay import Replay, prepare
from megatron_libra.simulator.calibration import BUILT_IN, load_cost_model
from megatron_libra.simulator.corpus import PACKINGS
from megatron_libra.simulator.job import PRESET_JOBS
from megatron_libra.simulator.plots import require_matplotlib
from megatron_libra.simulator.processes import TaskPool

__all__ = ["replay"]

Size = int | None
Rate = float | None
INTER_NODE_HELP = f"Of a worker; default: FILE's, {INTER_NODE_GB_S:g} with a built-in model."


def replay(
    context: typer.Context,
    corpus: Annotated[
        str | None,
        typer.Argument(
            metavar="[CORPUS]",
            help=f"Lengths, as libra simulate takes them, or a preset: {', '.join(PRESET_JOBS)}.",
        ),
    ] = None,
    figure: Annotated[
        str, option("--figure", f"5, {', '.join(FIGURES)}: which figure of the paper.")
    ] = "13",
    method: Annotated[
        list[str] | None,
        option("--method", f"Of Figure 13: {', '.join(METHODS)}; may be repeated."),
    ] = None,
    seeds: Annotated[str, option("--seeds", "One corpus for each.")] = "0,1,2,3",
    steps: Annotated[int, option("--steps", "Optimizer steps of each seed.", min=1)] = 1,
    pack: Annotated[str, option("--pack", f"A file: {', '.join(PACKINGS)}.")] = "auto",
    seq_length: Annotated[Size, size_option("--seq-length", "L, tokens.")] = None,
    context_parallel_size: Annotated[
        Size, size_option("--context-parallel-size --cp", "CP.")
    ] = None,
    data_parallel_size: Annotated[Size, size_option("--data-parallel-size --dp", "DP.")] = None,
    global_batch_size: Annotated[Size, size_option("--global-batch-size --gbs", "GBS.")] = None,
    query_heads: Annotated[Size, size_option("--query-heads", "Of a worker.", MAX_HEADS)] = None,
    kv_heads: Annotated[Size, size_option("--kv-heads", "Of a worker.", MAX_HEADS)] = None,
    head_dim: Annotated[Size, size_option("--head-dim", "Elements of a head.", MAX_HEADS)] = None,
    gpus_per_node: Annotated[int, size_option("--gpus-per-node", "Workers of a node.")] = 8,
    pool_size: Annotated[Size, option("--pool-size", "P; default 8.")] = None,
    block_size: Annotated[Size, option("--block-size", "B; default L / 256.")] = None,
    head_split: Annotated[Size, option("--head-split", "H; default 16, if it fits.")] = None,
    chunks: Annotated[Size, option("--chunks", "M; default by size.")] = None,
    load_slack: Annotated[Rate, option("--load-slack", "tau; default 0.01.")] = None,
    placer: Annotated[str, option("--placer", "Of Libra's pools.")] = "home_first",
    scope: Annotated[str, option("--scope", "Of VRSP: microbatch or step.")] = "microbatch",
    cost_model: Annotated[
        str, option("--cost-model", f"{', '.join(BUILT_IN)}, or a FILE of libra calibrate.")
    ] = "h200-fa4",
    intra_node_gb_s: Annotated[Rate, option("--intra-node-gb-s", "Of a worker.")] = None,
    inter_node_gb_s: Annotated[Rate, option("--inter-node-gb-s", INTER_NODE_HELP)] = None,
    message_us: Annotated[Rate, option("--message-us", "Of an exchange.")] = None,
    overlap_loss: Annotated[
        Rate, option("--overlap-loss", "Share of a hidden transfer that computation loses.")
    ] = None,
    measure: Annotated[
        str | None,
        option("--measure", "Heaviest workers of each pool to run, or all; default: 2 on CUDA."),
    ] = None,
    sample: Annotated[
        int, option("--sample", "Random workers of each method to run besides.", min=0)
    ] = 8,
    seconds: Annotated[float, option("--seconds", "Of measuring.", min=0)] = 300.0,
    kernel: Annotated[str, option("--kernel", f"{', '.join(CHOICES['kernel'])}.")] = "auto",
    device: Annotated[str, option("--device", "cuda, or cpu to try it out.")] = "cuda",
    processes: Annotated[
        Size, size_option("--processes", "That plan; default: cores.", MAX_PROCESSES)
    ] = None,
    to_prepare: Annotated[
        Path | None, option("--prepare", "Plan, write this .npz, and stop.")
    ] = None,
    to_load: Annotated[Path | None, option("--load", "A prepared .npz instead of CORPUS.")] = None,
    out: Annotated[Path | None, option("--out", "Write the JSON answer.")] = None,
    png: Annotated[Path | None, option("--png", "Draw the figure.")] = None,
    trace: Annotated[Path | None, option("--trace", "Write a Chrome trace of one pool.")] = None,
    trace_pool: Annotated[
        str, option("--trace-pool", "SERIES:WINDOW:MICROBATCH:POOL; default: the slowest.")
    ] = "",
    as_json: Annotated[bool, option("--json", "Print one JSON object.")] = False,
) -> None:
    """Replay the attention of a whole cluster on one GPU, or predict it without one."""
    check_options(context)
    read = [*files_read(corpus, cost_model), to_load]
    require_writable(to_prepare, out, png, trace, inputs=read)
    _check_picture(png)
    inter_node_gb_s, inter_node_from = inter_node(cost_model, inter_node_gb_s)
    model = linked(
        load_cost_model(cost_model),
        {
            "intra_node_gb_s": intra_node_gb_s,
            "inter_node_gb_s": inter_node_gb_s,
            "message_us": message_us,
            "overlap_loss": overlap_loss,
        },
    )
    measuring = Measuring.of(measure, sample=sample, seconds=seconds, kernel=kernel, device=device)
    if to_load is not None:
        prepared = load_replay(to_load)
    else:
        assert corpus is not None
        job = JobOptions(
            seq_length=seq_length,
            context_parallel_size=context_parallel_size,
            data_parallel_size=data_parallel_size,
            global_batch_size=global_batch_size,
            query_heads=query_heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            workers_per_node=gpus_per_node,
        ).job(corpus)
        if figure == "5":
            figure_5(job, model, measuring, out=out, png=png, as_json=as_json)
            return
        base = base_choices(
            job,
            {
                "pool_size": pool_size,
                "block_size": block_size,
                "head_split": head_split,
                "chunks": chunks,
                "load_slack": load_slack,
                "placer": placer,
            },
        )
        choices = Choices(base=base, scope=scope, methods=tuple(method or FIGURE_13))
        series = FIGURES[figure].series(job, choices)
        check_sizes(series, base)
        described, windows = read_windows(
            corpus, job, seeds=read_seeds(seeds), steps=steps, pack=pack
        )
        check_samples(series, base, windows)
        with TaskPool(processes or os.cpu_count() or 1) as tasks, show_progress() as told:
            prepared = prepare(figure, described, windows, series, tasks, told("planning"))
    if to_prepare is not None:
        save_replay(prepared, to_prepare)
        _tell_prepared(prepared, to_prepare, as_json)
        return
    finish(
        prepared, model, measuring, out=out, png=png, trace=trace, trace_pool=trace_pool,
        inter_node_from=inter_node_from, as_json=as_json,
    )  # fmt: skip


def _check_picture(png: Path | None) -> None:
    """Behind another name matplotlib would write another format, or add .png in silence."""
    if png is None:
        return
    if png.suffix.lower() != ".png":
        raise ValueError(f"--png ({png}) must end with .png; try {png.with_suffix('.png')}.")
    require_matplotlib("--png")


def _tell_prepared(prepared: Replay, path: Path, as_json: bool) -> None:
    size = path.stat().st_size
    if as_json:
        answer = {"prepared": str(path), "bytes": size, "pools": len(prepared.rows),
                  "plans": len(prepared.works), "corpus": asdict(prepared.corpus)}  # fmt: skip
        typer.echo(json.dumps(answer))
        return
    with suppress(BrokenPipeError):
        typer.echo(
            f"{path}: figure {prepared.figure}, {len(prepared.rows)} pools of "
            f"{len(prepared.series)} series, {len(prepared.works)} different plans, "
            f"{size / 1e6:.1f} MB; next: libra replay --load {path} --measure 2"
        )
