"""The calls of a worker's plan: by hand, and all of a pool against its pairs and its table."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.parts import EARLY, FAR, LATE, NEAR
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from megatron_libra.replay.calls import call_of, table_of, worker_calls
from megatron_libra.simulator.call_table import CallTable

SHAPE = AttentionShape(query_heads=8, kv_heads=2, head_dim=4)


def _plan(**changes: object) -> PoolPlan:
    config = {"pool_size": 2, "block_size": 16, "head_split": 2, "chunks": 2} | changes
    return plan_pool(
        [[100, 28], [20] * 6],
        context_parallel_size=2,
        shape=SHAPE,
        config=LibraConfig(**config),  # type: ignore[arg-type]
    )


def test_a_call_by_hand() -> None:
    call = call_of([2, 0, 3], [5, 4, 3], query_heads=4, kv_heads=2, head_dim=8)
    assert call.round.cu_queries.tolist() == [0, 2, 2, 5]
    assert call.round.cu_keys.tolist() == [0, 5, 9, 12]
    assert (call.round.query_stop, call.round.key_stop) == (5, 12)
    assert (call.round.max_queries, call.round.max_keys) == (3, 5)
    assert call.flops == 4 * 8 * 4 * ((4 + 5) + (1 + 2 + 3))


@pytest.mark.parametrize(("queries", "keys"), [([3], [2]), ([0], [2]), ([1, 1], [2])])
def test_impossible_calls_are_refused(queries: list[int], keys: list[int]) -> None:
    with pytest.raises(ValueError, match="a call needs entries"):
        call_of(queries, keys, query_heads=1, kv_heads=1, head_dim=8)


def test_a_worker_s_calls_are_its_rounds_in_time_order() -> None:
    plan = _plan()
    for worker in range(4):
        part = plan.worker_plan(worker)
        calls = worker_calls(part)
        (early, first), (late, last) = part.local.halves(part.heads.kv_heads)
        rounds = [*early, *part.near.rounds, *part.far.rounds, *late]
        assert [call.num_queries.tolist() for call in calls] == [
            np.diff(each.cu_queries).tolist() for each in rounds
        ]
        assert [call.part for call in calls] == sorted(
            (call.part for call in calls), key=(EARLY, NEAR, FAR, LATE).index
        )
        for call in calls:
            is_chunk = call.part in (NEAR, FAR)
            kv_heads = 1 if is_chunk else len(last if call.part == LATE else first)
            heads = (2, 1) if is_chunk else (4 * kv_heads, kv_heads)
            assert (call.query_heads, call.kv_heads) == heads
            assert call.repeats == (2 if is_chunk else 1)
            assert call.round.query_start == call.round.key_start == 0


@pytest.mark.parametrize("kv_fetch", ["prefix", "group"])
def test_the_calls_of_a_pool_compute_every_pair(kv_fetch: str) -> None:
    plan = _plan(kv_fetch=kv_fetch)
    calls = [call for worker in range(4) for call in worker_calls(plan.worker_plan(worker))]
    pairs = int(plan.loads.sum())  # of one query head of each of two shards
    assert sum(call.flops * call.repeats for call in calls) == 4 * 4 * 4 * pairs


def test_the_table_of_a_plan_has_the_calls_of_its_workers() -> None:
    plan = _plan()
    table = CallTable.of_plan(plan)
    calls = {worker: worker_calls(plan.worker_plan(worker)) for worker in range(4)}
    assert {NEAR, FAR, EARLY, LATE} == set(table.part.tolist())
    for worker, mine in calls.items():
        of_plan = sorted(
            (int(table.part[c]), int(table.query_heads[c]), *_sums(table, c))
            for c in np.flatnonzero(table.worker == worker)
        )
        other = table_of(mine)
        assert of_plan == sorted(
            (int(other.part[c]), int(other.query_heads[c]), *_sums(other, c))
            for c in range(len(other))
        )


def _sums(table: CallTable, call: int) -> tuple[float, float]:
    queries, keys = (
        table.sum(each.astype(float)) for each in (table.num_queries, table.num_keys**2)
    )
    return float(queries[call]), float(keys[call])
