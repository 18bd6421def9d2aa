"""Order and plan one optimizer step as training would. In: a window, a candidate. Out: its pools.

window -> VRSP -> pools in GA-major order -> plan_pool -> PoolWork -> predicted times
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import LibraConfig
from megatron_libra.data.rows import LengthRows
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from megatron_libra.plan.vrsp import order_window
from megatron_libra.simulator.candidates import Candidate
from megatron_libra.simulator.cost_model import CostModel, PoolTime, predict
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.pool_work import PoolWork

__all__ = ["ReplayTask", "WindowReplay", "plan_of", "pools_of", "replay_window"]

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTask:
    """One candidate on one window; the unit of work of a process."""

    window: LengthRows
    job: TrainingJob
    candidate: Candidate
    base: LibraConfig
    """What the candidate does not choose: tau, kv_fetch, layout, backward_kv."""
    model: CostModel


@dataclass(frozen=True, slots=True, eq=False)
class WindowReplay:
    """All pools of one step; arrays (GA, worker groups)."""

    forward_s: Float
    """Predicted forward of one attention layer."""
    backward_s: Float
    compute_s: Float
    """The computation in forward and backward; what is left is exposed communication."""
    imbalance: Float
    """max / mean - 1 of the workers' pairs."""
    total_bytes: Float
    """Bytes between workers in one layer's forward, of all workers."""
    worker_bytes: Float
    """The most loaded worker's, the larger of sent and received."""
    inter_node_bytes: Float
    resident_kv_bytes: Float
    """K and V of the worker that holds most."""
    tile_over_target: Float
    """The heaviest tile over C."""

    @property
    def layer_s(self) -> Float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


def pools_of(window: LengthRows, candidate: Candidate, job: TrainingJob) -> list[list[int]]:
    """Rows of the window by pool, GA-major and pool-minor."""
    size, count = candidate.pool_size, len(window)
    if candidate.scope == "off":
        return [list(range(first, first + size)) for first in range(0, count, size)]
    order = order_window(
        list(window),
        pool_size=size,
        data_parallel_size=job.data_parallel_size,
        scope=candidate.scope,
        pipeline_parallel_size=job.pipeline_parallel_size,
    )
    return [list(pool) for pool in order.pools]


def plan_of(sequences: list[tuple[int, ...]], task: ReplayTask) -> PoolPlan:
    """The plan of one pool of the task's candidate."""
    return plan_pool(
        sequences,
        context_parallel_size=task.job.context_parallel_size,
        shape=task.job.shape,
        config=task.candidate.config(task.base),
        seq_length=task.job.seq_length,
    )


def replay_window(task: ReplayTask) -> WindowReplay:
    """Plan every pool of a window and predict its time."""
    rows = []
    for pool in pools_of(task.window, task.candidate, task.job):
        plan = plan_of([task.window.lengths(row) for row in pool], task)
        work = PoolWork.of(plan, task.job.workers_per_node)
        time = predict(work, task.model, refetch=task.base.backward_kv == "refetch")
        rows.append(_row(work, time))
    table = np.array(rows).T.reshape(len(rows[0]), task.job.num_microbatches, -1)
    return WindowReplay(*table)


def _row(work: PoolWork, time: PoolTime) -> tuple[float, ...]:
    """The fields of WindowReplay for one pool."""
    return (
        time.forward_s,
        time.backward_s,
        time.compute_s,
        work.imbalance,
        float(work.traffic_bytes.sum()),
        float(work.worker_bytes.max()),
        float(work.inter_node_bytes),
        float(work.resident_kv_bytes.max()),
        work.tile_over_target,
    )
