"""The second half of `libra replay`. In: a prepared replay, a cost model. Out: tables and files."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import typer

from megatron_libra.cli.replay_choices import choices_line
from megatron_libra.cli.replay_measuring import Measuring, Seconds, measured_seconds
from megatron_libra.cli.replay_tables import (
    show_errors,
    show_figure,
    show_losses,
    show_notes,
    show_throughput,
    show_written,
)
from megatron_libra.replay.calls import KernelCall
from megatron_libra.replay.figures import FIGURES
from megatron_libra.replay.pool_trace import find_pool, pool_name, pool_tracks, write_pool_trace
from megatron_libra.replay.replay import Replay
from megatron_libra.replay.report import (
    Summary,
    replay_answer,
    source_notes,
    source_of,
    speed_notes,
    summaries,
)
from megatron_libra.replay.throughput import ThroughputGrid, predicted_grid, throughput_grid
from megatron_libra.replay.times import pool_times, predicted
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.job import TrainingJob

__all__ = ["figure_5", "finish"]


def finish(
    replay: Replay,
    model: CostModel,
    measuring: Measuring | None,
    *,
    out: Path | None,
    png: Path | None,
    trace: Path | None,
    trace_pool: str,
    inter_node_from: str,
    as_json: bool,
) -> None:
    """Measure or predict, and write what was asked for."""
    ours = predicted(replay, model)
    seconds = Seconds(ours, {}, None)
    if measuring is not None:
        seconds = measured_seconds(replay, ours, measuring, model)
    times = pool_times(replay, seconds.parts, model)
    found = summaries(replay, times, seconds.was_run)
    links = {"name": model.name, **asdict(model.links), "inter_node_gb_s_from": inter_node_from}
    answer = replay_answer(replay, found, links, seconds.errors, seconds.measured)
    text = json.dumps(answer, allow_nan=False)
    if out:
        out.write_text(text + "\n", encoding="ascii")
    if png:
        from megatron_libra.replay.drawings import DRAWINGS

        DRAWINGS[replay.figure](replay, found, source_of(found)).savefig(png, dpi=150)
    pool = ""
    if trace:
        row = find_pool(replay, trace_pool, times.layer)
        tracks = pool_tracks(replay, row, ours, seconds.parts, seconds.was_run)
        write_pool_trace(replay, row, tracks, model, trace)
        pool = f" (pool {pool_name(replay, row)}; open it in ui.perfetto.dev)"
    if as_json:
        typer.echo(text)
    else:
        _show(replay, found, links, seconds)
        show_written({out: "", png: "", trace: pool})


def _show(
    replay: Replay, found: Sequence[Summary], links: dict[str, Any], seconds: Seconds
) -> None:
    corpus = replay.corpus
    source = (
        f"Times are predicted by the cost model {links['name']}; no kernel was run."
        if seconds.measured is None or not seconds.measured["workers_measured"]
        else f"Kernel times of {seconds.measured['workers_measured']} workers are measured "
        f"({seconds.measured['device']}), the others' are the model's, scaled."
    )
    show_figure(
        FIGURES[replay.figure].table(replay, found),
        f"{choices_line(replay)}"
        f"{corpus.name}, {corpus.packing}; {corpus.num_windows} optimizer steps. {source} The "
        f"exchange is simulated: {links['intra_node_gb_s']:g} GB/s inside a node, "
        f"{links['inter_node_gb_s']:g} GB/s between nodes ({links['inter_node_gb_s_from']}), "
        f"{links['message_us']:g} us a message, overlap loss {links['overlap_loss']:g}.\n",
    )
    show_notes((*source_notes(found, seconds.errors), *speed_notes(found)))
    if replay.figure == "13":
        show_losses(found)
    if seconds.measured is not None:
        show_errors(found, seconds.errors, seconds.measured)


def figure_5(
    job: TrainingJob,
    model: CostModel,
    measuring: Measuring | None,
    *,
    out: Path | None,
    png: Path | None,
    as_json: bool,
) -> None:
    """Throughput of single calls of the job's heads on a full-length sample."""
    grid = (
        predicted_grid(job.shape, job.seq_length, model)
        if measuring is None
        else _measured_grid(job, measuring, model)
    )
    answer = {"figure": "5", "times": "predicted" if measuring is None else "measured",
              **asdict(grid), "forward": grid.forward.tolist(),
              "backward": grid.backward.tolist()}  # fmt: skip
    text = json.dumps(answer, allow_nan=False)
    if out:
        out.write_text(text + "\n", encoding="ascii")
    if png:
        from megatron_libra.replay.drawings import draw_throughput

        draw_throughput(grid).savefig(png, dpi=150)
    if as_json:
        typer.echo(text)
    else:
        show_throughput(grid)
        show_written({out: "", png: ""})


def _measured_grid(job: TrainingJob, wish: Measuring, model: CostModel) -> ThroughputGrid:
    from megatron_libra.replay.measuring import timer_for

    timer = timer_for(job.shape.head_dim, wish.kernel, wish.device, model)

    def seconds(call: KernelCall) -> tuple[float, float]:
        found = timer.seconds(call)
        return found.forward, found.backward

    return throughput_grid(job.shape, job.seq_length, timer.label, seconds)
