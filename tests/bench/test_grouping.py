"""Placement rules by hand, on random work, and against the published numbers."""

from __future__ import annotations

from itertools import chain

import numpy as np
import pytest

from megatron_libra.bench.grouping import (
    eq_3,
    lpt_with_swap,
    pool_imbalance,
    swap,
    zigzag,
    zigzag_with_swap,
)
from megatron_libra.plan.vrsp import exact_cardinality_lpt


def test_zigzag_deals_forward_then_backward():
    assert zigzag([9, 5, 4, 2], 2) == [[0, 3], [1, 2]]
    assert zigzag([1, 6, 2, 5, 3, 4], 2) == [[1, 4, 2], [3, 5, 0]]


def test_a_swap_evens_out_two_pools():
    assert swap([8, 6, 3, 1], [[0, 1], [2, 3]]) == [[2, 1], [0, 3]]
    assert swap([5, 5], [[0], [1]]) == [[0], [1]]


@pytest.mark.parametrize("rule", [zigzag, zigzag_with_swap, exact_cardinality_lpt, lpt_with_swap])
@pytest.mark.parametrize("seed", range(5))
def test_rules_keep_the_batch_and_the_size_of_pools(rule, seed):
    work = np.random.default_rng(seed).lognormal(8, 2, 64).astype(np.int64)
    pools = rule(work.tolist(), 8)
    assert sorted(chain.from_iterable(pools)) == list(range(64))
    assert {len(pool) for pool in pools} == {8}


@pytest.mark.parametrize("seed", range(5))
def test_swaps_never_raise_the_heaviest_pool(seed):
    work = np.random.default_rng(seed).lognormal(8, 1, 64).astype(np.int64)
    dealt, swapped = (
        pool_imbalance(work[list(chain.from_iterable(rule(work.tolist(), 8)))], 8)
        for rule in (zigzag, zigzag_with_swap)
    )
    assert swapped < dealt


def test_eq_3():
    assert eq_3(2.0, 128, 8) == pytest.approx(2.0 / 8**0.5 * (2 * np.log(16)) ** 0.5)
    assert eq_3(2.0, 128, 128) == 0.0
