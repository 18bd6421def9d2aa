"""Layer 1: in which part of a layer a query range is computed; by hand, then on random pools."""

from dataclasses import replace

import numpy as np
import pytest

from megatron_libra import AttentionShape, LibraConfig, plan_pool
from megatron_libra.plan.check import check_plan
from megatron_libra.plan.errors import PlanError
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
            early, late = _halves(part)
            assert late <= early
            sent = [x.query.send_count.sum() for x in (part.near, part.far)]
            if not (part.near.rounds or part.far.rounds or sum(sent)):
                assert late == 0


def test_who_gives_and_who_takes_keep_equally_much_for_the_end():
    """Slot 0 gives away a third of its samples; what it computes last is half of what slot 1 has at
    home."""
    config = LibraConfig(pool_size=2, block_size=64, chunks=1, load_slack=0.0)
    plan = plan_pool([[64] * 60, [64] * 20], context_parallel_size=1, shape=SHAPE, config=config)
    (early_0, late_0), (early_1, late_1) = (_halves(plan.worker_plan(w)) for w in (0, 1))
    assert early_0 + late_0 == 2 * (early_1 + late_1)
    assert late_0 == late_1 == early_1
    assert not plan.local.late_kv_heads.any()


def test_a_worker_with_one_sample_keeps_kv_heads_for_the_end():
    """Slot 1 has one sample: half of its kv heads are late. Slot 0, whose samples can be divided,
    keeps as much; with a single kv head nothing can be divided."""
    config = LibraConfig(pool_size=2, block_size=64, chunks=1, load_slack=0.0)
    sequences = [[64] * 60, [286]]
    plan = plan_pool(sequences, context_parallel_size=1, shape=SHAPE, config=config)
    assert plan.local.late_kv_heads.tolist() == [0, SHAPE.kv_heads // 2]
    (_, late_0), (early_1, late_1) = (_halves(plan.worker_plan(w)) for w in (0, 1))
    assert early_1 == late_1 and abs(late_0 - late_1) < 64 * 65 * SHAPE.kv_heads
    single = AttentionShape(query_heads=2, kv_heads=1, head_dim=8)
    plan = plan_pool(sequences, context_parallel_size=1, shape=single, config=config)
    assert plan.local.late_kv_heads.tolist() == [0, 0]
    assert plan.worker_plan(1).local.num_early_rounds == len(plan.worker_plan(1).local.rounds) == 1


@pytest.mark.parametrize("kv_heads", [2, 3, 7, 8])
def test_late_heads_are_at_most_half(kv_heads):
    shape = AttentionShape(query_heads=kv_heads, kv_heads=kv_heads, head_dim=8)
    config = LibraConfig(pool_size=2, block_size=64, chunks=1, load_slack=0.0)
    plan = plan_pool([[64] * 60, [286]], context_parallel_size=1, shape=shape, config=config)
    assert plan.local.late_kv_heads.tolist() == [0, kv_heads // 2]
    tampered = replace(plan, local=replace(plan.local, late_kv_heads=np.array([0, kv_heads - 1])))
    if kv_heads > 2:
        with pytest.raises(PlanError, match="more late than early heads"):
            check_plan(tampered)


def test_a_long_start_that_stays_keeps_few_kv_heads():
    """Slot 0 computes the start of one long sample, far more than slot 1 has at home: of its kv
    heads as many are late as come closest to half of slot 1's work."""
    shape = AttentionShape(query_heads=8, kv_heads=8, head_dim=8)
    config = LibraConfig(pool_size=2, block_size=32, chunks=1, load_slack=0.0)
    plan = plan_pool([[2000], [40] * 400], context_parallel_size=1, shape=shape, config=config)
    assert plan.local.late_kv_heads.tolist() == [1, 0]
    (early_0, late_0), (early_1, late_1) = (_halves(plan.worker_plan(w)) for w in (0, 1))
    step = (early_0 + late_0) / 8
    assert abs(late_0 - (early_1 + late_1) / 2) <= step / 2 + 40 * 41 * 8


def _halves(part):
    """Pairs x kv heads of the early and the late half of a worker's local part."""
    return [
        sum(_pairs(r) for r in rounds) * len(kv_heads)
        for rounds, kv_heads in part.local.halves(part.shape.kv_heads)
    ]


def _pairs(plan_round):
    queries, keys = np.diff(plan_round.cu_queries), np.diff(plan_round.cu_keys)
    return int((queries * keys - queries * (queries - 1) // 2).sum())
