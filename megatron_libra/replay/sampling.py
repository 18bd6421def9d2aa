"""Which workers to measure, and what measurements say about the others.

In: predicted seconds of all workers. Out: an order to measure in; corrected seconds; errors.

What decides a result comes first: the heaviest worker of every microbatch's heaviest pool, for all
methods; then a random sample, which tells how wrong the model is; then the other heaviest ones.
Workers whose kernel calls are equal, as those of one Ulysses group are, are measured once.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ModelError",
    "WorkerTable",
    "corrected",
    "known_calls",
    "measuring_order",
    "model_error",
]

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class WorkerTable:
    """Every worker of every pool of a replay; columns (N,)."""

    method: Int64
    microbatch: Int64
    """Numbered over all windows and the same for all methods; the first one of several."""
    pool: Int64
    """Numbered over everything."""
    worker: Int64
    calls: Int64
    """Equal for workers with equal kernel calls."""
    seconds: Float
    """Predicted computation, forward and backward."""
    is_straggler: NDArray[np.bool_]
    """Whether a worker's pool has the heaviest worker of a method and microbatch."""

    def __len__(self) -> int:
        return len(self.method)

    @property
    def rank(self) -> Int64:
        """Place of each worker in its pool, 0 is the heaviest; ties by worker."""
        order = np.lexsort((self.worker, -self.seconds, self.pool))
        first = np.flatnonzero(np.diff(self.pool[order], prepend=-1))
        count = np.diff(first, append=len(order))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order)) - np.repeat(first, count)
        return place


def measuring_order(table: WorkerTable, *, heaviest: int | None, sample: int, seed: int) -> Int64:
    """Rows to measure, the most telling first; one row for equal calls.

    Args:
        heaviest: of every pool; None for all workers.
        sample: random workers of each method besides them.
    """
    rank = table.rank
    straggler, drawn = table.is_straggler, _drawn(table, sample, seed)
    is_wanted = drawn | (rank < (len(table) if heaviest is None else heaviest))
    tier = np.select([straggler & (rank == 0), drawn, straggler], [0, 1, 2], 3)
    order = np.lexsort((table.worker, table.pool, table.method, table.microbatch, rank, tier))
    order = order[is_wanted[order]]
    _, first = np.unique(table.calls[order], return_index=True)
    return order[np.sort(first)]


def _drawn(table: WorkerTable, sample: int, seed: int) -> NDArray[np.bool_]:
    rng = np.random.default_rng(seed)
    drawn = np.zeros(len(table), np.bool_)
    for method in np.unique(table.method):
        rows = np.flatnonzero((table.method == method) & (table.seconds > 0))
        drawn[rng.choice(rows, min(sample, len(rows)), replace=False)] = True
    return drawn


def corrected(table: WorkerTable, predicted: Float, measured: Float, common: float = 1.0) -> Float:
    """(N, phases) seconds: measured ones where there are any, for all workers with equal calls; the
    others predicted and scaled by their method's ratio of measured to predicted sums.

    Args:
        predicted: (N, phases) seconds, forward and backward.
        measured: the same, NaN where nothing was measured.
        common: the ratio where a method has none, so that methods stay comparable.
    """
    seconds = predicted.copy()
    known = ~np.isnan(measured).any(axis=1)
    for method in np.unique(table.method):
        rows = table.method == method
        base = predicted[rows & known].sum(axis=0)
        ratio = np.divide(
            measured[rows & known].sum(axis=0), base, np.full_like(base, common), where=base > 0
        )
        seconds[rows] *= ratio
    calls, row = np.unique(table.calls[known], return_index=True)
    place = np.searchsorted(calls, table.calls)
    place[place == len(calls)] = 0
    if len(calls):
        same = calls[place] == table.calls
        seconds[same] = measured[np.flatnonzero(known)[row]][place[same]]
    return seconds


def known_calls(table: WorkerTable, measured: Float) -> NDArray[np.bool_]:
    """(N,) whether a worker's calls were run, by itself or by a worker with equal calls.

    Args:
        measured: (N, phases) seconds, NaN where nothing was measured.
    """
    known = ~np.isnan(measured).any(axis=1)
    found: NDArray[np.bool_] = np.isin(table.calls, table.calls[known])
    return found


@dataclass(frozen=True, slots=True)
class ModelError:
    """|predicted / measured - 1| over measured workers."""

    num_measured: int
    median: float
    worst: float
    ratio: float
    """Measured over predicted seconds, summed."""


def model_error(predicted: Float, measured: Float) -> ModelError | None:
    """Of the sums over phases; None where nothing was measured."""
    known = ~np.isnan(measured).any(axis=1)
    ours, truth = predicted[known].sum(axis=1), measured[known].sum(axis=1)
    ours, truth = ours[truth > 0], truth[truth > 0]
    if not truth.size:
        return None
    errors = np.abs(ours / truth - 1)
    ratio = float(truth.sum() / ours.sum()) if ours.sum() else float("inf")
    return ModelError(truth.size, float(np.median(errors)), float(errors.max()), ratio)
