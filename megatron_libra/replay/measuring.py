"""Run the kernel calls of chosen workers on this machine's device. In: Replay, order. Out:
Measurement.

One chunk is run for all M of a worker, because they have equal shapes. A worker that would exceed
the seconds that are left is passed over, so that cheaper ones behind it still get their turn.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.executor.kernels import pick_kernel
from megatron_libra.replay.measure import CallTimer, measure_worker
from megatron_libra.replay.replay import Progress, Replay
from megatron_libra.replay.workers import calls_of_worker

__all__ = ["Measurement", "measure", "timer_for"]

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]
RUNS = 2.3
"""What a worker costs over its time in a layer (of one chunk): a warm-up, one run, inputs."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Measurement:
    """What was run."""

    label: str
    """Device and kernel."""
    columns: Float
    """(N, 6) seconds, see workers.py; NaN for workers that were not run."""
    num_wanted: int
    num_measured: int
    num_refused: int
    """Did not fit the device's memory or the kernel's index type."""
    seconds: float
    """Wall clock of everything on the device."""


def timer_for(head_dim: int, kernel: str, device: str) -> CallTimer:
    """A timer with the kernel that training would pick here.

    Raises:
        ValueError: the kernel or the device is not to be had.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("measuring needs a CUDA device and there is none; try --measure 0.")
    place = torch.device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    return CallTimer(pick_kernel(kernel, device=place, dtype=dtype, head_dim=head_dim), place)


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
        predicted: (N, 6) seconds by worker and part, to tell what still fits.
        order: rows to run, the most telling first.
        budget_s: wall clock to stay within, by the predictions.
    """
    sizes = [work.num_workers for work in replay.works]
    start = np.cumsum(sizes) - sizes
    found = np.full_like(predicted, np.nan)
    begin, refused = time.perf_counter(), 0
    ratio = 1.0  # how much longer than predicted workers took so far
    for number, row in enumerate(np.asarray(order).tolist()):
        progress(number, len(order))
        spent = time.perf_counter() - begin
        if spent + RUNS * ratio * predicted[row].sum() > budget_s:
            continue
        index = int(np.searchsorted(start, row, side="right")) - 1
        try:
            seconds = measure_worker(
                calls_of_worker(replay.works[index], int(row - start[index])), timer
            )
        except (ValueError, torch.OutOfMemoryError):
            refused += 1
            continue
        found[row] = (*seconds.forward, *seconds.backward)
        known = ~np.isnan(found).any(axis=1)
        ratio = max(1e-3, float(found[known].sum() / max(predicted[known].sum(), 1e-12)))
    progress(len(order), len(order))
    return Measurement(
        label=timer.label,
        columns=found,
        num_wanted=len(order),
        num_measured=int((~np.isnan(found).any(axis=1)).sum()),
        num_refused=refused,
        seconds=time.perf_counter() - begin,
    )
