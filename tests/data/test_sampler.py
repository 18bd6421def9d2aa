"""The sampler: by hand, then as properties: no sample lost, resume, ranks agree, pools cover.

Equality with the order of Megatron's own samplers is in test_megatron.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_libra.data.rows import LengthRows
from megatron_libra.data.sampler import LibraSampler, ReplicaLayout, order_samples
from megatron_libra.data.schedule import parse_step_batch_size
from megatron_libra.plan.vrsp import order_window

SCOPES = ["off", "auto", "microbatch", "step"]


def table_of(num_samples: int, seed: int = 0) -> LengthRows:
    rng = np.random.default_rng(seed)
    return LengthRows.from_rows(
        [rng.integers(1, 1000, rng.integers(1, 5)).tolist() for _ in range(num_samples)]
    )


def samplers(table: LengthRows, layout: ReplicaLayout, **options: Any) -> list[LibraSampler]:
    """One for each data-parallel rank."""
    return [
        LibraSampler(table, layout, data_parallel_rank=rank, **options)
        for rank in range(layout.data_parallel_size)
    ]


def test_by_hand() -> None:
    """Work 81 25 16 4 with P = 2: 9 goes with 2, 5 with 4 (the example of plan.vrsp)."""
    table = LengthRows.from_flat([7, 9, 5, 4, 2])
    layout = ReplicaLayout(data_parallel_size=2, pool_size=2, scope="microbatch")
    first, second = samplers(table, layout, batch_size=4, consumed_samples=1)
    assert list(first) == [[1], [2]]
    assert list(second) == [[4], [3]]
    microbatch = next(first.microbatches())
    assert (microbatch.start, microbatch.ga_index, microbatch.sample) == (1, 0, 1)
    assert (microbatch.pool, microbatch.sequences) == ((1, 4), ((9,), (2,)))


def test_the_window_is_ordered_as_vrsp_says() -> None:
    table = table_of(16)
    layout = ReplicaLayout(data_parallel_size=4, pool_size=2, scope="step")
    window = order_samples(table, range(16), start=0, layout=layout)
    expected = order_window(list(table), pool_size=2, data_parallel_size=4, scope="step")
    assert window.samples == expected.order
    pools = [window.microbatch(ga, rank).pool for ga in range(4) for rank in (0, 2)]
    assert tuple(pools) == expected.pools
    assert window.num_microbatches == 4


def test_scope_auto_passes_the_pipeline_size_on() -> None:
    table = table_of(16, seed=3)
    orders = {
        pipeline: next(
            LibraSampler(
                table,
                ReplicaLayout(data_parallel_size=4, pool_size=2, pipeline_parallel_size=pipeline),
                data_parallel_rank=0,
                batch_size=16,
            ).windows()
        ).samples
        for pipeline in (1, 2)
    }
    rows = list(table)
    for pipeline, scope in ((1, "step"), (2, "pipeline")):
        expected = order_window(rows, pool_size=2, data_parallel_size=4, scope=scope)
        assert orders[pipeline] == expected.order


cases = st.tuples(
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2), (4, 4), (6, 3)]),  # DP, P
    st.integers(1, 4),  # GA
    st.integers(0, 60),  # consumed
    st.integers(1, 60),  # samples behind it
    st.sampled_from(SCOPES),
)


@given(cases)
def test_every_step_holds_megatrons_samples(case: Any) -> None:
    """A step takes [consumed, consumed + GBS) in any order; a tail of less than DP is dropped."""
    (size, pool_size), num_microbatches, consumed, left, scope = case
    table = table_of(consumed + left)
    layout = ReplicaLayout(data_parallel_size=size, pool_size=pool_size, scope=scope)
    batch_size = size * num_microbatches
    ranks = samplers(table, layout, batch_size=batch_size, consumed_samples=consumed)
    yielded = [list(sampler) for sampler in ranks]
    assert [len(batches) for batches in yielded] == [left // size] * size
    assert [len(sampler) for sampler in ranks] == [left // size] * size
    stop = consumed + left // size * size
    for start in range(consumed, stop, batch_size):
        steps = slice((start - consumed) // size, (start - consumed) // size + num_microbatches)
        taken = Counter(index for batches in yielded for (index,) in batches[steps])
        assert taken == Counter(range(start, min(start + batch_size, stop)))


@given(cases)
def test_ranks_of_a_pool_agree_and_each_knows_its_slot(case: Any) -> None:
    (size, pool_size), num_microbatches, consumed, left, scope = case
    table = table_of(consumed + left)
    layout = ReplicaLayout(data_parallel_size=size, pool_size=pool_size, scope=scope)
    ranks = samplers(table, layout, batch_size=size * num_microbatches, consumed_samples=consumed)
    for step in zip(*(sampler.microbatches() for sampler in ranks), strict=True):
        for rank, microbatch in enumerate(step):
            first = rank - rank % pool_size
            assert microbatch.pool == tuple(step[first + slot].sample for slot in range(pool_size))
            assert microbatch.pool[rank % pool_size] == microbatch.sample
            assert microbatch.sequences == tuple(map(table.lengths, microbatch.pool))


@given(cases, st.integers(0, 10))
def test_resume_at_a_step_continues_exactly(case: Any, steps: int) -> None:
    (size, pool_size), num_microbatches, consumed, left, scope = case
    table = table_of(consumed + left)
    layout = ReplicaLayout(data_parallel_size=size, pool_size=pool_size, scope=scope)
    options: dict[str, Any] = {
        "data_parallel_rank": size - 1,
        "batch_size": size * num_microbatches,
    }
    resumed_at = consumed + steps * size * num_microbatches
    whole = list(LibraSampler(table, layout, consumed_samples=consumed, **options).microbatches())
    if resumed_at < consumed + left:
        resumed = LibraSampler(table, layout, consumed_samples=resumed_at, **options)
        assert list(resumed.microbatches()) == whole[steps * num_microbatches :]


def test_a_step_begins_wherever_training_stopped() -> None:
    """A count inside a window of the old batch size: the new step is [consumed, consumed + GBS)."""
    table = table_of(64)
    layout = ReplicaLayout(data_parallel_size=2, pool_size=2)
    windows = LibraSampler(
        table, layout, data_parallel_rank=0, batch_size=16, consumed_samples=10
    ).windows()
    assert [(w.start, sorted(w.samples)) for w in windows] == [
        (10, list(range(10, 26))),
        (26, list(range(26, 42))),
        (42, list(range(42, 58))),
        (58, list(range(58, 64))),
    ]


def test_iterators_are_independent() -> None:
    """A planner reads ahead without moving the loader; each iteration begins at the start."""
    sampler = LibraSampler(
        table_of(24),
        ReplicaLayout(data_parallel_size=2, pool_size=2),
        data_parallel_rank=1,
        batch_size=8,
    )
    ahead = list(sampler.microbatches())
    assert [[microbatch.sample] for microbatch in ahead] == list(sampler) == list(sampler)


def test_the_batch_size_follows_consumed_samples() -> None:
    schedule = parse_step_batch_size("0:4 10:8")
    sampler = LibraSampler(
        table_of(40),
        ReplicaLayout(data_parallel_size=2, pool_size=1),
        data_parallel_rank=0,
        batch_size=schedule,
    )
    starts = [(window.start, len(window.samples)) for window in sampler.windows()]
    assert starts == [(0, 4), (4, 4), (8, 4), (12, 8), (20, 8), (28, 8), (36, 4)]
    resumed = LibraSampler(
        table_of(40),
        ReplicaLayout(data_parallel_size=2, pool_size=1),
        data_parallel_rank=0,
        batch_size=schedule,
        consumed_samples=20,
    )
    assert list(resumed) == list(sampler)[10:]


def test_scope_off_keeps_the_order() -> None:
    layout = ReplicaLayout(data_parallel_size=4, pool_size=2, scope="off")
    assert list(samplers(table_of(12), layout, batch_size=8)[2]) == [[2], [6], [10]]


def test_tail_reuse_gives_every_replica_the_same_number() -> None:
    layout = ReplicaLayout(data_parallel_size=4, pool_size=4, scope="off")
    ranks = samplers(table_of(6), layout, batch_size=4, tail="reuse")
    assert [list(sampler) for sampler in ranks] == [[[0], [4]], [[1], [5]], [[2], [2]], [[3], [3]]]
    assert [len(sampler) for sampler in ranks] == [2] * 4
    with pytest.raises(ValueError, match=r"has 3 samples, fewer than data_parallel_size \(4\)"):
        samplers(table_of(3), layout, batch_size=4, tail="reuse")


def test_a_balanced_step_is_better_than_megatrons() -> None:
    """What it is for: a lighter heaviest pool (no outlier is as heavy as a pool here)."""
    lengths = np.random.default_rng(1).lognormal(5, 0.6, 64).astype(int) + 1
    table = LengthRows.from_flat(lengths)

    def heaviest(scope: Any) -> int:
        layout = ReplicaLayout(data_parallel_size=16, pool_size=4, scope=scope)
        window = order_samples(table, range(64), start=0, layout=layout)
        work = np.array([sum(x * x for x in row) for row in window.sequences])
        return int(work.reshape(-1, 4).sum(axis=1).max())

    assert heaviest("microbatch") < 0.8 * heaviest("off")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"consumed_samples": 8}, r"consumed_samples \(8\) must be in \[0, 8\)"),
        ({"consumed_samples": -1}, r"consumed_samples \(-1\)"),
        ({"data_parallel_rank": 2}, r"data_parallel_rank \(2\) must be in \[0, 2\)"),
        ({"batch_size": 0}, r"batch sizes \(0,\) must be at least 1"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    layout = ReplicaLayout(data_parallel_size=2, pool_size=2)
    with pytest.raises(ValueError, match=message):
        LibraSampler(table_of(8), layout, **{"data_parallel_rank": 0, "batch_size": 2} | options)


def test_a_batch_that_replicas_cannot_share_is_refused() -> None:
    sampler = LibraSampler(
        table_of(20),
        ReplicaLayout(data_parallel_size=4, pool_size=2),
        data_parallel_rank=0,
        batch_size=lambda consumed: 8 if consumed < 8 else 10,
    )
    with pytest.raises(ValueError, match=r"batch_size \(10\) at 8 consumed samples must be a mult"):
        list(sampler)


def test_bad_layouts() -> None:
    with pytest.raises(ValueError, match=r"micro_batch_size \(2\) must be 1.*raise seq_length"):
        ReplicaLayout(data_parallel_size=2, pool_size=2, micro_batch_size=2)
    with pytest.raises(ValueError, match=r"pool_size \(3\) must divide data_parallel_size \(4\)"):
        ReplicaLayout(data_parallel_size=4, pool_size=3)
