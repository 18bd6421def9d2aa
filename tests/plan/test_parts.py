"""Layer 1: in which part of a layer a query range is computed; by hand, then on random pools."""

import numpy as np
import pytest

from megatron_libra import AttentionShape, LibraConfig, plan_pool
from megatron_libra.plan.parts import FAR, NEAR, pipeline_order
from tests.helpers.cases import random_pools

SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=8)


@pytest.mark.parametrize("chunks", range(1, 9))
def test_every_chunk_is_a_step_and_far_ones_stand_between_near_ones(chunks):
    order = pipeline_order(chunks)
    for part in (NEAR, FAR):
        assert [chunk for p, chunk in order if p == part] == list(range(chunks))
    far = [place for place, (part, _) in enumerate(order) if part == FAR]
    assert far == list(range(far[0], far[0] + chunks))
    assert far[0] >= len(order) - 1 - far[-1] >= far[0] - 1


def test_the_drawn_order():
    assert pipeline_order(3) == ((NEAR, 0), (NEAR, 1), (FAR, 0), (FAR, 1), (FAR, 2), (NEAR, 2))


@pytest.mark.parametrize("load_slack", [0.0, 0.2])
def test_local_tokens_are_those_whose_shards_all_stayed(load_slack):
    """CP = 1, so keys are at home: local is the start of a sample, as far as its home computes
    every shard."""
    config = LibraConfig(pool_size=2, block_size=8, head_split=2, chunks=1, load_slack=load_slack)
    plan = plan_pool(
        [[30, 10], [4, 4]], context_parallel_size=1, shape=SHAPE, config=config, seq_length=40
    )
    tiles = plan.tiles
    stayed = np.zeros((2, 2, 40), np.int64)
    samples = ((0, 30), (30, 40)), ((0, 4), (4, 8))
    for slot, shard, start, stop, home, worker in zip(
        tiles.slot, tiles.head_shard, tiles.start, tiles.stop, tiles.home, tiles.worker, strict=True
    ):
        stayed[slot, shard, start:stop] = home == worker
    assert 0 < stayed.sum() < 2 * 48  # some tiles moved
    for slot in range(2):
        part = plan.worker_plan(slot)
        whole = sum(
            int(np.cumprod(stayed[slot, :, start:stop].all(axis=0)).sum())
            for start, stop in samples[slot]
        )
        assert part.local.query.num_rows == whole
        assert part.near.query.num_rows == int(stayed[slot].sum()) - 2 * whole


@pytest.mark.parametrize("seed", range(4))
def test_near_rows_stay_in_their_slot_and_far_rows_leave_it(seed):
    for plan in random_pools(seed, 4, num_workers=4):
        slot = np.arange(plan.num_workers) // plan.context_parallel_size
        same = slot[:, None] == slot
        for rows in (plan.near.query_rows, plan.near.kv_rows):
            assert not rows[~same].any()
        for rows in (plan.far.query_rows, plan.far.kv_rows):
            assert not rows[same].any()


@pytest.mark.parametrize("seed", range(4))
def test_late_work_is_at_most_half_and_only_where_something_is_exchanged(seed):
    for plan in random_pools(seed, 4, num_workers=4):
        for worker in range(plan.num_workers):
            part = plan.worker_plan(worker)
            pairs = [_pairs(r) for r in part.local.rounds]
            early = sum(pairs[: part.local.num_early_rounds])
            assert sum(pairs) - early <= early
            sent = [x.query.send_count.sum() for x in (part.near, part.far)]
            if not (part.near.rounds or part.far.rounds or sum(sent)):
                assert part.local.num_early_rounds == len(part.local.rounds)


def test_who_gives_and_who_takes_keep_equally_much_for_the_end():
    """Slot 0 gives away a third of its samples; what it computes last is half of what slot 1 has at
    home."""
    config = LibraConfig(pool_size=2, block_size=64, chunks=1, load_slack=0.0)
    plan = plan_pool([[64] * 60, [64] * 20], context_parallel_size=1, shape=SHAPE, config=config)
    late, whole = [], []
    for worker in (0, 1):
        local = plan.worker_plan(worker).local
        pairs = [_pairs(r) for r in local.rounds]
        late.append(sum(pairs[local.num_early_rounds :]))
        whole.append(sum(pairs))
    assert whole[0] == 2 * whole[1]
    assert late[0] == late[1] == whole[1] / 2


def _pairs(plan_round):
    queries, keys = np.diff(plan_round.cu_queries), np.diff(plan_round.cu_keys)
    return int((queries * keys - queries * (queries - 1) // 2).sum())
