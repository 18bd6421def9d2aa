"""From kernel times to the times of pools. In: Replay, seconds of kernel calls. Out: PoolTimes.

Seconds are by worker and part (PARTS: one chunk of near work, one of far, early and late local
work), in forward and backward; predicted by a cost model, measured, or both. The exchange is laid
over them by the timeline (simulator/timeline.py), for every method alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.replay.replay import Replay
from megatron_libra.simulator.call_table import part_weights
from megatron_libra.simulator.cost_model import CostModel, part_seconds, pass_compute
from megatron_libra.simulator.pool_work import PoolWork
from megatron_libra.simulator.timeline import PassCompute, Timeline, simulate_pass

__all__ = [
    "LOSSES",
    "PASSES",
    "PassTimes",
    "PoolTimes",
    "kernel_seconds",
    "pass_times",
    "pool_times",
    "predicted",
]

Float = NDArray[np.float64]
PASSES = (False, True)
"""Whether a pass is the backward."""
LOSSES = ("inside", "first", "middle", "last", "slowed")
"""Where a pool's time goes besides the mean computation of its workers: the slowest worker computes
more; it waits for its first chunk, for a later one, for the last return; transfers slow it down."""


@dataclass(frozen=True, slots=True, eq=False)
class PassTimes:
    """One pass of a pool."""

    compute: PassCompute
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """The slowest worker's."""
        return self.timeline.seconds

    @property
    def mean_compute(self) -> float:
        """Of the workers; no pass can be shorter."""
        return float(self.compute.total.mean())

    @property
    def losses(self) -> Float:
        """(5,) seconds by LOSSES; with mean_compute they make up the seconds."""
        last = int(self.timeline.end.argmax())
        work = float(self.compute.total[last])
        waits = [
            float(wait[last])
            for wait in (
                self.timeline.first_wait,
                self.timeline.middle_wait,
                self.timeline.last_wait,
            )
        ]
        slowed = self.seconds - work - sum(waits)
        return np.array([work - self.mean_compute, *waits, slowed])


@dataclass(frozen=True, slots=True, eq=False)
class PoolTimes:
    """Every pool of a replay, columns in the order of its rows; forward and backward."""

    seconds: Float
    """(pools, 2) the slowest worker's."""
    mean_compute: Float
    """(pools, 2) seconds of computation, the mean over workers."""
    max_compute: Float
    """(pools, 2) the same of the worker that computes longest."""
    losses: Float
    """(pools, 2, 5) see LOSSES."""

    @property
    def layer(self) -> Float:
        """(pools,) forward and backward; workers meet in between."""
        layer: Float = self.seconds.sum(axis=1)
        return layer


def predicted(replay: Replay, model: CostModel) -> list[Float]:
    """By work: (2, 4, W) seconds by pass and part, of one chunk."""
    return [
        np.stack([part_seconds(work, model, backward=backward) for backward in PASSES])
        for work in replay.works
    ]


def pass_times(
    work: PoolWork, parts: Float, model: CostModel, *, backward: bool, is_overlapped: bool = True
) -> PassTimes:
    """One pass of a pool, given (4, W) seconds of its parts.

    Args:
        is_overlapped: the exchange runs under the computation; else all of that is between the
            dispatch and the return.
    """
    compute = pass_compute(work, parts, model, backward=backward)
    traffic = work.traffic(backward=backward)
    if not is_overlapped:
        compute, traffic = compute.merged, traffic.merged
    return PassTimes(compute, simulate_pass(compute, traffic, model.links, work.same_node))


def pool_times(replay: Replay, parts: list[Float], model: CostModel) -> PoolTimes:
    """All pools, given the parts of every work."""
    known: dict[tuple[int, bool], tuple[Float, ...]] = {}
    rows = []
    for number, *_, index in replay.rows.tolist():
        key = index, replay.series[number].method.is_overlapped
        if key not in known:
            known[key] = _columns(replay.works[index], parts[index], model, key[1])
        rows.append(known[key])
    return PoolTimes(*(np.array(column) for column in zip(*rows, strict=True)))


def _columns(
    work: PoolWork, parts: Float, model: CostModel, is_overlapped: bool
) -> tuple[Float, ...]:
    passes = [
        pass_times(work, seconds, model, backward=backward, is_overlapped=is_overlapped)
        for backward, seconds in zip(PASSES, parts, strict=True)
    ]
    return (
        np.array([each.seconds for each in passes]),
        np.array([each.mean_compute for each in passes]),
        np.array([float(each.compute.total.max()) for each in passes]),
        np.stack([each.losses for each in passes]),
    )


def kernel_seconds(parts: Float, chunks: int) -> Float:
    """(2, W) seconds of all kernel calls of a layer's passes, given (2, 4, W) of parts."""
    seconds: Float = np.einsum("ijk,j->ik", parts, part_weights(chunks))
    return seconds
