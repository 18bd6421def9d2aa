"""Plan everything that a replay looks at. In: windows, series. Out: Replay, which fits a small
file.

A series is one method in one job; its pools are planned in processes, and of each plan only its
work is kept: kernel calls and bytes. What comes behind (times.py) needs no plan, so that a GPU is
held only while kernels run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.data.rows import LengthRows
from megatron_libra.replay.methods import Method, PoolTask, bound_of, pools_of
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.pool_work import PoolWork
from megatron_libra.simulator.processes import TaskPool

__all__ = ["Corpus", "Progress", "Replay", "Series", "prepare"]

Int64 = NDArray[np.int64]
Progress = Callable[[int, int], None]
"""Called with finished and all tasks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One method in one job."""

    name: str
    """Unique in a replay."""
    method: Method
    job: TrainingJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Corpus:
    """The windows of a replay, in words."""

    name: str
    packing: str
    seeds: tuple[int, ...]
    """One corpus for each; their windows are averaged."""
    num_windows: int
    """Of all seeds together."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Replay:
    """All pools of all series, planned. Pools with equal sequences and choices share their work."""

    figure: str
    """Which figure of the paper it is for."""
    corpus: Corpus
    series: tuple[Series, ...]
    bounds: tuple[tuple[float, float], ...]
    """By series: mean and worst straggler speedup over Ulysses in the same job that perfect balance
    inside pools and a free exchange would give, the mean over windows."""
    rows: Int64
    """(pools, 5) series, window, microbatch, pool, index into works; by series, then window."""
    works: tuple[PoolWork, ...]

    def of_series(self, name: str) -> Int64:
        """Rows of a series' pools."""
        number = [each.name for each in self.series].index(name)
        return np.flatnonzero(self.rows[:, 0] == number)


def prepare(
    figure: str,
    corpus: Corpus,
    windows: Sequence[LengthRows],
    series: Sequence[Series],
    tasks: TaskPool,
    progress: Progress = lambda finished, total: None,
) -> Replay:
    """Plan every pool of every series on every window.

    Args:
        figure: of the paper.
        corpus: where the windows are from.
        windows: GBS packed sequences each.
        series: names must be unique.
        tasks: the processes that plan.
        progress: called after each plan.

    Raises:
        ValueError: a choice does not fit the heads or the layout.
    """
    known: dict[PoolTask, int] = {}
    rows: list[tuple[int, ...]] = []
    wanted: list[PoolTask] = []
    for number, each in enumerate(series):
        for window, sequences in enumerate(windows):
            for task in pools_of(each.method, sequences, each.job, window):
                index = known.setdefault(task.identity, len(wanted))
                if index == len(wanted):
                    wanted.append(task)
                rows.append((number, window, task.microbatch, task.pool, index))
    bounds = [
        np.mean([bound_of(window, each.job, each.method) for window in windows], axis=0)
        for each in series
    ]
    return Replay(
        figure=figure,
        corpus=corpus,
        series=tuple(series),
        bounds=tuple((float(mean), float(worst)) for mean, worst in bounds),
        rows=np.array(rows, np.int64).reshape(-1, 5),
        works=tuple(tasks.run(work_of, wanted, progress)),
    )


def work_of(task: PoolTask) -> PoolWork:
    """Plan a pool and keep its work; a module function, so that a process can run it."""
    return PoolWork.of(task.plan(), task.job.workers_per_node)
