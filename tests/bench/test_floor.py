"""The floor: a case by hand, and no plan is below it."""

from __future__ import annotations

import pytest

from megatron_libra.bench.floor import byte_floor
from megatron_libra.bench.planners.libra import plan_tiles
from megatron_libra.bench.pools import BenchPool
from tests.bench.pools import ONE_HEAD, random_pool


def test_the_floor_by_hand():
    # 12 pairs against 4: C = 8 (the last token of sample 0 has 4 keys, ...). Worker 0 sheds 2 pairs
    # of its 4-token sample of 10 pairs, its 2 ones keep 2; half a row with 4 keys. A = sqrt(2) is
    # larger, so the least is at Q = A: 2 * (A + A) bytes.
    pool = BenchPool(((4, 1, 1), (1, 1, 1, 1)), 6, 1, ONE_HEAD)
    floor = byte_floor(pool, 0.0)
    assert floor.query_bytes == pytest.approx(2 * (4 / 4))
    assert floor.home_kv_bytes == 0
    assert floor.total_bytes == pytest.approx(4 * 4**0.5)


def test_a_balanced_pool_needs_nothing_but_its_keys():
    pool = BenchPool(((8,), (8,)), 8, 2, ONE_HEAD)
    floor = byte_floor(pool, 0.03)
    home = plan_tiles(pool, placer="home", block_size=8)
    assert (floor.query_bytes, floor.worker_bytes) == (0.0, 0.0)
    assert floor.total_bytes == floor.home_kv_bytes == home.total_bytes > 0


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("block", "heads"), [(128, 8), (256, 2), (64, 4)])
def test_our_plans_are_above_the_floor(seed, block, heads):
    pool = random_pool(seed)
    slack = 0.05
    found = plan_tiles(
        pool, placer="home_first", block_size=block, head_split=heads, load_slack=slack
    )
    assert found.max_over_mean <= 1 + slack
    floor = byte_floor(pool, slack)
    assert 0 < floor.query_bytes <= 2 * found.query_bytes.sum()
    assert floor.total_bytes <= found.total_bytes
    assert floor.worker_bytes <= found.worker_bytes
