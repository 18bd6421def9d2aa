"""Rank lists of pools, plans and reports: by hand, then against Megatron's own rank numbering."""

from __future__ import annotations

import itertools

import pytest

from megatron_libra.executor.groups import pool_ranks
from tests.integration.harness import call

SIZES = [
    # tp, cp, dp, pp, P
    (1, 2, 4, 2, 2),
    (2, 2, 4, 1, 2),
    (2, 2, 2, 3, 2),
    (4, 1, 4, 2, 4),
    (1, 1, 1, 4, 1),
]
ORDERS = ["tp-cp-ep-dp-pp", "tp-cp-ep-pp-dp"]


def megatron_ranks(order: str, sizes: tuple[int, ...]) -> tuple[list[list[int]], list[list[int]]]:
    from megatron.core.parallel_state import RankGenerator

    tp, cp, dp, pp, _ = sizes
    grid = RankGenerator(tp=tp, ep=1, dp=dp, pp=pp, cp=cp, order=order)
    return grid.get_ranks("dp-cp"), grid.get_ranks("tp-pp")


def all_ranks() -> dict[tuple[str, tuple[int, ...]], tuple[list[list[int]], list[list[int]]]]:
    return {(o, s): megatron_ranks(o, s) for o, s in itertools.product(ORDERS, SIZES)}


def plan_groups(order: str, sizes: tuple[int, ...]) -> list[dict[str, object]]:
    from megatron_libra.integration.groups import plan_ranks, report_ranks

    tp, cp, dp, pp, pool_size = sizes
    lists, replicas = megatron_ranks(order, sizes)
    seen = []
    for rank in range(tp * cp * dp * pp):
        pools = pool_ranks(next(ranks for ranks in lists if rank in ranks), pool_size, cp)
        pool = next(ranks for ranks in pools if rank in ranks)
        plan = plan_ranks(rank, pool, next(ranks for ranks in replicas if rank in ranks))
        report = report_ranks(pools, pool, plan[0], tp * cp * dp * pp)
        seen.append({"pool": pool, "plan": plan, "report": report})
    return seen


def everything() -> dict[tuple[str, tuple[int, ...]], list[dict[str, object]]]:
    return {(o, s): plan_groups(o, s) for o, s in itertools.product(ORDERS, SIZES)}


@pytest.fixture(scope="module")
def groups() -> dict[tuple[str, tuple[int, ...]], list[dict[str, object]]]:
    return call(everything)


def test_sixteen_ranks_by_hand(groups: dict) -> None:
    seen = groups[ORDERS[0], (1, 2, 4, 2, 2)]
    assert seen[1]["pool"] == (0, 1, 2, 3) and seen[9]["pool"] == (8, 9, 10, 11)
    assert seen[1]["plan"] == seen[9]["plan"] == (0, 1, 2, 3, 8, 9, 10, 11)
    assert seen[5]["plan"] == (4, 5, 6, 7, 12, 13, 14, 15)
    assert {entry["report"] for entry in seen} == {(0, 4, 15)}


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("sizes", SIZES)
def test_every_rank_agrees(groups: dict, order: str, sizes: tuple[int, ...]) -> None:
    """Plan groups partition the job, hold whole pools, and are led by the first stage's first
    rank."""
    tp, cp, dp, pp, pool_size = sizes
    seen = groups[order, sizes]
    for rank, entry in enumerate(seen):
        assert rank in entry["pool"] and rank in entry["plan"]
        assert all(seen[other]["plan"] == entry["plan"] for other in entry["plan"])
        assert set(entry["pool"]) <= set(entry["plan"])
        assert len(entry["plan"]) == pool_size * cp * tp * pp
    leaders = {entry["plan"][0] for entry in seen}
    assert len(leaders) == dp // pool_size
    assert {entry["report"] for entry in seen} == {tuple(sorted(leaders | {len(seen) - 1}))}


@pytest.mark.parametrize("order", ORDERS)
def test_leaders_are_tensor_rank_0_of_the_first_stage(order: str) -> None:
    """There Megatron builds the dataset, also for every replica of the pool."""
    for sizes in SIZES:
        lists, replicas = call(megatron_ranks, order, sizes)
        first = min(lists)  # the list of rank 0: tensor-parallel rank 0, first stage
        for replica in replicas:
            assert replica[0] in first
