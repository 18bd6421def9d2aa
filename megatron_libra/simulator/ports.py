"""Ports of workers, and how long exchanges occupy them. In: bytes, links. Out: Ports, Returns.

A worker has a port into its node and one out of it. Each of them sends and receives at once, at the
port's bandwidth, so arrays have the axes link (inside, outside), direction (sending, receiving) and
worker.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Links", "PassTraffic", "Ports", "Returns", "complete", "earliest"]

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
class PassTraffic:
    """Bytes between W workers, row source, column destination, zero on the diagonal."""

    dispatch: Float
    """(S, W, W) bytes of each step to the workers that compute."""
    return_: Float
    """(S, W, W) bytes of each step on their way back."""

    @property
    def merged(self) -> PassTraffic:
        """All steps as one."""
        return PassTraffic(
            self.dispatch.sum(axis=0, keepdims=True), self.return_.sum(axis=0, keepdims=True)
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ports:
    """Seconds that the exchanges occupy each port, and who waits for whom. A port is one of
    (inside, outside) x (sending, receiving): 4 of each worker."""

    dispatch: Float
    """(S, 2, 2, W) link, direction, worker."""
    return_: Float
    dispatch_from: Bool
    """(S, 2, W, W) link, source, destination: whether bytes move."""
    return_from: Bool

    @classmethod
    def of(cls, traffic: PassTraffic, links: Links, same_node: Bool) -> Ports:
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


def earliest(times: Float, sends_to: Bool) -> Float:
    """(W,) the earliest time of a worker's sources; its own where it has none."""
    known = np.where(sends_to, times[:, None], np.inf).min(axis=0)
    found: Float = np.where(np.isfinite(known), known, times)
    return found


def complete(done: Float, sources: Bool) -> Float:
    """(..., W) when the worker's ports and the sending ports of its sources are done.

    Args:
        done: (..., 2, 2, W) by link, direction and worker.
        sources: (..., 2, W, W) by link, source and destination.
    """
    sent = np.where(sources, done[..., 0, :, None], 0.0).max(axis=(-3, -2))
    found: Float = np.maximum(done.max(axis=(-3, -2)), sent)
    return found


class Returns:
    """Returns on all ports (link, direction, worker), which share each port equally with the
    dispatches still under way: until then a return takes twice its seconds, and delays the
    dispatches by as much as it gets itself.
    """

    def __init__(self, seconds: Float) -> None:
        self.seconds = seconds
        self.ready: list[Float] = []
        self.shared_starts: list[Float] = []
        self._free = np.zeros_like(seconds[0])

    def start(self, ready: Float) -> None:
        """The next return may start: (2, W) by direction."""
        seconds = self.seconds[len(self.ready)]
        begin = np.maximum(ready, self._free)
        self.ready.append(ready)
        self.shared_starts.append(begin)
        # a return of no bytes keeps nobody waiting
        self._free = np.where(seconds > 0, begin + 2 * seconds, self._free)

    def delayed(self, done: Float) -> Float:
        """When a dispatch is through that would be at `done` without the returns so far."""
        for start, seconds in zip(self.shared_starts, self.seconds, strict=False):
            done = done + np.clip(done - start, 0.0, seconds)
        return done

    def finish(self, dispatched: Float) -> tuple[Float, Float]:
        """(S, 2, 2, W) starts and stops, given when each port's last dispatch is through."""
        starts, stops = np.zeros_like(self.seconds), np.zeros_like(self.seconds)
        free = np.zeros_like(dispatched)
        for s, (ready, seconds) in enumerate(zip(self.ready, self.seconds, strict=True)):
            starts[s] = np.maximum(ready, free)
            shared = np.clip((dispatched - starts[s]) / 2, 0.0, seconds)
            stops[s] = starts[s] + seconds + shared
            free = np.where(seconds > 0, stops[s], free)
        return starts, stops
