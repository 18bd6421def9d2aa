"""How long a function takes on a device. In: a function that enqueues work. Out: seconds.

On CUDA a run lasts from one event to the next, behind a queued sleep that lets the host get ahead,
so that launches do not show. On the CPU it is the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["issue_seconds", "median_seconds", "run_seconds"]

QUEUED_CYCLES = 4_000_000
"""Clock cycles (about 2 ms) that the device sleeps while the host queues the timed runs."""


def run_seconds(run: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Each of `count` runs in a row."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            run()
            marks.append(time.perf_counter())
        return [stop - start for start, stop in zip(marks[:-1], marks[1:], strict=True)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    torch.cuda._sleep(QUEUED_CYCLES)
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    events[-1].synchronize()
    pairs = zip(events[:-1], events[1:], strict=True)
    return [start.elapsed_time(stop) / 1e3 for start, stop in pairs]


def median_seconds(
    run: Callable[[], object], device: torch.device, *, repeats: int, budget_s: float
) -> float:
    """The median of up to `repeats` runs after a warm-up; of fewer where they would take longer
    than the budget together.
    """
    run()
    seconds = run_seconds(run, device, 1)
    more = min(repeats, int(budget_s / max(seconds[0], 1e-9))) - 1
    if more > 0:
        seconds += run_seconds(run, device, more)
    return statistics.median(seconds)


def issue_seconds(run: Callable[[], object], device: torch.device, *, repeats: int) -> float:
    """Median wall clock of the call itself; on CUDA it returns before the device is done."""
    run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda._sleep(QUEUED_CYCLES)
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
