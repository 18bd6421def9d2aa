"""VRSP on every optimizer step of a corpus. In: packed sequences. Out: skew before and after.

Work is the sum of squared sample lengths (Eq. 4). Before: pools of P neighbours in sampler order.
The limits are what perfect balance inside every pool and free communication would give: a pool is
then as fast as its mean sequence, while Ulysses is as fast as its heaviest one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.data.rows import LengthRows
from megatron_libra.plan.vrsp import order_window
from megatron_libra.simulator.job import TrainingJob

__all__ = ["PoolSkew", "SkewTask", "measure_windows", "pool_grid", "pool_skew", "skew_tasks"]

Float = NDArray[np.float64]
Key = tuple[int, str]
"""(P, scope)."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolSkew:
    """Skew of all windows for one (P, scope); arrays (windows,)."""

    pool_size: int
    scope: str
    before: Float
    """max / mean - 1 over pools of the sampler's order."""
    after: Float
    """The same after VRSP."""
    step_before: Float
    """max / mean - 1 of the work that a worker group does in the whole step."""
    step_after: Float
    stragglers: Float
    """(windows, 4) mean and worst straggler of Ulysses, then of ideal pools, in work."""

    def limits(self, windows: Sequence[int] | None = None) -> tuple[float, float]:
        """Limits of the speedup over Ulysses: of the mean straggler of a microbatch, and of a
        window's slowest microbatch; averages over some windows, by default over all.
        """
        chosen = self.stragglers if windows is None else self.stragglers[list(windows)]
        mean, worst, ideal_mean, ideal_worst = chosen.mean(axis=0).tolist()
        return _ratio(mean, ideal_mean), _ratio(worst, ideal_worst)


@dataclass(frozen=True, slots=True, eq=False)
class SkewTask:
    """Some windows; the unit of work of a process."""

    rows: LengthRows
    job: TrainingJob
    keys: tuple[Key, ...]


COLUMNS = 8


def measure_windows(task: SkewTask) -> Float:
    """(windows, keys, 8): before, after, step before, step after, then the mean and worst
    straggler of Ulysses and of ideal pools.
    """
    size = task.job.global_batch_size
    found = np.empty((len(task.rows) // size, len(task.keys), COLUMNS))
    squares = task.rows.row_sums(task.rows.flat**2).astype(np.float64)
    for window in range(len(found)):
        rows = range(window * size, (window + 1) * size)
        sequences = [task.rows.lengths(row) for row in rows]
        work = squares[window * size : (window + 1) * size]
        for at, (pool_size, scope) in enumerate(task.keys):
            found[window, at] = _measure(sequences, work, pool_size, scope, task.job)
    return found


def _measure(
    sequences: list[tuple[int, ...]], work: Float, pool_size: int, scope: str, job: TrainingJob
) -> tuple[float, ...]:
    given = pool_grid(work, pool_size, job)
    placed = given
    if scope != "off":
        order = order_window(
            sequences,
            pool_size=pool_size,
            data_parallel_size=job.data_parallel_size,
            scope=scope,
            pipeline_parallel_size=job.pipeline_parallel_size,
        ).order
        placed = pool_grid(work[np.array(order)], pool_size, job)
    ulysses = pool_grid(work, 1, job).max(axis=1)
    ideal = placed.max(axis=1) / pool_size
    return (
        _imbalance(given),
        _imbalance(placed),
        _imbalance(given.sum(axis=0)),
        _imbalance(placed.sum(axis=0)),
        float(ulysses.mean()),
        float(ulysses.max()),
        float(ideal.mean()),
        float(ideal.max()),
    )


def pool_grid(values: Float, pool_size: int, job: TrainingJob) -> Float:
    """(GA, worker groups) sums over the pools of GBS values in GA-major order."""
    return values.reshape(job.num_microbatches, -1, pool_size).sum(axis=2)


def pool_skew(parts: Iterable[Float], keys: tuple[Key, ...]) -> list[PoolSkew]:
    """Join what processes measured; one PoolSkew for each key."""
    table = np.concatenate(list(parts))
    return [
        PoolSkew(
            pool_size=pool_size,
            scope=scope,
            before=table[:, at, 0],
            after=table[:, at, 1],
            step_before=table[:, at, 2],
            step_after=table[:, at, 3],
            stragglers=table[:, at, 4:],
        )
        for at, (pool_size, scope) in enumerate(keys)
    ]


def skew_tasks(
    rows: LengthRows, job: TrainingJob, keys: tuple[Key, ...], windows_per_task: int
) -> list[SkewTask]:
    """All whole windows, some in each task."""
    size = job.global_batch_size
    count = len(rows) // size
    return [
        SkewTask(
            rows.take(np.arange(at * size, min(at + windows_per_task, count) * size)), job, keys
        )
        for at in range(0, count, windows_per_task)
    ]


def _imbalance(load: Float) -> float:
    mean = float(load.mean())
    return float(load.max()) / mean - 1 if mean else 0.0


def _ratio(ulysses: float, ideal: float) -> float:
    return ulysses / ideal if ideal else 1.0
