"""Plans of a data stream in microbatch order. In: what the sampler will yield. Out: ReadyPlans.

    start: request 0 1 2 | take 0 | request 3, take 1 | request 4, take 2 | ...      (ahead = 2)

Every rank that needs a pool's plans (all of its tensor-parallel ranks and pipeline stages) runs
the same stream and so makes the same requests in the same order, whether it holds data or not.
Only the coordinator knows lengths. A stream that has run out goes on with empty sequences, so
that no rank has to know its end.

A plan is there once every rank has requested it, and a later stage takes its first batch only
when the stages before it have computed theirs. So requests run ahead of the pipeline (see
pipeline_skew), from the start: otherwise the first stage would wait for the last, and the last
for the first.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from megatron_libra.data.sampler import Microbatch
from megatron_libra.executor.coordinator import ReadyPlan
from megatron_libra.plan.pool_plan import PoolPlan

__all__ = ["PlanSource", "PlanStream", "PlannedBatch", "PlannedBatches", "pipeline_skew"]

Key = tuple[str, int]


class PlanSource(Protocol):
    """The part of PlanCoordinator that a stream uses."""

    last_plan_ms: float
    """Milliseconds that the newest plan took to make."""

    def request(self, key: Key, sequences: Any) -> None:
        """Announce a plan; the coordinator gives the sequences, every other rank None."""

    def take(self, key: Key) -> ReadyPlan:
        """The announced plan; waits for it."""


@dataclass(frozen=True, slots=True, eq=False)
class PlannedBatch:
    """What a data iterator yields: one microbatch of this rank and its pool's plan."""

    stream: str
    """train, valid or test."""
    index: int
    """Number of the microbatch in its stream, from 0 in this process."""
    ready: ReadyPlan
    """The plan, with the row numbers of this rank's part; shared by the model chunks."""
    batch: dict[str, Any] | None
    """What the data loader yielded; None on ranks that hold no data."""
    wait_ms: float = 0.0
    """Milliseconds that the data iterator waited for the plan."""
    plan_ms: float = 0.0
    """Milliseconds that the newest plan took to make, on the coordinator; 0 elsewhere."""

    @property
    def plan(self) -> PoolPlan:
        """Of the microbatch's pool."""
        return self.ready.pool


def pipeline_skew(num_stages: int, num_chunks: int, group_size: int | None) -> int:
    """Microbatches that the first stage may have begun before the last one begins its first.

    Args:
        num_stages: PP.
        num_chunks: model chunks of a stage; more than one means the interleaved schedule.
        group_size: microbatches that run through one chunk in a row; Megatron's default is PP.

    One forward more than the schedule's warm-up: PP - 1, or, in chunks, 2 (PP - 1) + (chunks - 1) *
    group_size, of which every group_size * chunks in a row are group_size microbatches.
    """
    if num_stages == 1:
        return 0
    return num_stages if num_chunks == 1 else num_stages + max(num_stages, group_size or 0)


class PlanStream:
    """Plans of one stream, each made once and shared by the model chunks of this rank."""

    def __init__(self, name: str, plans: PlanSource, *, ahead: int, pool_size: int) -> None:
        self.name = name
        self._plans = plans
        self._ahead = ahead
        self._nothing: tuple[tuple[int, ...], ...] = ((),) * pool_size
        self._upcoming: Iterator[Microbatch] | None = None
        self._num_requested = 0
        self._num_readers = 0
        self._ready: dict[int, ReadyPlan] = {}
        self._reads_left: dict[int, int] = {}

    @property
    def last_plan_ms(self) -> float:
        """Milliseconds that the newest plan took to make; 0 on ranks that do not plan."""
        return self._plans.last_plan_ms

    def start(self, upcoming: Iterator[Microbatch] | None) -> None:
        """Request the first plans. Every rank that shares them, the streams in the same order.

        Args:
            upcoming: the microbatches to come, on ranks that know lengths; the coordinator must.
        """
        self._upcoming = upcoming
        self._request_up_to(self._ahead)

    def add_reader(self) -> None:
        """One more model chunk reads every plan of the stream."""
        self._num_readers += 1

    def plan(self, index: int) -> ReadyPlan:
        """Plan of a microbatch, waited for; the last reader's call forgets it."""
        self._request_up_to(index + self._ahead)
        if index not in self._ready:
            self._ready[index] = self._plans.take((self.name, index))
            self._reads_left[index] = self._num_readers
        self._reads_left[index] -= 1
        if self._reads_left[index]:
            return self._ready[index]
        del self._reads_left[index]
        return self._ready.pop(index)

    def _request_up_to(self, index: int) -> None:
        while self._num_requested <= index:
            self._request(self._num_requested)
            self._num_requested += 1

    def _request(self, index: int) -> None:
        sequences = None
        if self._upcoming is not None:
            microbatch = next(self._upcoming, None)
            sequences = self._nothing if microbatch is None else microbatch.sequences
        self._plans.request((self.name, index), sequences)


class PlannedBatches:
    """Iterator of one model chunk: its data loader's batches, if it has one, with plans."""

    def __init__(self, stream: PlanStream, batches: Iterator[dict[str, Any]] | None) -> None:
        self._stream = stream
        self._batches = batches
        self._index = 0
        stream.add_reader()

    def __iter__(self) -> PlannedBatches:
        return self

    def __next__(self) -> PlannedBatch:
        batch = None if self._batches is None else next(self._batches)
        index, self._index = self._index, self._index + 1
        start = time.perf_counter()
        ready = self._stream.plan(index)
        wait_ms = (time.perf_counter() - start) * 1e3
        return PlannedBatch(
            stream=self._stream.name,
            index=index,
            ready=ready,
            batch=batch,
            wait_ms=wait_ms,
            plan_ms=self._stream.last_plan_ms,
        )
