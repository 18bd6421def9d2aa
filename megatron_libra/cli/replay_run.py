"""The second half of `libra replay`. In: a prepared replay, a cost model. Out: tables and files."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import typer
from numpy.typing import NDArray

from megatron_libra.cli.replay_tables import (
    show_errors,
    show_figure,
    show_losses,
    show_throughput,
)
from megatron_libra.cli.simulation import show_progress
from megatron_libra.replay.calls import KernelCall
from megatron_libra.replay.figures import FIGURES
from megatron_libra.replay.pool_trace import find_pool, write_pool_trace
from megatron_libra.replay.replay import Replay
from megatron_libra.replay.report import Summary, replay_answer, summaries
from megatron_libra.replay.sampling import ModelError, corrected, measuring_order, model_error
from megatron_libra.replay.throughput import ThroughputGrid, predicted_grid, throughput_grid
from megatron_libra.replay.times import pool_times, predicted
from megatron_libra.replay.workers import by_work, part_columns, weights, worker_table
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.plots import require_matplotlib

__all__ = ["Measuring", "figure_5", "finish"]

Float = NDArray[np.float64]
SEED = 0
"""Of the sample of workers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Measuring:
    """What is to be run on a device."""

    heaviest: int | None
    """Of every pool; None: all workers."""
    sample: int
    seconds: float
    kernel: str
    device: str

    @classmethod
    def of(cls, text: str | None, **others: Any) -> Measuring | None:
        """By the option --measure: a number, all, or nothing given (2 with CUDA, else 0); None if
        nothing shall be run.

        Raises:
            ValueError: anything else.
        """
        if text is None:
            text = "2" if _has_cuda() else "0"
        if text != "all" and not text.isdecimal():
            raise ValueError(f"--measure ({text!r}) must be a number or all; try 2, or 0 for none.")
        if others["device"] not in ("cuda", "cpu"):
            raise ValueError(f"--device ({others['device']!r}) must be cuda or cpu.")
        if text == "0":
            return None
        return cls(heaviest=None if text == "all" else int(text), **others)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@dataclass(frozen=True, slots=True, eq=False)
class _Seconds:
    """Seconds of all workers' parts, and where they are from."""

    parts: list[Float]
    errors: dict[str, ModelError | None]
    measured: dict[str, Any] | None

    @property
    def kind(self) -> str:
        """For titles."""
        return "predicted" if self.measured is None else "measured"


def finish(
    replay: Replay,
    model: CostModel,
    measuring: Measuring | None,
    *,
    out: Path | None,
    png: Path | None,
    trace: Path | None,
    trace_pool: str,
    as_json: bool,
) -> None:
    """Measure or predict, and write what was asked for."""
    if png:
        require_matplotlib()
    ours = predicted(replay, model)
    seconds = _Seconds(ours, {}, None)
    if measuring is not None:
        seconds = _measured(replay, ours, measuring, model)
    times = pool_times(replay, seconds.parts, model)
    found = summaries(replay, times)
    answer = replay_answer(replay, found, _links(model), seconds.errors, seconds.measured)
    text = json.dumps(answer, allow_nan=False)
    if out:
        out.write_text(text + "\n", encoding="ascii")
    if png:
        from megatron_libra.replay.drawings import DRAWINGS

        DRAWINGS[replay.figure](replay, found, seconds.kind).savefig(png, dpi=150)
    if trace:
        tracks = {"predicted": ours} | ({seconds.kind: seconds.parts} if measuring else {})
        write_pool_trace(replay, find_pool(replay, trace_pool, times.layer), tracks, model, trace)
    if as_json:
        typer.echo(text)
    else:
        _show(replay, found, model, seconds)


def _measured(replay: Replay, ours: list[Float], wish: Measuring, model: CostModel) -> _Seconds:
    from megatron_libra.replay.measuring import measure, timer_for

    table, columns = worker_table(replay, ours), part_columns(ours)
    timer = timer_for(replay.works[0].head_dim, wish.kernel, wish.device, model)
    order = measuring_order(table, heaviest=wish.heaviest, sample=wish.sample, seed=SEED)
    with show_progress() as told:
        run = measure(
            replay, columns, order, timer, budget_s=wish.seconds, progress=told("measuring")
        )
    parts = by_work(replay, corrected(table, columns, run.columns))
    scale = weights(replay)
    errors = {
        series.name: model_error(
            (columns * scale)[table.method == number], (run.columns * scale)[table.method == number]
        )
        for number, series in enumerate(replay.series)
    }
    errors["all"] = model_error(columns * scale, run.columns * scale)
    return _Seconds(
        parts,
        errors,
        {
            "device": run.label,
            "workers": len(table),
            "workers_wanted": run.num_wanted,
            "workers_measured": run.num_measured,
            "workers_refused": len(run.refusals),
            "first_refusal": run.refusals[0] if run.refusals else None,
            "seconds": run.seconds,
            "model_error": None if errors["all"] is None else asdict(errors["all"]),
        },
    )


def _links(model: CostModel) -> dict[str, Any]:
    return {"name": model.name, **asdict(model.links)}


def _show(replay: Replay, found: Sequence[Summary], model: CostModel, seconds: _Seconds) -> None:
    corpus, links = replay.corpus, model.links
    source = (
        f"Times are predicted by the cost model {model.name}; no kernel was run."
        if seconds.measured is None
        else f"Kernel times are measured ({seconds.measured['device']}), others follow the model."
    )
    show_figure(
        FIGURES[replay.figure].table(replay, found),
        f"{corpus.name}, {corpus.packing}; {corpus.num_windows} optimizer steps. {source} The "
        f"exchange is simulated: {links.intra_node_gb_s:g} GB/s inside a node, "
        f"{links.inter_node_gb_s:g} GB/s between nodes, {links.message_us:g} us a message, overlap "
        f"loss {links.overlap_loss:g}.\n",
    )
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
    if png:
        require_matplotlib()
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


def _measured_grid(job: TrainingJob, wish: Measuring, model: CostModel) -> ThroughputGrid:
    from megatron_libra.replay.measuring import timer_for

    timer = timer_for(job.shape.head_dim, wish.kernel, wish.device, model)

    def seconds(call: KernelCall) -> tuple[float, float]:
        found = timer.seconds(call)
        return found.forward, found.backward

    return throughput_grid(job.shape, job.seq_length, timer.label, seconds)
