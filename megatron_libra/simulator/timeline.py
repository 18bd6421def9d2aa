"""One layer's pass over a pool, chunk by chunk. In: seconds of computation, bytes, links. Out:
Timeline.

A pass is a forward or a backward. Each worker has three streams (section 4.4):

    dispatch   | D0 | D1 | D2 | D3 |
    compute    pack | early local | 0 | 1 | 2 | 3 | late local | wait | gather
    return                            | R0 | R1 | R2 |      R3     |

All dispatches are queued when chunk 0 is packed. Chunk c is computed when the worker has all of D_c
and is done with chunk c - 1; then its return starts. Late local work runs under the last return.

Links. A worker has a port into its node and one out of it, each of them full duplex: it sends and
receives at once, at the port's bandwidth. An exchange takes message time plus bytes over bandwidth
on each port. On a port, dispatches queue up behind each other, and so do returns; where both are
under way they share the port equally. D_c is over on a worker when its own ports, and the sending
ports of everybody who sends it something, are done with it: as in an all-to-all. A receiving port
begins on R_c when the first of the worker's sources has computed chunk c.

Overlap loss. Computation during an exchange takes longer by that share of the overlapped transfer
time: 0 for copy engines, 0.2 to 0.3 for NCCL, whose kernels share the SMs. The schedule is made
once without it, the overlap measured, the computation stretched, and the schedule made again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

__all__ = ["Links", "PassCompute", "PassTraffic", "Span", "Timeline", "simulate_pass"]

Float = NDArray[np.float64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True)
class Links:
    """How bytes travel."""

    intra_node_gb_s: float
    """GB/s that a worker sends, and at the same time receives, inside its node."""
    inter_node_gb_s: float
    """GB/s that a worker sends, and at the same time receives, between nodes."""
    message_us: float
    """Microseconds that an exchange takes besides its bytes."""
    overlap_loss: float
    """Share of a hidden transfer by which it slows the computation that hides it."""


@dataclass(frozen=True, slots=True, eq=False)
class PassCompute:
    """Seconds of computation of W workers, predicted or measured."""

    early: Float
    """(W,) local work before the chunks."""
    chunk: Float
    """(M, W) each chunk of the exchanged part."""
    late: Float
    """(W,) local work behind the chunks."""
    pack: Float
    """(W,) packing chunk 0, before anything can be sent."""
    gather: Float
    """(W,) the last gather, when everything has come back."""

    @property
    def total(self) -> Float:
        """(W,) all of it."""
        total: Float = self.pack + self.early + self.chunk.sum(axis=0) + self.late + self.gather
        return total


@dataclass(frozen=True, slots=True, eq=False)
class PassTraffic:
    """Bytes between W workers, row source, column destination, zero on the diagonal."""

    dispatch: Float
    """(M, W, W) bytes of each chunk to the workers that compute."""
    return_: Float
    """(M, W, W) bytes of each chunk on their way back."""


@dataclass(frozen=True, slots=True)
class Span:
    """One bar of a trace."""

    worker: int
    stream: str
    """compute, dispatch or return."""
    name: str
    start_s: float
    stop_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Timeline:
    """When everything happens, in seconds since the layer's pass began on all workers."""

    compute_start: Float
    """(M + 4, W): pack, early, chunk 0 .. M - 1, late, gather."""
    compute_stop: Float
    dispatch_start: Float
    """(M, W) when the first byte of an exchange may leave or reach a worker."""
    dispatch_stop: Float
    """(M, W) when a worker has all that it receives and sends of a chunk."""
    return_start: Float
    return_stop: Float

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
        """(W,) idle until chunk 0 has arrived: the exposed first dispatch."""
        wait: Float = self.compute_start[2] - self.compute_stop[1]
        return wait

    @property
    def middle_wait(self) -> Float:
        """(W,) idle between chunks."""
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
        chunks = len(self.dispatch_start)
        names = ["pack", "local early", *(f"chunk {c}" for c in range(chunks))]
        rows = [
            ("compute", [*names, "local late", "gather"], self.compute_start, self.compute_stop),
            ("dispatch", [f"dispatch {c}" for c in range(chunks)], *self._transfers("dispatch")),
            ("return", [f"return {c}" for c in range(chunks)], *self._transfers("return")),
        ]
        found = [
            Span(worker, stream, name, float(starts[i, worker]), float(stops[i, worker]))
            for stream, labels, starts, stops in rows
            for i, name in enumerate(labels)
            for worker in np.flatnonzero(stops[i] > starts[i]).tolist()
        ]
        return tuple(sorted(found, key=lambda s: (s.worker, s.start_s, s.stream)))

    def _transfers(self, stream: str) -> tuple[Float, Float]:
        if stream == "dispatch":
            return self.dispatch_start, self.dispatch_stop
        return self.return_start, self.return_stop


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
    ports = _Ports.of(traffic, links, same_node)
    timeline = _schedule(compute, ports)
    if not links.overlap_loss:
        return timeline
    return _schedule(_slowed(compute, timeline, ports, links.overlap_loss), ports)


@dataclass(frozen=True, slots=True, eq=False)
class _Ports:
    """Seconds that the exchanges occupy each port, and who waits for whom. A port is one of
    (inside, outside) x (sending, receiving): 4 of each worker."""

    dispatch: Float
    """(M, 2, 2, W) link, direction, worker."""
    return_: Float
    dispatch_from: Bool
    """(M, 2, W, W) link, source, destination: whether bytes move."""
    return_from: Bool

    @classmethod
    def of(cls, traffic: PassTraffic, links: Links, same_node: Bool) -> _Ports:
        """Cut the bytes by link."""
        dispatch, sources = _occupied(traffic.dispatch, links, same_node)
        return_, back = _occupied(traffic.return_, links, same_node)
        return cls(dispatch, return_, sources, back)


def _occupied(moved: Float, links: Links, same_node: Bool) -> tuple[Float, Bool]:
    by_link = np.stack([np.where(same_node, moved, 0.0), np.where(same_node, 0.0, moved)], axis=1)
    bandwidth = np.array([links.intra_node_gb_s, links.inter_node_gb_s])[:, None, None] * 1e9
    moved_by = np.stack([by_link.sum(axis=3), by_link.sum(axis=2)], axis=2)
    seconds = moved_by / bandwidth + links.message_us * 1e-6 * (moved_by > 0)
    return seconds, by_link > 0


def _schedule(compute: PassCompute, ports: _Ports) -> Timeline:
    """All starts and stops, chunk after chunk."""
    chunks, workers = compute.chunk.shape
    sending = compute.pack
    begins = np.stack([sending, _earliest(sending, ports.dispatch_from.any(axis=(0, 1)))])
    returns = _Returns(ports.return_)
    starts, stops = [np.zeros(workers), compute.pack], [compute.pack, compute.pack + compute.early]
    arrived = []
    ready = np.broadcast_to(begins, (2, 2, workers))
    for c in range(chunks):
        done = returns.delayed(ready + ports.dispatch[: c + 1].sum(axis=0))
        done = np.where(ports.dispatch[c] > 0, done, 0.0)
        arrived.append(_complete(done, ports.dispatch_from[c]))
        starts.append(np.maximum(stops[-1], arrived[-1]))
        stops.append(starts[-1] + compute.chunk[c])
        source_done = _earliest(stops[-1], ports.return_from[c].any(axis=0))
        returns.start(np.stack([stops[-1], source_done]))
    starts.append(stops[-1])
    stops.append(starts[-1] + compute.late)
    back_starts, back_stops = returns.finish(returns.delayed(ready + ports.dispatch.sum(axis=0)))
    back = np.array(
        [
            _complete(*each)
            for each in zip(
                np.where(ports.return_ > 0, back_stops, 0.0), ports.return_from, strict=True
            )
        ]
    )
    starts.append(np.maximum(stops[-1], back.max(axis=0)))
    stops.append(starts[-1] + compute.gather)
    first = np.where(ports.return_ > 0, back_starts, np.inf).min(axis=(1, 2))
    dispatched = np.array(arrived)
    queued = np.vstack([begins.min(axis=0)[None], dispatched[:-1]])
    return Timeline(
        compute_start=np.array(starts),
        compute_stop=np.array(stops),
        dispatch_start=np.minimum(np.maximum.accumulate(queued, axis=0), dispatched),
        dispatch_stop=dispatched,
        return_start=np.minimum(first, back),
        return_stop=back,
    )


def _earliest(times: Float, sends_to: Bool) -> Float:
    """(W,) the earliest time of a worker's sources; its own where it has none."""
    known = np.where(sends_to, times[:, None], np.inf).min(axis=0)
    found: Float = np.where(np.isfinite(known), known, times)
    return found


def _complete(done: Float, sources: Bool) -> Float:
    """(W,) when the worker's ports and the sending ports of its sources are done.

    Args:
        done: (2, 2, W) by link, direction and worker.
        sources: (2, W, W) by link, source and destination.
    """
    sent = np.where(sources, done[:, 0, :, None], 0.0).max(axis=(0, 1))
    complete: Float = np.maximum(done.max(axis=(0, 1)), sent)
    return complete


class _Returns:
    """Returns on all ports (link, direction, worker), which share each port equally with the
    dispatches still under way: until then a return takes twice its seconds, and delays the
    dispatches by as much as it gets itself.
    """

    def __init__(self, seconds: Float) -> None:
        self.seconds = seconds
        self.ready: list[Float] = []
        self.shared_starts: list[Float] = []

    def start(self, ready: Float) -> None:
        """The next return may start: (2, W) by direction."""
        count = len(self.ready)
        free = self.shared_starts[-1] + 2 * self.seconds[count - 1] if count else 0.0
        self.ready.append(ready)
        self.shared_starts.append(np.maximum(ready, free))

    def delayed(self, done: Float) -> Float:
        """When a dispatch is through that would be at `done` without the returns so far."""
        for start, seconds in zip(self.shared_starts, self.seconds, strict=False):
            done = done + np.clip(done - start, 0.0, seconds)
        return done

    def finish(self, dispatched: Float) -> tuple[Float, Float]:
        """(M, 2, 2, W) starts and stops, given when each port's last dispatch is through."""
        starts, stops = np.zeros_like(self.seconds), np.zeros_like(self.seconds)
        free = np.zeros_like(dispatched)
        for c, (ready, seconds) in enumerate(zip(self.ready, self.seconds, strict=True)):
            starts[c] = np.maximum(ready, free)
            shared = np.clip((dispatched - starts[c]) / 2, 0.0, seconds)
            stops[c] = free = starts[c] + seconds + shared
        return starts, stops


def _slowed(compute: PassCompute, timeline: Timeline, ports: _Ports, loss: float) -> PassCompute:
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
        chunk=compute.chunk + extra[1:-1],
        late=compute.late + extra[-1],
    )
