"""Layer 1: Algorithm 1 by hand and against a literal transcription; properties of both scopes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_libra import order_window
from megatron_libra.plan.vrsp import attention_work, exact_cardinality_lpt


def windows():
    return st.integers(1, 4).flatmap(
        lambda p: st.tuples(st.just(p), st.integers(1, 4), st.integers(1, 4))
    )


def literal_algorithm_1(work, pool_size):
    """Lines 3 to 13 with a linear scan in place of the heap."""
    pools = [[] for _ in range(len(work) // pool_size)]
    load = [0] * len(pools)
    for i in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        open_pools = [k for k in range(len(pools)) if len(pools[k]) < pool_size]
        k = min(open_pools, key=lambda k: (load[k], k))
        pools[k].append(i)
        load[k] += work[i]
    return pools


def test_by_hand():
    order = order_window([[3], [1, 1], [2, 1], [2]], pool_size=2, data_parallel_size=2)
    assert order.pools == ((0, 1), (2, 3))  # work 9 2 5 4
    assert order.order == (0, 1, 2, 3)
    assert order.imbalance == pytest.approx(11 / 10 - 1)


def test_ties_keep_sampler_order():
    order = order_window([[4]] * 8, pool_size=2, data_parallel_size=4)
    assert order.pools == ((0, 4), (1, 5), (2, 6), (3, 7))


@settings(max_examples=60, deadline=None)
@given(windows(), st.data())
def test_equals_the_literal_algorithm(sizes, data):
    pool_size, groups, steps = sizes
    count = pool_size * groups * steps
    work = data.draw(st.lists(st.integers(0, 50), min_size=count, max_size=count))
    assert exact_cardinality_lpt(work, groups * steps) == literal_algorithm_1(work, pool_size)


@settings(max_examples=60, deadline=None)
@given(windows(), st.sampled_from(["auto", "microbatch", "step", "pipeline"]), st.data())
def test_a_window_is_permuted_and_ga_major(sizes, scope, data):
    pool_size, groups, steps = sizes
    dp = pool_size * groups
    lengths = st.lists(st.integers(0, 9), max_size=3)
    window = data.draw(st.lists(lengths, min_size=dp * steps, max_size=dp * steps))
    order = order_window(window, pool_size=pool_size, data_parallel_size=dp, scope=scope)
    assert sorted(order.order) == list(range(len(window)))
    assert [len(pool) for pool in order.pools] == [pool_size] * (groups * steps)
    for ga in range(steps):
        for rank in range(dp):
            pool = order.pools[ga * groups + rank // pool_size]
            assert order.order[ga * dp + rank] == pool[rank % pool_size]


def test_step_scope_balances_the_sum_over_ga_where_pools_cannot_be_balanced():
    heavy = [[64]] * 4 + [[1] * 64] * 12  # four outliers, P = 1: no single pool can be balanced
    by_pool = order_window(heavy, pool_size=1, data_parallel_size=4, scope="microbatch")
    by_step = order_window(heavy, pool_size=1, data_parallel_size=4, scope="step")
    assert by_step.imbalance == by_pool.imbalance > 2
    assert by_step.step_imbalance == 0


def test_auto_is_step_only_without_pipeline_and_with_accumulation():
    def scope(pp, ga):
        return order_window(
            [[4]] * (2 * ga),
            pool_size=2,
            data_parallel_size=2,
            scope="auto",
            pipeline_parallel_size=pp,
        ).scope

    scopes = (scope(1, 4), scope(2, 4), scope(1, 1), scope(2, 1))
    assert scopes == ("step", "pipeline", "microbatch", "microbatch")


def test_pipeline_scope_has_the_pools_of_microbatch_and_matches_the_sums():
    window = [[8 * i] for i in range(1, 17)]
    order = {
        scope: order_window(window, pool_size=1, data_parallel_size=4, scope=scope)
        for scope in ("microbatch", "pipeline")
    }
    pools = {scope: sorted(map(sorted, each.pools)) for scope, each in order.items()}
    assert pools["pipeline"] == pools["microbatch"]
    assert order["pipeline"].imbalance == order["microbatch"].imbalance
    assert order["pipeline"].step_imbalance < 0.2 * order["microbatch"].step_imbalance


def test_work_is_the_sum_of_squares_and_exact():
    assert attention_work([3, 4]) == 25
    assert attention_work([2**20] * 3) == 3 * 2**40


@pytest.mark.parametrize(
    ("count", "fields", "line"),
    [
        (
            16,
            {"pool_size": 6, "data_parallel_size": 16},
            r"pool_size \(6\) must divide.*\(16\); try",
        ),
        (15, {"pool_size": 4, "data_parallel_size": 8}, r"15 entries.*multiple.*\(8\); try 16"),
        (0, {"pool_size": 1, "data_parallel_size": 1}, r"0 entries"),
        (8, {"pool_size": 0, "data_parallel_size": 8}, r"pool_size \(0\)"),
        (8, {"pool_size": 1, "data_parallel_size": 8, "scope": "all"}, r"scope \('all'\)"),
    ],
)
def test_bad_windows_get_one_line(count, fields, line):
    with pytest.raises(ValueError, match=line):
        order_window([[4]] * count, **fields)


@settings(max_examples=60, deadline=None)
@given(windows(), st.data())
def test_step_scope_is_never_less_balanced_than_algorithm_1(sizes, data):
    pool_size, groups, steps = sizes
    dp = pool_size * groups
    window = data.draw(
        st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=dp * steps, max_size=dp * steps)
    )
    ours, paper = (
        order_window(window, pool_size=pool_size, data_parallel_size=dp, scope=scope)
        for scope in ("step", "microbatch")
    )
    assert ours.step_imbalance <= paper.step_imbalance + 1e-12


def test_arrays_and_lists_are_ordered_alike():
    rng = np.random.default_rng(0)
    rows = [rng.integers(0, 50, rng.integers(0, 9)) for _ in range(16)]
    lists = [row.tolist() for row in rows]
    for scope in ("microbatch", "step", "pipeline"):
        orders = [
            order_window(window, pool_size=2, data_parallel_size=4, scope=scope)
            for window in (rows, lists, [*rows[:8], *lists[8:]])
        ]
        assert orders[0] == orders[1] == orders[2]
