"""Time, count and weigh calls on one device. In: functions. Out: milliseconds, launches, bytes.

Times are device times of several calls in a row between two events, behind a short wait that the
device makes itself, so that the host is ahead as it is in training. Variants are timed in turn, so
that a clock that drifts hits all of them; medians are reported.
"""

from __future__ import annotations

import gc
import math
import statistics
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from bench_common import World
from numpy.typing import NDArray

__all__ = [
    "alternate",
    "count_launches",
    "hidden_share",
    "host_us",
    "medians",
    "peaks",
    "slowest",
    "waited_ms",
]

Call = Callable[[], Any]
HEAD_START_CYCLES = 4_000_000
"""About two milliseconds of a GPU near 2 GHz: more than the host needs to enqueue a layer."""
LAST_MS = 10.0
"""A measurement lasts at least so long; shorter calls are repeated inside it."""
MOST_CALLS = 20


def timed(call: Call, world: World, count: int) -> float:
    """Milliseconds of one of `count` calls in a row. Collective."""
    if not world.on_gpu:
        world.align()
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) * 1e3 / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    world.align()
    torch.cuda._sleep(HEAD_START_CYCLES)
    begin.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


def alternate(
    calls: Mapping[str, Call],
    world: World,
    *,
    repeats: int,
    warmup: int = 2,
    most_s: float = math.inf,
    least: int = 3,
) -> dict[str, list[float]]:
    """Milliseconds of every call, `repeats` times in turn. Collective.

    Every other turn goes backwards, so that no call always follows the same one. Calls too long
    for most_s seconds are repeated less often, at least `least` times; where even those take twice
    as long, the call behind the warm-up, timed to size the others, is the first of them.
    """
    sizing: dict[str, float] = {}
    counts, turn_ms = {}, 0.0
    for name, call in calls.items():
        for _ in range(warmup):
            call()
        sizing[name] = timed(call, world, 1)
        slowest = max(world.gather(sizing[name]))
        counts[name] = min(MOST_CALLS, max(1, math.ceil(LAST_MS / max(slowest, 1e-3))))
        counts[name] = counts[name] if world.on_gpu else 1
        turn_ms += slowest * counts[name]
    repeats = min(repeats, math.ceil(max(least, min(repeats, most_s * 1e3 / turn_ms))))
    times: dict[str, list[float]] = {name: [] for name in calls}
    if repeats * turn_ms > 2 * most_s * 1e3:
        repeats, times = repeats - 1, {name: [value] for name, value in sizing.items()}
    gc.collect()
    gc.disable()
    try:
        for turn in range(repeats):
            for name in list(calls)[:: 1 if turn % 2 == 0 else -1]:
                times[name].append(timed(calls[name], world, counts[name]))
    finally:
        gc.enable()
    return times


def medians(times: Mapping[str, list[float]]) -> dict[str, float]:
    """The median of every list."""
    return {name: statistics.median(values) for name, values in times.items()}


def slowest(workers: Sequence[Sequence[float]]) -> list[float]:
    """Each turn's slowest worker, of turns by worker."""
    return [max(turn) for turn in zip(*workers, strict=True)]


def waited_ms(
    layer: Sequence[Sequence[float]], compute: Sequence[Sequence[float]]
) -> NDArray[np.float64]:
    """(turns,) what a layer takes above its compute, each of the slowest worker; turns by worker.
    Of each turn: a drift of both does not touch it."""
    return np.subtract(slowest(layer), slowest(compute))


def hidden_share(waited: float, exchange: float) -> float | str:
    """1 - waited / exchange: how much of an exchange the compute hides; none where nothing moves.

    Args:
        waited: milliseconds that a layer takes above its compute.
        exchange: milliseconds of the same transfers with nothing packed or computed.
    """
    return 1 - waited / exchange if exchange > 0 else "none"


def host_us(call: Call, world: World, *, repeats: int = 20) -> float:
    """Microseconds that the host needs to enqueue a call while the device has other work. Median.

    On the CPU the call computes as well, and the number means nothing.
    """
    spent = []
    for _ in range(repeats):
        if world.on_gpu:
            torch.cuda.synchronize()
            torch.cuda._sleep(10 * HEAD_START_CYCLES)
        start = time.perf_counter()
        call()
        spent.append((time.perf_counter() - start) * 1e6)
    if world.on_gpu:
        torch.cuda.synchronize()
    return statistics.median(spent)


def count_launches(call: Call, world: World) -> dict[str, int]:
    """What one call puts on the device: kernels, memsets by name. On the CPU: operators."""
    from torch.profiler import ProfilerActivity, profile

    kind = ProfilerActivity.CUDA if world.on_gpu else ProfilerActivity.CPU
    call()
    with profile(activities=[kind, ProfilerActivity.CPU]) as profiler:
        call()
        if world.on_gpu:
            torch.cuda.synchronize()
    wanted = torch.autograd.DeviceType.CUDA if world.on_gpu else torch.autograd.DeviceType.CPU
    names = [
        event.name
        for event in profiler.events()
        if event.device_type == wanted and not getattr(event, "is_user_annotation", False)
    ]
    if not world.on_gpu:
        names = [name for name in names if name.startswith("aten::")]
    return dict(Counter(name[:80] for name in names))


def peaks(forward: Call, backward: Callable[[Any], Any], *, rounds: int = 50) -> dict[str, float]:
    """MiB of one layer above what was allocated before, and what `rounds` of it leave behind.

    Args:
        forward: returns the output.
        backward: takes the output, returns the gradients.

    Returns:
        forward, held (output and what backward needs), backward (peaks), growth: allocated after
        all rounds less after 5, and outside: what the process has on the device that torch's
        allocator does not count (context, NCCL, symmetric mailboxes).
    """
    if not torch.cuda.is_available():
        backward(forward())
        return dict.fromkeys(("forward", "held", "backward", "growth", "outside"), 0.0)
    backward(forward())
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out = forward()
    result = {"forward": torch.cuda.max_memory_allocated() - before}
    result["held"] = torch.cuda.memory_allocated() - before
    torch.cuda.reset_peak_memory_stats()
    gradients = backward(out)
    result["backward"] = torch.cuda.max_memory_allocated() - before
    del out, gradients
    marks = {}
    for number in range(1, rounds + 1):
        backward(forward())
        if number in (5, rounds):
            marks[number] = _allocated()
    result["growth"] = marks[rounds] - marks[min(5, rounds)]
    free, total = torch.cuda.mem_get_info()
    result["outside"] = total - free - torch.cuda.memory_reserved()
    return {name: size / 2**20 for name, size in result.items()}


def _allocated() -> int:
    """Bytes in use once everything that was freed behind another stream is back."""
    gc.collect()
    torch.cuda.synchronize()
    torch.empty(1, device="cuda")  # the allocator looks for such blocks when it is asked for one
    return torch.cuda.memory_allocated()
