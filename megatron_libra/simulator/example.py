"""One pool to look at: the one with the heaviest packed sequence. In: a ReplayTask. Out: its plan
in numbers.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.vrsp import attention_work
from megatron_libra.simulator.cost_model import PoolTime, predict
from megatron_libra.simulator.pool_work import PoolWork
from megatron_libra.simulator.replay import ReplayTask, plan_of, pools_of

__all__ = ["ExamplePool", "example_pool"]

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class ExamplePool:
    """A pool of the recommended configuration next to the reference on the same sequences."""

    sequences: tuple[tuple[int, ...], ...]
    """Sample lengths by slot."""
    work: PoolWork
    time: PoolTime
    slot_pairs: NDArray[np.int64]
    """(W, P) pairs that a worker computes of each slot's sequence."""
    reference: Float
    """(W,) seconds of forward where every CP group computes its own sequence."""


def example_pool(task: ReplayTask, reference: ReplayTask) -> ExamplePool:
    """Plan the pool of the window's heaviest sequence.

    Args:
        task: the recommended candidate on a window.
        reference: pools of one sequence on the same window.
    """
    work_of = [attention_work(lengths) for lengths in task.window]
    heaviest = work_of.index(max(work_of))
    pools = pools_of(task.window, task.candidate, task.job)
    pool = next(pool for pool in pools if heaviest in pool)
    sequences = [task.window.lengths(row) for row in pool]
    plan = plan_of(sequences, task)
    slot_pairs = np.zeros((plan.num_workers, len(pool)), np.int64)
    np.add.at(slot_pairs, (plan.tiles.worker, plan.tiles.slot), plan.tiles.pairs)
    work = PoolWork.of(plan, task.job.workers_per_node)
    alone = [
        predict(PoolWork.of(plan_of([each], reference), task.job.workers_per_node), task.model)
        for each in sequences
    ]
    return ExamplePool(
        sequences=tuple(sequences),
        work=work,
        time=predict(work, task.model),
        slot_pairs=slot_pairs,
        reference=np.concatenate([each.forward.end for each in alone]),
    )
