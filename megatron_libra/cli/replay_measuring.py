"""What of a replay is really run. In: Replay, predicted seconds, --measure. Out: all seconds, and
which workers' were measured.
"""

from __future__ import annotations

import importlib.util
from dataclasses import asdict, dataclass
from math import isfinite
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_libra.cli.progress import show_progress
from megatron_libra.replay.replay import Replay
from megatron_libra.replay.sampling import (
    ModelError,
    corrected,
    known_calls,
    measuring_order,
    model_error,
)
from megatron_libra.replay.workers import by_work, by_worker, part_columns, weights, worker_table
from megatron_libra.simulator.cost_model import CostModel

__all__ = ["Measuring", "Seconds", "measured_seconds"]

Bool = NDArray[np.bool_]
Float = NDArray[np.float64]
SEED = 0
"""Of the sample of workers."""
MAX_DIGITS = 18
"""Of a number of workers."""


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
            ValueError: anything else, or there is no such device.
        """
        if text is None:
            text = "2" if _has_cuda() else "0"
        if text != "all" and not text.isdecimal():
            raise ValueError(f"--measure ({text!r}) must be a number or all; try 2, or 0 for none.")
        if len(text) > MAX_DIGITS:
            raise ValueError(
                f"--measure has {len(text)} digits; a pool has fewer workers; try all."
            )
        if others["device"] not in ("cuda", "cpu"):
            raise ValueError(f"--device ({others['device']!r}) must be cuda or cpu.")
        if text == "0":
            return None
        if others["device"] == "cuda" and not _has_cuda():
            raise ValueError(
                f"--measure ({text}) needs a CUDA device and there is none; try --measure 0, or "
                "--device cpu to try the command out."
            )
        return cls(heaviest=None if text == "all" else int(text), **others)


def _has_cuda() -> bool:
    if importlib.util.find_spec("torch") is None:
        return False
    import torch

    return bool(torch.cuda.is_available())


@dataclass(frozen=True, slots=True, eq=False)
class Seconds:
    """Seconds of all workers' parts, and where they are from."""

    parts: list[Float]
    errors: dict[str, ModelError | None]
    measured: dict[str, Any] | None
    was_run: list[Bool] | None = None
    """By work: (W,) whether a worker's kernel calls were run; None: nothing was."""


def measured_seconds(
    replay: Replay, ours: list[Float], wish: Measuring, model: CostModel
) -> Seconds:
    """Seconds of all workers: of those that were run, measured, else by the model, corrected."""
    from megatron_libra.replay.measuring import measure, timer_for

    table, columns = worker_table(replay, ours), part_columns(ours)
    timer = timer_for(replay.works[0].head_dim, wish.kernel, wish.device, model)
    order = measuring_order(table, heaviest=wish.heaviest, sample=wish.sample, seed=SEED)
    with show_progress() as told:
        run = measure(
            replay, columns, order, timer, budget_s=wish.seconds, progress=told("measuring")
        )
    scale = weights(replay)
    errors = {
        series.name: model_error(
            (columns * scale)[table.method == number], (run.columns * scale)[table.method == number]
        )
        for number, series in enumerate(replay.series)
    }
    total = errors["all"] = model_error(columns * scale, run.columns * scale)
    common = total.ratio if total is not None and isfinite(total.ratio) else 1.0
    parts = by_work(replay, corrected(table, columns, run.columns, common))
    return Seconds(
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
        by_worker(replay, known_calls(table, run.columns)),
    )
