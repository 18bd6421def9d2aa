"""Layer 1: how many chunks a plan has where the user does not say."""

import numpy as np
import pytest

from megatron_libra import AttentionShape, LibraConfig, plan_pool
from megatron_libra.plan import chunks
from megatron_libra.plan.chunks import best_chunks

SHAPE = AttentionShape(query_heads=32, kv_heads=4, head_dim=128)


def chunks_of(sequences, cp=1, shape=SHAPE, **fields):
    config = LibraConfig(pool_size=len(sequences), load_slack=0.0, **fields)
    return plan_pool(sequences, context_parallel_size=cp, shape=shape, config=config).config.chunks


def test_nothing_exchanged_needs_one_chunk():
    assert chunks_of([[65_536]], placer="home") == 1
    assert chunks_of([[256] * 64, [256] * 64]) == 1


def test_long_layers_have_more_chunks_unless_local_work_hides_the_exchange():
    """Samples of 8K tokens against many short ones: the receiver has next to no local work. Against
    samples of 4K it has enough."""
    assert chunks_of([[512] * 2, [16] * 64]) == 1
    assert chunks_of([[8192] * 8, [16] * 4096]) == 4
    assert chunks_of([[8192] * 8, [4096] * 16]) == 1


def test_long_keys_have_fewer_chunks():
    """A chunk's last wave takes as long as its longest keys."""
    assert chunks_of([[65_536], [16] * 4096]) < chunks_of([[8192] * 8, [16] * 4096])


def test_ulysses_exchanges_everything():
    assert [chunks_of([[256] * n], cp=2, placer="ulysses") for n in (2, 512)] == [1, 4]


def test_slow_links_between_nodes_ask_for_more_chunks():
    """The same work for each of 2 and of 16 workers; the larger pool spans nodes."""
    small, large = ([[8192] * 2, [6144] * 2] * count for count in (1, 8))
    assert chunks_of(small) < chunks_of(large)


def test_the_user_decides_and_heads_are_cut_evenly():
    pool = [[8192] * 8, [16] * 4096]
    assert chunks_of(pool, chunks=8) == 8
    assert chunks_of(pool, shape=AttentionShape(query_heads=3, kv_heads=3, head_dim=512)) == 3
    assert chunks_of(pool, shape=AttentionShape(query_heads=1, kv_heads=1, head_dim=2048)) == 1


@pytest.mark.parametrize("seed", range(6))
def test_no_other_number_of_chunks_costs_less(seed, monkeypatch):
    """Cost of every M from ranges and entries, with plain loops."""
    rng = np.random.default_rng(seed)
    monkeypatch.setattr(chunks, "LAUNCH_FLOPS", int(rng.integers(1, 10)) * 10**7)
    monkeypatch.setattr(chunks, "WAVE_QUERIES", 100)
    shape = AttentionShape(query_heads=8, kv_heads=2, head_dim=64)
    sequences = [[2000], rng.integers(1, 90, 30).tolist(), rng.integers(1, 900, 3).tolist()]
    config = LibraConfig(pool_size=3, block_size=64, head_split=int(rng.choice([1, 2])))
    plan = plan_pool(sequences, context_parallel_size=2, shape=shape, config=config)
    arrive, leave, early, late = np.zeros((4, 6))
    parts = plan.near, plan.far
    for part in parts:
        for route, heads in ((part.query, 8), (part.kv, 2 * 2)):
            width = heads // config.head_split * 64 * 2
            for source, worker, count in zip(
                route.source, route.destination, route.count, strict=True
            ):
                if source != worker:
                    arrive[worker] += count * width * 1700
                    leave[worker] += count * width * 1700 if route is part.query else 0
    for worker in range(6):
        halves = plan.worker_plan(worker).local.halves(2)
        for half, (rounds, kv_heads) in zip((early, late), halves, strict=True):
            for r in rounds:
                for queries, keys in zip(np.diff(r.cu_queries), np.diff(r.cu_keys), strict=True):
                    pairs = sum(range(int(keys - queries) + 1, int(keys) + 1))
                    half[worker] += pairs * 4 * 64 * 8 * len(kv_heads) / 2
    longest = [max(part.entries.num_keys.tolist(), default=0) for part in parts]
    each = sum(chunks.LAUNCH_FLOPS + 50 * keys * 4 * 64 for keys in longest if keys)
    allowed = [m for m in (1, 2, 3, 4) if 8 // config.head_split % m == 0 and m != 3]
    cost = {
        m: max(np.maximum(0, arrive / m - early) + np.maximum(0, leave / m - late)) + m * each
        for m in allowed
    }
    found = best_chunks(config, shape, plan.near, plan.far, plan.local)
    assert cost[found] == pytest.approx(min(cost.values()))
