"""How long a function takes on a device. In: a function that enqueues work. Out: seconds.

On CUDA a run lasts from an event before to one behind it. Before each, the device multiplies
matrices, as the layers around attention do: its clock is that of lasting work (some per cent lower
than of a single call), its caches hold other things, and the host gets ahead, so that launches do
not show. On the CPU it is the wall clock.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

__all__ = ["issue_seconds", "median_seconds", "run_seconds"]

PRODUCT_SIZE = 4096
NUM_PRODUCTS = 3
"""Matrix products before each run: about 0.6 ms on an H200, three times what a call takes to issue.
"""


def run_seconds(run: Callable[[], object], device: torch.device, count: int) -> list[float]:
    """Each of `count` runs in a row."""
    if device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            run()
            marks.append(time.perf_counter())
        return [stop - start for start, stop in zip(marks[:-1], marks[1:], strict=True)]
    work = _Products(device)
    events = []
    for _ in range(count):
        work()
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        run()
        stop.record()
        events.append((start, stop))
    torch.cuda.synchronize(device)
    return [start.elapsed_time(stop) / 1e3 for start, stop in events]


class _Products:
    """Work for the device that does not belong to a run."""

    def __init__(self, device: torch.device) -> None:
        self.factor = torch.randn(PRODUCT_SIZE, PRODUCT_SIZE, device=device, dtype=torch.bfloat16)
        self.out = torch.empty_like(self.factor)

    def __call__(self) -> None:
        for _ in range(NUM_PRODUCTS):
            torch.matmul(self.factor, self.factor, out=self.out)


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
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)
