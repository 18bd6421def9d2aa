"""Run the kernel calls of chosen workers on this machine's device. In: Replay, order. Out:
Measurement.

One chunk is run for all M of a worker, because they have equal shapes. A worker that would exceed
the seconds that are left is passed over, so that cheaper ones behind it still get their turn. A
kernel that compiles at the first call of a kind does so before the first worker.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.executor.kernels import pick_kernel
from megatron_libra.replay.calls import KernelCall, table_of
from megatron_libra.replay.measure import (
    MANY_ENTRIES,
    CallKind,
    CallSeconds,
    CallTimer,
    measure_worker,
)
from megatron_libra.replay.replay import Progress, Replay
from megatron_libra.replay.timing import run_seconds
from megatron_libra.replay.workers import calls_of_worker
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.pool_work import PoolWork

__all__ = ["Measurement", "measure", "timer_for"]

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]
RUNS = 3.0
"""What a worker is thought to cost over its predicted seconds, until workers have shown it."""
MOST_RUNS = 8.0
"""The first workers may be slow, which says little of the later ones."""
REFUSAL_LENGTH = 200
REPEATS, CALL_BUDGET_S = 3, 0.1
"""Timed runs of a pass, unless they take longer."""
LONG_S = 0.5
"""Predicted seconds from which the first run of a pass counts: no warm-up, no repetition."""
EXPECTED = 1.3
"""If it takes longer than predicted by more than this factor, it is run again after all."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measurement:
    """What was run."""

    label: str
    """Device and kernel."""
    columns: Float
    """(N, 8) seconds, see workers.py; NaN for workers that were not run."""
    num_wanted: int
    num_measured: int
    refusals: tuple[str, ...]
    """Why workers could not be run: the device's memory, the kernel's index type."""
    seconds: float
    """Wall clock of everything on the device."""


class _Timer(CallTimer):
    """Times long passes, which vary little, once; a first run that had to compile is repeated."""

    model: CostModel

    def _measured(self, call: KernelCall) -> CallSeconds:
        table = table_of([call])
        forward, backward = (
            self._pass_seconds(
                run,
                float(
                    self.model.pass_cost(call.head_dim, backward=bool(is_backward)).seconds(
                        table, self.model.num_sms
                    )[0]
                ),
            )
            for is_backward, run in enumerate(self._passes(call))
        )
        return CallSeconds(forward, backward)

    def _pass_seconds(self, run: Callable[[], None], expected: float) -> float:
        if expected >= LONG_S:
            (seconds,) = run_seconds(run, self.device, 1)
            if seconds <= EXPECTED * expected:
                return seconds
        return self._median(run)


def timer_for(head_dim: int, kernel: str, device: str, model: CostModel) -> CallTimer:
    """A timer with the kernel that training would pick here; the model tells which passes are long.

    Raises:
        ValueError: the kernel or the device is not to be had.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("measuring needs a CUDA device and there is none; try --measure 0.")
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    picked = pick_kernel(kernel, device=place, dtype=dtype, head_dim=head_dim)
    timer = _Timer(picked, place, repeats=REPEATS, call_budget_s=CALL_BUDGET_S)
    timer.model = model
    return timer


def measure(
    replay: Replay,
    predicted: Float,
    order: Sequence[int] | Int64,
    timer: CallTimer,
    *,
    budget_s: float,
    progress: Progress = lambda finished, total: None,
) -> Measurement:
    """Run workers in the given order until the seconds are used up.

    Args:
        predicted: (N, 8) seconds by worker and part, to tell what still fits.
        order: rows to run, the most telling first.
        budget_s: wall clock to stay within, by the predictions.
    """
    sizes = [work.num_workers for work in replay.works]
    start = np.cumsum(sizes) - sizes
    found = np.full_like(predicted, np.nan)
    begin = time.perf_counter()
    wanted = np.unique(np.searchsorted(start, order, side="right") - 1)
    timer.warm_up(_kinds(replay.works[index] for index in wanted.tolist()))
    spent = compiling = time.perf_counter() - begin
    runs, base, refusals = RUNS, 0.0, []
    for number, row in enumerate(np.asarray(order).tolist()):
        progress(number, len(order))
        cost = float(predicted[row].sum())
        if spent + runs * cost > budget_s:
            continue
        index = int(np.searchsorted(start, row, side="right")) - 1
        try:
            seconds = measure_worker(
                calls_of_worker(replay.works[index], int(row - start[index])), timer
            )
        except Exception as error:  # whatever the kernel raises; a lack of memory, too
            refusals.append(" ".join(str(error).split())[:REFUSAL_LENGTH])
            if timer.device.type == "cuda":
                torch.cuda.empty_cache()
            continue
        found[row] = (*seconds.forward, *seconds.backward)
        spent, base = time.perf_counter() - begin, base + cost
        runs = min((spent - compiling) / base, MOST_RUNS) if base else RUNS
    progress(len(order), len(order))
    return Measurement(
        label=timer.label,
        columns=found,
        num_wanted=len(order),
        num_measured=int((~np.isnan(found).any(axis=1)).sum()),
        refusals=tuple(refusals),
        seconds=time.perf_counter() - begin,
    )


def _kinds(works: Iterable[PoolWork]) -> set[CallKind]:
    """Of all calls."""
    kinds: set[CallKind] = set()
    for work in works:
        calls = work.calls
        entries = np.diff(calls.first, append=len(calls.num_queries))
        columns = calls.query_heads, calls.kv_heads, entries > MANY_ENTRIES
        kinds |= {
            CallKind(work.head_dim, *kind)
            for kind in zip(*(column.tolist() for column in columns), strict=True)
        }
    return kinds
