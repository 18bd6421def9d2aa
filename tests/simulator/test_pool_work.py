"""What PoolWork counts of a plan: by hand, against the plan's own sums, against the executor."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.executor.plan_index import LocalIndex
from megatron_libra.plan.exchange import RouteTable
from megatron_libra.plan.parts import EARLY, FAR, NEAR
from megatron_libra.plan.pool_plan import plan_pool
from megatron_libra.plan.worker_plan import MOST_GAPS
from megatron_libra.simulator import pool_work
from megatron_libra.simulator.call_table import part_weights
from megatron_libra.simulator.pool_work import PoolWork


def test_work_of_a_plan_by_hand() -> None:
    """One sequence of 8 tokens on CP = 2 contiguous, tiles at home: worker 1 fetches 4 tokens of
    K and V, 2 kv heads of 8 elements of 2 bytes; no query moves.
    """
    plan = plan_pool(
        [[8]],
        context_parallel_size=2,
        shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
        config=LibraConfig(pool_size=1, block_size=4, chunks=2, placer="home", layout="contiguous"),
    )
    work = PoolWork.of(plan, workers_per_node=1)
    assert work.pairs.tolist() == [10, 26]
    assert work.kv_bytes.tolist() == [[[0, 4 * 2 * 2 * 8 * 2], [0, 0]], [[0, 0], [0, 0]]]
    assert not work.query_bytes.any()
    assert work.worker_bytes.tolist() == [256 * 1, 256]
    assert work.inter_node_bytes == 256
    assert work.resident_kv_bytes.tolist() == [256, 512]
    assert work.calls.part.tolist() == [NEAR, EARLY]
    assert work.calls.query_heads.tolist() == [2, 4] and work.calls.kv_heads.tolist() == [1, 2]
    assert work.calls.worker.tolist() == [1, 0] and work.calls.num_keys.tolist() == [8, 4]
    assert work.own_query_bytes.tolist() == [[0, 4 * 4 * 8 * 2], [0, 0]]
    assert work.copied_query_bytes.tolist() == work.copied_kv_bytes.tolist() == [0, 0]
    assert work.tile_over_target == pytest.approx(26 / (1.01 * 18))
    assert work.imbalance == pytest.approx(26 / 18 - 1)
    assert PoolWork.of(plan, workers_per_node=2).inter_node_bytes == 0


def off_diagonal(matrix: np.ndarray[Any, np.dtype[np.int64]]) -> Any:
    """What moves."""
    return matrix * ~np.eye(len(matrix), dtype=bool)


@pytest.mark.parametrize("placer", ["home_first", "paper", "ulysses"])
def test_bytes_are_those_of_the_plan(placer: str) -> None:
    plan = plan_pool(
        [[500, 12], [100] * 5, [40] * 12, [512]],
        context_parallel_size=2,
        shape=AttentionShape(query_heads=8, kv_heads=2, head_dim=8),
        config=LibraConfig(pool_size=4, block_size=64, head_split=2, chunks=2, placer=placer),
    )
    work = PoolWork.of(plan, workers_per_node=2)
    assert (work.traffic_bytes == plan.traffic_bytes).all()
    assert (work.query_bytes[NEAR] == off_diagonal(plan.near.query_rows * 4 * 16)).all()
    assert (work.kv_bytes[FAR] == off_diagonal(plan.far.kv_rows * 2 * 16)).all()
    repeats = part_weights(work.chunks)[work.calls.part]
    rows = work.calls.sum(work.calls.num_queries.astype(float)) * work.calls.query_heads * repeats
    assert rows.sum() == 8 * sum(map(sum, plan.sequences))


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_copies_are_made_where_the_executor_makes_them(layout: str) -> None:
    """Long tails of samples of one or two tokens make gaps; an outlier takes most of a home."""
    rng, seen = np.random.default_rng(4), set()
    config = LibraConfig(pool_size=4, block_size=16, placer="paper", layout=layout)
    shape = AttentionShape(query_heads=4, kv_heads=2, head_dim=8)
    for cp, longest, seq_length in itertools.product((1, 2), (6, 60, 600), (640, 1600)):
        rows = [rng.integers(1, longest, 400) for _ in range(3)]
        plan = plan_pool(
            [[600], *(row[np.cumsum(row) <= 640].tolist() for row in rows)],
            context_parallel_size=cp,
            shape=shape,
            config=config,
            seq_length=seq_length,
        )
        work = PoolWork.of(plan, workers_per_node=8)
        for worker in range(plan.num_workers):
            local = LocalIndex.of(plan.worker_plan(worker))
            tokens = 0 if local.in_place else len(local.tokens)
            assert work.copied_query_bytes[worker] == tokens * 4 * 8 * 2
            assert work.copied_kv_bytes[worker] == tokens * 2 * 2 * 8 * 2
            seen.add((local.in_place, tokens > 0))
    assert seen >= {(True, False), (False, True)}


def test_many_gaps_are_not_skipped() -> None:
    """Ranges of 3 tokens before gaps of one: worker 0 has as many as are skipped, worker 1 more."""
    count = [MOST_GAPS, MOST_GAPS + 1]
    worker = np.repeat([0, 1], count).astype(np.int32)[::-1]
    token = np.concatenate([4 * np.arange(n) for n in count]).astype(np.int32)[::-1]
    threes, zeros = np.full(sum(count), 3, np.int32), np.zeros(sum(count), np.int32)
    route = RouteTable(worker, worker, token, threes, zeros, zeros)
    for num_tokens, copied in ((4 * count[0], 0), (4 * count[1], 3 * count[1])):
        one = pool_work._copied_tokens(route, np.array(count), num_tokens)
        assert one[int(copied > 0)] == copied


def test_padding_is_not_a_reason_for_copies() -> None:
    """One range of 3 tokens of 100: in place unless more than 3 others are exchanged."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    route = RouteTable(zero, zero, one, 3 * one, zero, zero)
    copied = [int(pool_work._copied_tokens(route, np.array([n]), 100)[0]) for n in (0, 3, 4)]
    assert copied == [0, 0, 3]
