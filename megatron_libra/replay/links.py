"""Measure the exchange between the GPUs of this machine. In: their number. Out: LinkFit.

NCCL runs as the executor runs it, on a high-priority stream in one process for each GPU; the copy
engines are timed in one process, every GPU writing to every other one at once. Both times are
fitted by message time + bytes / bandwidth.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from megatron_libra.executor.groups import nccl_options
from megatron_libra.executor.local import run_workers
from megatron_libra.replay.fit import least_squares
from megatron_libra.replay.timing import run_seconds

__all__ = ["LinkFit", "fit_link", "measure_copies", "measure_nccl"]

MEGABYTES = (1, 4, 16, 64, 256)
"""Bytes that a GPU sends in one exchange, to all others together."""
REPEATS = 7
ATTEMPTS = 5
"""Measurements of links until larger exchanges take longer."""
COMPUTE_SIZE = 4096
COMPUTE_RUNS = 48


@dataclass(frozen=True, slots=True)
class LinkFit:
    """One way to exchange."""

    gb_s: float
    """GB/s that a GPU sends, and at the same time receives."""
    message_us: float
    overlap_loss: float
    """Share of an exchange by which it lengthens the computation that runs beside it."""


def fit_link(num_bytes: Sequence[float], seconds: Sequence[float]) -> tuple[float, float]:
    """(GB/s, message us) that explain the seconds best, by relative error.

    Raises:
        ValueError: the times do not grow with the bytes.
    """
    target = np.asarray(seconds, np.float64)
    features = np.stack([np.ones_like(target), np.asarray(num_bytes, np.float64)], axis=1)
    message, per_byte = least_squares(features / target[:, None], np.ones_like(target)).tolist()
    if not per_byte > 0:
        sizes = ", ".join(f"{each / 1e6:g}" for each in num_bytes)
        times = ", ".join(f"{each * 1e3:.3g}" for each in seconds)
        raise ValueError(f"exchanges of {sizes} MB took {times} ms: more bytes took no longer")
    return 1e-9 / per_byte, message * 1e6


def _steady_link(
    megabytes: Sequence[float], measure: Callable[[], Sequence[float]]
) -> tuple[float, float]:
    """fit_link of what is measured. On a machine that does other things a large exchange may come
    out faster than a small one; then all are measured again, and the fastest time of each counts.

    Raises:
        ValueError: the times still do not grow with the bytes.
    """
    num_bytes = [size * 1e6 for size in megabytes]
    fastest, problem = [math.inf] * len(num_bytes), ""
    for _ in range(ATTEMPTS):
        fastest = list(map(min, fastest, measure()))
        try:
            return fit_link(num_bytes, fastest)
        except ValueError as error:
            problem = str(error)
    raise ValueError(
        f"{problem}, the fastest of {ATTEMPTS} measurements; try again when nothing else runs on "
        "this machine."
    )


def measure_nccl(num_gpus: int, *, backend: str = "nccl") -> LinkFit:
    """An all-to-all of equal parts; starts one process for each GPU.

    Args:
        num_gpus: at least 2.
        backend: gloo measures this machine's processes instead, for tests.

    Raises:
        ValueError: the machine is too busy, as _steady_link says.
    """
    losses: list[float] = []

    def measure() -> list[float]:
        answers = run_workers(_exchange_worker, num_gpus, backend, backend=backend, timeout_s=120)
        losses.append(max(loss for _, loss in answers))
        return [max(times) for times in zip(*(times for times, _ in answers), strict=True)]

    gb_s, message_us = _steady_link(_sizes(backend), measure)
    return LinkFit(gb_s, message_us, losses[-1])


def _sizes(backend: str) -> tuple[float, ...]:
    return MEGABYTES if backend == "nccl" else (0.1, 1.0, 10.0)


def _exchange_worker(backend: str) -> tuple[list[float], float]:
    """(seconds of each size, overlap loss). Collective: all workers call it, and all make the same
    runs."""
    device = torch.device("cpu")
    if backend == "nccl":
        device = torch.device("cuda", torch.cuda.current_device())
    group = _group(backend)
    times = [_median(_exchange(size, group, device), device) for size in _sizes(backend)]
    if backend != "nccl":
        return times, 0.0
    return times, _overlap_loss(_exchange(MEGABYTES[-2], group, device), device)


def _median(run: Callable[[], None], device: torch.device) -> float:
    for _ in range(3):
        run()
    return float(np.median(run_seconds(run, device, REPEATS)))


def _group(backend: str) -> dist.ProcessGroup | None:
    """As the executor's: behind FlashAttention's blocks, a usual stream would not get a turn."""
    return dist.new_group(pg_options=nccl_options()) if backend == "nccl" else None


def _exchange(
    megabytes: float, group: dist.ProcessGroup | None, device: torch.device
) -> Callable[[], None]:
    """One all-to-all that sends this much to the others together."""
    size, rank = dist.get_world_size(), dist.get_rank()
    part = int(megabytes * 1e6) // (size - 1)
    splits = [0 if peer == rank else part for peer in range(size)]
    sent = torch.zeros(sum(splits), dtype=torch.uint8, device=device)
    received = torch.empty_like(sent)

    def run() -> None:
        dist.all_to_all_single(received, sent, splits, splits, group=group, async_op=True).wait()

    return run


def _overlap_loss(exchange: Callable[[], None], device: torch.device) -> float:
    """(Matrix products beside exchanges - the products alone) / the exchanges alone."""
    side = torch.cuda.Stream(device)
    compute = _products(device)
    alone = _median(compute, device)
    count = torch.tensor(max(1, int(0.6 * alone / _median(exchange, device))), device=device)
    dist.all_reduce(count, op=dist.ReduceOp.MIN)
    number = int(count)

    def exchanges() -> None:
        for _ in range(number):
            exchange()

    def both() -> None:
        side.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(side):
            exchanges()
        compute()
        torch.cuda.current_stream(device).wait_stream(side)

    moved, together = _median(exchanges, device), _median(both, device)
    return max(0.0, (together - alone) / moved)


def _products(device: torch.device) -> Callable[[], None]:
    left = torch.randn(COMPUTE_SIZE, COMPUTE_SIZE, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(left)

    def run() -> None:
        for _ in range(COMPUTE_RUNS):
            torch.matmul(left, left, out=out)

    return run


def measure_copies(num_gpus: int) -> LinkFit:
    """Copy engines: every GPU writes to every other at once. They take no SMs, so no loss.

    Raises:
        ValueError: the machine is too busy, as _steady_link says.
    """
    gb_s, message_us = _steady_link(MEGABYTES, lambda: _all_copies(num_gpus))
    return LinkFit(gb_s, message_us, 0.0)


def _all_copies(num_gpus: int) -> list[float]:
    """Seconds of each size."""
    devices = [torch.device("cuda", i) for i in range(num_gpus)]
    times = []
    for size in MEGABYTES:
        part = int(size * 1e6) // (num_gpus - 1)
        sent = [torch.zeros(part, dtype=torch.uint8, device=each) for each in devices]
        pairs = [(i, j) for i in range(num_gpus) for j in range(num_gpus) if i != j]
        received = [torch.empty(part, dtype=torch.uint8, device=devices[j]) for _, j in pairs]
        times.append(_copy_seconds(devices, pairs, sent, received))
    return times


def _copy_seconds(
    devices: list[torch.device],
    pairs: list[tuple[int, int]],
    sent: list[torch.Tensor],
    received: list[torch.Tensor],
) -> float:
    """Median seconds of the slowest copy, all of them started together."""
    streams = [torch.cuda.Stream(devices[i]) for i, _ in pairs]
    rounds = []
    for _ in range(REPEATS):
        marks = []
        for each in devices:
            torch.cuda.synchronize(each)
        for (i, _), stream, target in zip(pairs, streams, received, strict=True):
            with torch.cuda.device(devices[i]), torch.cuda.stream(stream):
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
                target.copy_(sent[i], non_blocking=True)
                end.record()
                marks.append((begin, end))
        for each in devices:
            torch.cuda.synchronize(each)
        rounds.append(max(begin.elapsed_time(end) for begin, end in marks) / 1e3)
    return float(np.median(rounds))
