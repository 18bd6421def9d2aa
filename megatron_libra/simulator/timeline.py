"""One layer's pass over a pool, step by step. In: seconds of computation, bytes, links. Out:
Timeline.

A pass is a forward or a backward. A step is a chunk of the near or of the far part, in the order of
plan/parts.py. Each worker has three streams (section 4.4); with M = 2, near steps N inside a node
and far ones F between nodes:

    dispatch   | N0 | N1 |
               |   F0    |   F1    |
    compute    pack | early local | N0 | F0 | F1 | N1 | late local | wait | gather
    return                             | N0 |         | N1 |
                                            |   F0    |   F1    |

All dispatches are queued when step 0 is packed. Step s is computed when the worker has all of its
dispatch D_s and is done with step s - 1; then its return R_s starts. Late local work runs under the
last return.

Links. A worker has a port into its node and one out of it, each of them full duplex: it sends and
receives at once, at the port's bandwidth. An exchange takes message time plus bytes over bandwidth
on each port. On a port, dispatches queue up behind each other, and so do returns; where both are
under way they share the port equally. D_s is over on a worker when its own ports, and the sending
ports of everybody who sends it something, are done with it: as in an all-to-all. A receiving port
begins on R_s when the first of the worker's sources has computed step s.

Overlap loss. Computation during an exchange takes longer by that share of the overlapped transfer
time: 0 for copy engines, 0.2 to 0.3 for NCCL, whose kernels share the SMs. The schedule is made
once without it, the overlap measured, the computation stretched, and the schedule made again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.ports import (
    Links,
    PassTraffic,
    Ports,
    Returns,
    complete,
    earliest,
)

__all__ = ["Links", "PassCompute", "PassTraffic", "Span", "Timeline", "simulate_pass"]

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class PassCompute:
    """Seconds of computation of W workers, predicted or measured."""

    early: Float
    """(W,) local work before the steps."""
    steps: Float
    """(S, W) each chunk of the exchanged parts."""
    names: tuple[str, ...]
    """(S,) what traces call the steps."""
    late: Float
    """(W,) local work behind the steps."""
    pack: Float
    """(W,) packing step 0, before anything can be sent."""
    gather: Float
    """(W,) the last gather, when everything has come back."""

    @property
    def total(self) -> Float:
        """(W,) all of it."""
        total: Float = self.pack + self.early + self.steps.sum(axis=0) + self.late + self.gather
        return total

    @property
    def merged(self) -> PassCompute:
        """All work in one step, so that no transfer runs under any of it."""
        none = np.zeros_like(self.early)
        work = self.early + self.steps.sum(axis=0) + self.late
        return replace(self, early=none, steps=work[None], names=("all",), late=none)


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of a trace."""

    worker: int
    stream: str
    """compute, dispatch or return; far dispatch or far return, which others run beside."""
    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When everything happens, in seconds since the layer's pass began on all workers."""

    compute_start: Float
    """(S + 4, W): pack, early, step 0 .. S - 1, late, gather."""
    compute_stop: Float
    dispatch_start: Float
    """(S, W) when the first byte of an exchange may leave or reach a worker."""
    dispatch_stop: Float
    """(S, W) when a worker has all that it receives and sends of a step."""
    return_start: Float
    return_stop: Float
    names: tuple[str, ...]
    """(S,) of the steps."""

    @property
    def end(self) -> Float:
        """(W,) when each worker is done."""
        end: Float = self.compute_stop[-1]
        return end

    @property
    def seconds(self) -> float:
        """The pass of the pool: its slowest worker."""
        return float(self.end.max())

    @property
    def first_wait(self) -> Float:
        """(W,) idle until step 0 has arrived: the exposed first dispatch."""
        wait: Float = self.compute_start[2] - self.compute_stop[1]
        return wait

    @property
    def middle_wait(self) -> Float:
        """(W,) idle between steps."""
        wait: Float = (self.compute_start[3:-2] - self.compute_stop[2:-3]).sum(axis=0)
        return wait

    @property
    def last_wait(self) -> Float:
        """(W,) idle until everything has come back: the exposed last return."""
        wait: Float = self.compute_start[-1] - self.compute_stop[-2]
        return wait

    @property
    def wait(self) -> Float:
        """(W,) all idle time of the compute stream before the worker's end."""
        return self.first_wait + self.middle_wait + self.last_wait

    def spans(self) -> tuple[Span, ...]:
        """The bars of a trace, by worker and start; empty ones are left out."""
        work = ("pack", "local early", *self.names, "local late", "gather")
        found = _bars("compute", work, self.compute_start, self.compute_stop)
        for prefix, is_far in (("", False), ("far ", True)):
            rows = [s for s, name in enumerate(self.names) if name.startswith("far") == is_far]
            names = [self.names[s] for s in rows]
            for stream, starts, stops in (
                ("dispatch", self.dispatch_start, self.dispatch_stop),
                ("return", self.return_start, self.return_stop),
            ):
                found += _bars(prefix + stream, names, starts[rows], stops[rows])
        return tuple(sorted(found, key=lambda s: (s.worker, s.start_s, s.stream)))


def _bars(stream: str, names: Sequence[str], starts: Float, stops: Float) -> list[Span]:
    """Bars one behind the other: where a worker waits for others, the next has begun already."""
    before = np.maximum.accumulate(np.vstack([np.zeros_like(stops[:1]), stops]), axis=0)
    starts = np.maximum(starts, before[:-1])
    return [
        Span(worker, stream, name, float(starts[i, worker]), float(stops[i, worker]))
        for i, name in enumerate(names)
        for worker in np.flatnonzero(stops[i] > starts[i]).tolist()
    ]


def simulate_pass(
    compute: PassCompute, traffic: PassTraffic, links: Links, same_node: Bool
) -> Timeline:
    """The schedule of one pass.

    Args:
        compute: seconds of computation.
        traffic: bytes.
        links: bandwidths, message time, overlap loss.
        same_node: (W, W) whether two workers share a node.
    """
    ports = Ports.of(traffic, links, same_node)
    timeline = _schedule(compute, ports)
    if not links.overlap_loss:
        return timeline
    return _schedule(_slowed(compute, timeline, ports, links.overlap_loss), ports)


class _Stream:
    """The compute streams of all workers; things run one after the other."""

    def __init__(self, workers: int) -> None:
        self.starts: list[Float] = []
        self.stops = [np.zeros(workers)]

    @property
    def now(self) -> Float:
        """(W,) when the last thing so far is done."""
        return self.stops[-1]

    def run(self, seconds: Float, not_before: Float | float = 0.0) -> None:
        """The next thing, on every worker."""
        self.starts.append(np.maximum(self.now, not_before))
        self.stops.append(self.starts[-1] + seconds)


def _schedule(compute: PassCompute, ports: Ports) -> Timeline:
    """All starts and stops, step after step."""
    stream, returns = _Stream(len(compute.early)), Returns(ports.return_)
    stream.run(compute.pack)
    senders = earliest(stream.now, ports.dispatch_from.any(axis=(0, 1)))
    begins = np.stack([stream.now, senders])
    through = begins + np.cumsum(ports.dispatch, axis=0)
    stream.run(compute.early)
    sent, arrived = [], []
    for s, seconds in enumerate(compute.steps):
        used = ports.dispatch[s] > 0
        done = np.where(used, returns.delayed(through[s]), 0.0)
        begun = np.where(used, returns.delayed(through[s] - ports.dispatch[s]), np.inf)
        arrived.append(complete(done, ports.dispatch_from[s]))
        sent.append(np.minimum(begun.min(axis=(0, 1)), arrived[-1]))
        stream.run(seconds, not_before=arrived[-1])
        sources = earliest(stream.now, ports.return_from[s].any(axis=0))
        returns.start(np.stack([stream.now, sources]))
    stream.run(compute.late)
    return_start, return_stop = _returned(returns, ports, through[-1])
    stream.run(compute.gather, not_before=return_stop.max(axis=0))
    return Timeline(
        compute_start=np.array(stream.starts),
        compute_stop=np.array(stream.stops[1:]),
        dispatch_start=np.array(sent),
        dispatch_stop=np.array(arrived),
        return_start=return_start,
        return_stop=return_stop,
        names=compute.names,
    )


def _returned(returns: Returns, ports: Ports, through: Float) -> tuple[Float, Float]:
    """(S, W) start and stop of each return; both 0 on a worker that it does not touch."""
    starts, stops = returns.finish(returns.delayed(through))
    used = ports.return_ > 0
    stop = complete(np.where(used, stops, 0.0), ports.return_from)
    start = np.where(used, starts, np.inf).min(axis=(1, 2))
    return np.minimum(start, stop), stop


def _slowed(compute: PassCompute, timeline: Timeline, ports: Ports, loss: float) -> PassCompute:
    """The computation, longer by a share of the transfer time under it."""
    starts = np.vstack([timeline.dispatch_start, timeline.return_start])
    stops = np.vstack([timeline.dispatch_stop, timeline.return_stop])
    seconds = np.vstack([ports.dispatch.max(axis=(1, 2)), ports.return_.max(axis=(1, 2))])
    length = stops - starts
    busy = np.divide(seconds, length, out=np.zeros_like(length), where=length > 0)
    begin = np.maximum(timeline.compute_start[1:-1, None], starts)
    finish = np.minimum(timeline.compute_stop[1:-1, None], stops)
    overlap = np.clip(finish - begin, 0.0, None) * np.minimum(busy, 1.0)
    extra = loss * overlap.sum(axis=1)
    return replace(
        compute,
        early=compute.early + extra[0],
        steps=compute.steps + extra[1:-1],
        late=compute.late + extra[-1],
    )
