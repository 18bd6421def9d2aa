"""Layer 1: a whole plan by hand, invariants on random pools, tampered plans, digests, size and
speed.
"""

import json
import subprocess
import sys
import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_libra import AttentionShape, LibraConfig, PoolPlan, plan_pool
from megatron_libra.plan.check import check_plan
from megatron_libra.plan.errors import PlanError

SHAPE = AttentionShape(query_heads=8, kv_heads=2, head_dim=16)


def plan(sequences, cp, seq_length, shape=SHAPE, **fields):
    config = LibraConfig(**{"pool_size": len(sequences), "chunks": 1, **fields})
    return plan_pool(
        sequences, context_parallel_size=cp, seq_length=seq_length, shape=shape, config=config
    )


@st.composite
def pools(draw):
    cp, slots = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    seq_length = 2 * cp * draw(st.integers(1, 40))
    sequences = []
    for _ in range(slots):
        lengths, left = [], seq_length
        for share in draw(st.lists(st.integers(0, 100), max_size=8)):
            lengths.append(left * share // 100)
            left -= lengths[-1]
        sequences.append(lengths)
    kv_heads = draw(st.sampled_from([1, 2, 4]))
    shape = AttentionShape(
        query_heads=kv_heads * draw(st.sampled_from([1, 2, 4])), kv_heads=kv_heads, head_dim=8
    )
    head_split = draw(st.sampled_from([d for d in (1, 2, 4, 8, 16) if shape.query_heads % d == 0]))
    width = shape.query_heads // head_split
    config = LibraConfig(
        pool_size=slots,
        block_size=draw(st.integers(1, seq_length + 3)),
        head_split=head_split,
        chunks=draw(st.sampled_from([d for d in (1, 2, 4, 8) if width % d == 0])),
        placer=draw(st.sampled_from(["home_first", "paper", "home"])),
        kv_fetch=draw(st.sampled_from(["prefix", "group"])),
        layout=draw(st.sampled_from(["zigzag", "contiguous"])),
    )
    return sequences, cp, shape, config, seq_length


@settings(max_examples=150, deadline=None)
@given(pools())
def test_every_plan_keeps_every_invariant(pool):
    sequences, cp, shape, config, seq_length = pool
    result = plan_pool(
        sequences, context_parallel_size=cp, shape=shape, config=config, seq_length=seq_length
    )
    check_plan(result)
    pairs = sum(x * (x + 1) // 2 for row in sequences for x in row) * config.head_split
    assert int(result.loads.sum()) == pairs
    assert PoolPlan.from_bytes(result.to_bytes()) == result


def test_whole_plan_by_hand():
    result = plan(
        [[8], [2, 2]],
        1,
        8,
        shape=AttentionShape(query_heads=1, kv_heads=1, head_dim=4),
        placer="home_first",
        block_size=2,
        load_slack=0.0,
    )
    # C = 21; worker 0 sheds the tile with the most pairs per byte
    assert result.tiles.pairs.tolist() == [3, 7, 11, 15, 3, 3]
    assert result.tiles.home.tolist() == [0, 0, 0, 0, 1, 1]
    assert result.tiles.worker.tolist() == [0, 0, 0, 1, 1, 1]
    assert result.loads.tolist() == [21, 21]
    # to worker 1: two queries, eight keys with values; back: two outputs; rows of 4 x 2 bytes
    assert result.traffic_bytes.tolist() == [[0, (2 + 2 * 8) * 8], [2 * 8, 0]]
    worker = result.worker_plan(1)
    assert worker.near.rounds == ()
    assert [r.cu_queries.tolist() for r in worker.far.rounds] == [[0, 2]]
    assert [r.cu_keys.tolist() for r in worker.far.rounds] == [[0, 8]]
    # its own two samples need nobody: one is computed first, the other last
    local = worker.local
    assert local.num_early_rounds == 1
    assert [(r.query_start, r.query_stop) for r in local.rounds] == [(0, 2), (2, 4)]
    assert [(r.key_start, r.key_stop) for r in local.rounds] == [(0, 2), (2, 4)]
    assert [r.cu_keys.tolist() for r in local.rounds] == [[0, 2], [0, 2]]
    # worker 0 keeps a prefix of its sample, one group of keys, which is not divided
    assert [r.cu_queries.tolist() for r in result.worker_plan(0).local.rounds] == [[0, 6]]


def test_a_pool_that_moves_nothing_is_all_local_and_early():
    result = plan([[4, 4], [8]], 1, 8, placer="home", block_size=8)
    for worker in (result.worker_plan(0), result.worker_plan(1)):
        assert worker.near.rounds == worker.far.rounds == () and len(worker.local.rounds) == 1
        assert worker.local.num_early_rounds == 1
    assert not result.traffic_bytes.any() and not result.query_rows.any()


def test_work_with_remote_keys_is_exchanged_and_the_rest_local():
    result = plan([[2, 6, 8]], 2, 16, placer="home", block_size=4, layout="contiguous")
    first, second = result.worker_plan(0), result.worker_plan(1)
    # worker 0 holds samples 0 and 1, worker 1 sample 2: nothing is exchanged
    assert first.near.rounds == second.near.rounds == ()
    result = plan([[2, 10, 4]], 2, 16, placer="home", block_size=4, layout="contiguous")
    first, second = result.worker_plan(0), result.worker_plan(1)
    assert first.near.rounds == () and [r.cu_queries.tolist() for r in first.local.rounds] == [
        [0, 2, 8]
    ]
    # tokens 6..9 of the middle sample meet keys of worker 0; the last sample meets none
    assert [r.cu_queries.tolist() for r in second.near.rounds] == [[0, 4]]
    assert [r.cu_keys.tolist() for r in second.near.rounds] == [[0, 10]]
    assert [r.cu_queries.tolist() for r in second.local.rounds] == [[0, 4]]


def test_distant_blocks_of_one_sample_need_two_rounds_and_a_filler():
    result = plan(
        [[8]],
        2,
        8,
        shape=AttentionShape(query_heads=1, kv_heads=1, head_dim=4),
        placer="home",
        block_size=2,
    )
    worker = result.worker_plan(0)  # zigzag: worker 0 holds 0 1 and 6 7
    assert [r.cu_queries.tolist() for r in worker.near.rounds] == [[0, 2]]
    assert [r.cu_keys.tolist() for r in worker.near.rounds] == [[0, 8]]
    assert [r.cu_keys.tolist() for r in worker.local.rounds] == [[0, 2]]
    # worker 2 holds positions 4 5 and 10 11 of a sample that starts elsewhere: two rounds
    result = plan([[2, 14]], 4, 16, shape=result.shape, placer="home", block_size=2)
    worker = result.worker_plan(2)
    rounds = worker.near.rounds
    assert worker.local.rounds == ()
    assert [r.cu_queries.tolist() for r in rounds] == [[0, 2], [0, 2, 2]]
    assert [r.cu_keys.tolist() for r in rounds] == [[0, 10], [0, 4, 10]]


def test_shards_that_share_a_kv_head_fetch_it_once():
    shape = AttentionShape(query_heads=4, kv_heads=1, head_dim=4)
    result = plan([[8], [1]], 1, 8, shape=shape, placer="paper", block_size=8, head_split=4,
                  load_slack=0.03)  # fmt: skip
    kv = result.far.kv
    assert (kv.source != kv.destination).all() and kv.count.sum() in (8, 0)
    check_plan(result)


@pytest.mark.parametrize(
    ("table", "column", "line"),
    [
        ("tiles", "worker", "loads differ"),
        ("tiles", "pairs", "miscounts"),
        ("tiles", "home", "away from its home"),
        ("query", "token", "queries|mixes samples|never or more"),
        ("query", "row", "arrives"),
        ("kv", "token", "keys|key twice|leaves its home"),
        ("kv", "count", "arrives|prefix|key|leaves its home"),
        ("entries", "num_keys", "keys|entry"),
    ],
)
def test_a_tampered_plan_is_found(table, column, line):
    result = plan([[17, 23], [7, 9]], 2, 40, placer="home", block_size=4, kv_fetch="group")
    part = result if table == "tiles" else result.near
    columns = getattr(part, table)
    values = getattr(columns, column).copy()
    values[1] += 1
    changed = replace(part, **{table: replace(columns, **{column: values})})
    tampered = changed if table == "tiles" else replace(result, near=changed)
    assert tampered.digest != result.digest
    with pytest.raises((PlanError, IndexError), match=line):
        check_plan(tampered)


def test_the_digest_is_the_same_in_another_process():
    code = (
        "from megatron_libra import AttentionShape, LibraConfig, plan_pool\n"
        "s = AttentionShape(query_heads=8, kv_heads=2, head_dim=16)\n"
        "c = LibraConfig(pool_size=2, block_size=16, chunks=1)\n"
        "print(plan_pool([[100, 9], [64]], context_parallel_size=2, shape=s, config=c).digest)"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert runs == {plan([[100, 9], [64]], 2, None, block_size=16).digest}


def test_plans_hash_compare_and_differ():
    one, same = (plan([[64], [8]], 2, 64, block_size=8) for _ in range(2))
    other = plan([[64], [9]], 2, 64, block_size=8)
    assert one == same and hash(one) == hash(same) and one != other


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"pool_size": 3}, r"sequences has 2 entries; pool_size \(3\)"),
        ({"head_split": 3}, r"head_split \(3\) must divide query_heads \(8\)"),
        ({"placer": "best"}, r"placer \('best'\) must be one of"),
        ({"block_size": 0}, r"block_size \(0\)"),
        ({"load_slack": -0.1}, r"load_slack \(-0.1\)"),
    ],
)
def test_bad_choices_get_one_line(fields, line):
    with pytest.raises(ValueError, match=line) as error:
        plan([[64], [8]], 2, 64, **fields)
    assert "\n" not in str(error.value)


def heavy_pool(seq_length, num_slots, seed):
    rng = np.random.default_rng(seed)
    sequences = [[seq_length]]
    while len(sequences) < num_slots:
        lengths = np.clip(np.exp(rng.normal(np.log(644), 1.78, 4000)), 1, seq_length).astype(int)
        packed = lengths[np.cumsum(lengths) <= seq_length].tolist()
        sequences.append([*packed, *[644] * ((seq_length - sum(packed)) // 644)])
    return sequences


@pytest.mark.parametrize("placer", ["paper", "home_first"])
def test_64_workers_and_2048_tiles_plan_within_100_ms_on_one_core(placer):
    sequences = heavy_pool(262144, 8, seed=1)
    shape = AttentionShape(query_heads=128, kv_heads=16, head_dim=256)
    fastest, deadline = np.inf, time.monotonic() + 30
    # other processes slow a core down, for seconds: it is the code that must not need more
    while fastest >= 0.1 and time.monotonic() < deadline:
        start = time.process_time()
        result = plan(
            sequences, 8, 262144, shape=shape, block_size=4096, head_split=4, placer=placer
        )
        fastest = min(fastest, time.process_time() - start)
    assert len(result.tiles.slot) >= 2048
    assert fastest < 0.1
    assert len(result.to_bytes()) < 1_000_000


def test_one_million_tokens_plan_in_memory_far_below_quadratic():
    code = (
        "import resource, json\n"
        "from megatron_libra import AttentionShape, LibraConfig, plan_pool\n"
        "n = 1 << 20\n"
        "s = AttentionShape(query_heads=128, kv_heads=4, head_dim=256)\n"
        "c = LibraConfig(pool_size=8, block_size=8192, head_split=4, chunks=4)\n"
        "base = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "p = plan_pool([[n]] + [[1000] * 1048] * 7, context_parallel_size=16, shape=s, config=c)\n"
        "peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "print(json.dumps([peak - base, len(p.to_bytes())]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
    )
    added_kib, plan_bytes = json.loads(done.stdout)
    assert added_kib < 400 * 1024
    assert plan_bytes < 1_000_000
