"""The executor equals dense attention: float64 over gloo, out, dq, dk, dv to 1e-10.

Layers: named cases, every H and M, every placer with every layout and fetch, random pools; each
with K and V saved and fetched again. All plans of one pool size share one world.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from megatron_libra.config import CHOICES
from megatron_libra.executor.inputs import RESULTS
from megatron_libra.executor.verify import Verification, verify_plans
from megatron_libra.plan.pool_plan import PoolPlan
from tests.helpers.cases import CASES, plan_of, pool, random_pools

TOLERANCE = 1e-10
LARGE = ("four_full_documents", "lengths_137_2041_89")
RANDOM_WORKERS = (1, 2, 3, 4, 6, 8)


def both_backwards(plan: PoolPlan) -> list[PoolPlan]:
    """The plan with backward_kv save and refetch."""
    return [
        replace(plan, config=replace(plan.config, backward_kv=kv)) for kv in ("save", "refetch")
    ]


def head_cuts() -> list[PoolPlan]:
    """One small pool with every H and M that 8 query heads over 8, 4, 2 or 1 kv heads allow."""
    plans = []
    for kv_heads in (8, 4, 2, 1):
        for head_split in (1, 2, 4, 8):
            for chunks in (1, 2, 4, 8):
                case = pool([[29, 3], [20]], 32, 1, (8, kv_heads, 4), block_size=8)
                try:
                    plans.append(plan_of(case, head_split=head_split, chunks=chunks))
                except ValueError:
                    continue
    return plans


def choices() -> list[PoolPlan]:
    """One pool with every placer, layout and kv_fetch."""
    case = pool([[70, 9], [31, 1, 12]], 80, 2, (4, 2, 8), block_size=16, chunks=2)
    return [
        plan_of(case, placer=placer, layout=layout, kv_fetch=fetch)
        for placer in CHOICES["placer"]
        for layout in CHOICES["layout"]
        for fetch in CHOICES["kv_fetch"]
    ]


def check(outcome: Verification) -> None:
    """Exact to the tolerance everywhere, exactly zero in the padding tail."""
    plan, report = outcome.plan, outcome.report
    message = f"{plan.sequences} {plan.config}: {report['errors']}"
    assert outcome.passed and max(report["max_abs"].values()) < TOLERANCE, message
    for name in RESULTS:
        for slot, lengths in enumerate(plan.sequences):
            assert not np.any(outcome.arrays[name][slot, sum(lengths) :]), (name, message)


@cache
def named_outcomes(num_workers: int) -> dict[str, list[Verification]]:
    """Outcomes of all named cases with a number of workers."""
    plans = {name: plan_of(case) for name, case in CASES.items() if name not in LARGE}
    chosen = {name: plan for name, plan in plans.items() if plan.num_workers == num_workers}
    outcomes = verify_plans([p for plan in chosen.values() for p in both_backwards(plan)], seed=3)
    return {name: outcomes[2 * i : 2 * i + 2] for i, name in enumerate(chosen)}


@pytest.mark.parametrize("name", [name for name in CASES if name not in LARGE])
def test_named_case(name: str) -> None:
    for outcome in named_outcomes(plan_of(CASES[name]).num_workers)[name]:
        check(outcome)


@pytest.mark.slow
@pytest.mark.parametrize("name", LARGE)
def test_large_case(name: str) -> None:
    check(*verify_plans([plan_of(CASES[name])]))


def test_every_head_split_and_chunk_count() -> None:
    plans = head_cuts()
    assert {(p.heads.head_split, p.heads.chunks) for p in plans} >= {(1, 8), (8, 1), (4, 2), (2, 1)}
    for outcome in verify_plans([p for plan in plans for p in both_backwards(plan)], seed=1):
        check(outcome)


def test_every_placer_layout_and_fetch() -> None:
    for outcome in verify_plans(choices(), seed=2):
        check(outcome)


@pytest.mark.parametrize("num_workers", RANDOM_WORKERS)
def test_random_pools(num_workers: int) -> None:
    plans = random_pools(100 + num_workers, 12, num_workers=num_workers)
    for outcome in verify_plans([p for plan in plans for p in both_backwards(plan)], seed=4):
        check(outcome)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_half_and_single_precision(dtype: str) -> None:
    case = pool([[300], [40, 60, 100]], 320, 2, (8, 2, 32), block_size=32, head_split=2, chunks=2)
    plans = both_backwards(plan_of(case, placer="paper"))
    assert plans[0].imbalance < 0.1 and int(plans[0].num_rounds.max()) > 1
    for outcome in verify_plans(plans, dtype=dtype):
        assert outcome.passed, (outcome.report["errors"], outcome.report["relative"])
        assert outcome.report["max_error"] > 1e-8, "float64 was computed, not this dtype"
        assert outcome.arrays["dk"].dtype == np.float32
