"""Re-implemented rules: cases by hand, then invariants on random pools."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

from megatron_libra.bench.outcome import QueryRanges
from megatron_libra.bench.planners import distca, equal_chunks, wlb
from megatron_libra.bench.planners.libra import plan_tiles
from megatron_libra.bench.pools import BenchPool
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import read_samples
from megatron_libra.plan.tiles import causal_pairs, cut_blocks
from tests.bench.pools import ONE_HEAD, random_pool

RULES = {
    "wlb": wlb.plan,
    "distca 0.10": partial(distca.plan, tolerance=0.10),
    "distca 0.03": partial(distca.plan, tolerance=0.03),
    "equal chunks 8": partial(equal_chunks.plan, chunks_per_worker=8),
}


def total_pairs(pool: BenchPool) -> int:
    lengths = np.array([length for row in pool.sequences for length in row])
    return int(causal_pairs(np.zeros_like(lengths), lengths).sum())


def test_wlb_fills_the_least_work_and_keeps_the_token_limit():
    assert wlb.repack([6, 3, 4, 3], 2, 10) == [[6], [4, 3, 3]]
    assert wlb.repack([6, 3, 4, 3], 2, 9) == [[6, 3], [4, 3]]


def test_equal_chunks_by_hand():
    # Chunks of 2 tokens: 3 and 7 pairs of the sample, 2 and 2 of the ones. Heaviest first: 7 to
    # worker 0; 3 and a 2 to worker 1, then full; the last 2 to worker 0. It lacks tokens 0, 1.
    pool = BenchPool(((4,), (1, 1, 1, 1)), 4, 1, ONE_HEAD)
    found = equal_chunks.plan(pool, chunks_per_worker=2)
    assert found.loads.tolist() == [9, 5]
    assert found.kv_bytes.tolist() == [[0, 0], [2 * 2, 0]]
    assert found.total_bytes == 4, "tokens live where they are computed: no Q, no O"


def test_distca_by_hand():
    # Worker 0 has a sample of 128 tokens (8,256 pairs), worker 1 128 samples of one (128 pairs).
    # The deficit of 4,064 takes two grains of 16 head and 16 tail tokens, 129 pairs a head and its
    # tail: heads 32..63 and tails 64..95 move, with keys 0..95.
    pool = BenchPool(((128,), (1,) * 128), 128, 1, ONE_HEAD)
    found = distca.plan(pool, tolerance=0.03)
    assert found.loads.tolist() == [8256 - 4128, 128 + 4128]
    assert found.query_bytes.tolist() == [[0, 64], [0, 0]]
    assert found.kv_bytes.tolist() == [[0, 2 * 96], [0, 0]]


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("seed", range(4))
def test_every_pair_is_computed_once(name, seed):
    pool = random_pool(seed)
    found = RULES[name](pool)
    shards = pool.context_parallel_size if name == "wlb" else 1  # Ulysses counts pairs of shards
    assert found.loads.sum() == total_pairs(pool) * shards
    assert (found.loads >= 0).all()
    assert not found.traffic_bytes.diagonal().any()
    assert found.worker_bytes * pool.num_workers >= found.total_bytes


@pytest.mark.parametrize("seed", range(4))
def test_distca_keeps_its_tolerance_and_moves_more_for_a_tighter_one(seed):
    pool = random_pool(seed, length=65_536)  # long enough for parts of 16 tokens to be fine
    loose, tight = (distca.plan(pool, tolerance=tolerance) for tolerance in (0.10, 0.03))
    assert tight.max_over_mean <= 1.03
    assert loose.max_over_mean <= 1.10
    assert loose.total_bytes <= tight.total_bytes


@pytest.mark.parametrize("seed", range(4))
def test_ranges_at_home_are_counted_as_the_home_placer_counts_them(seed):
    pool = random_pool(seed)
    layout = TokenLayout("zigzag", pool.seq_length, pool.context_parallel_size)
    samples = read_samples(pool.sequences, pool.seq_length)
    pieces = cut_blocks(samples, layout, layout.piece_tokens)
    home = np.repeat(pieces.home, np.diff(pieces.first_fragment))
    ranges = QueryRanges(home, pieces.fragment_sample, pieces.fragment_start, pieces.fragment_stop)
    found = ranges.outcome(samples, layout, pool.shape)
    planned = plan_tiles(pool, placer="home", block_size=512)
    assert found.loads.tolist() == planned.loads.tolist()
    assert found.traffic_bytes.tolist() == planned.traffic_bytes.tolist()


def test_wlb_repacks_within_its_limit():
    pool = random_pool(1)
    found = wlb.plan(pool)
    before = plan_tiles(pool, placer="ulysses", block_size=4096)
    assert found.max_over_mean <= before.max_over_mean
    assert 1.0 <= found.fullest <= wlb.TOKEN_LIMIT
