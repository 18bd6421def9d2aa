"""Plans of this package's own placers. In: pool, choices. Out: Outcome.

home_first is ours; paper is Algorithm 2; home computes every query where it lives and gathers K and
V; ulysses splits the heads of a sequence over its CP group.
"""

from __future__ import annotations

from typing import Any

from megatron_libra.bench.outcome import Outcome
from megatron_libra.bench.pools import BenchPool
from megatron_libra.config import LibraConfig
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from megatron_libra.simulator.pool_work import PoolWork

__all__ = ["make_plan", "plan_tiles"]


def make_plan(pool: BenchPool, **choices: Any) -> PoolPlan:
    """The plan of a pool with the given fields of LibraConfig."""
    return plan_pool(
        pool.sequences,
        context_parallel_size=pool.context_parallel_size,
        shape=pool.shape,
        config=LibraConfig(pool_size=len(pool.sequences), chunks=1, **choices),
        seq_length=pool.seq_length,
    )


def plan_tiles(pool: BenchPool, **choices: Any) -> Outcome:
    """Plan a pool and count the plan."""
    plan = make_plan(pool, **choices)
    work = PoolWork.of(plan, workers_per_node=pool.context_parallel_size)
    return Outcome(plan.loads, work.query_bytes.sum(axis=0), work.kv_bytes.sum(axis=0))
