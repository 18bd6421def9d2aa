"""The kernel calls of the local part: every round has every head once, the early ones first."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from megatron_libra.config import AttentionShape
from megatron_libra.executor.local_calls import LocalCalls
from megatron_libra.plan.heads import HeadPartition, fits


def calls_of(shape: AttentionShape, chunks: int, num_early: int, late_heads: int) -> LocalCalls:
    """Of rounds a and b."""
    rounds: Any = ("a", "b")
    return LocalCalls.of(rounds, num_early, late_heads, HeadPartition.of(shape, 1, chunks))


def test_halves_by_hand() -> None:
    """4 query heads on 2 kv heads."""
    shape = AttentionShape(query_heads=4, kv_heads=2, head_dim=8)
    by_rounds = calls_of(shape, 1, 1, 0)
    (early,), (late,) = by_rounds.early, by_rounds.late
    assert (early.number, early.bound_round, early.query_heads) == (0, "a", slice(0, 4))
    assert (late.number, late.bound_round, late.kv_heads) == (1, "b", slice(0, 2))
    by_heads = calls_of(shape, 1, 2, 1)
    assert [(c.number, c.bound_round) for c in by_heads.early] == [(0, "a"), (1, "b")]
    assert {(c.query_heads.start, c.query_heads.stop) for c in by_heads.early} == {(0, 2)}
    assert [(c.number, c.bound_round) for c in by_heads.late] == [(2, "a"), (3, "b")]
    assert {(c.kv_heads.start, c.kv_heads.stop) for c in by_heads.late} == {(1, 2)}
    assert len(by_heads) == 4 and not by_heads.shares_kv


@pytest.mark.parametrize("heads", [(8, 4), (8, 8), (6, 3), (12, 2), (4, 1)])
def test_every_head_of_every_round_is_computed_once(heads: tuple[int, int]) -> None:
    shape = AttentionShape(query_heads=heads[0], kv_heads=heads[1], head_dim=8)
    ratio = heads[0] // heads[1]
    for chunks, late_heads in itertools.product(range(1, heads[0] + 1), range(heads[1])):
        if not fits(shape, 1, chunks):
            continue
        found = calls_of(shape, chunks, 2, late_heads)
        computed, started = [], []
        for call in (*found.early, *found.late):
            queries = range(call.query_heads.start, call.query_heads.stop)
            computed += [(call.bound_round, head) for head in queries]
            groups = sorted({head // ratio for head in queries})
            assert groups == list(range(call.kv_heads.start, call.kv_heads.stop))
            started += [(call.bound_round, group) for group in groups if call.is_first]
        assert sorted(computed) == [(r, head) for r in "ab" for head in range(heads[0])]
        assert sorted(started) == [(r, group) for r in "ab" for group in range(heads[1])]
        assert [c.number for c in (*found.early, *found.late)] == list(range(len(found)))
        late = {head for c in found.late for head in range(c.kv_heads.start, c.kv_heads.stop)}
        assert late == set(range(heads[1] - late_heads, heads[1]))
        assert found.shares_kv is (chunks > heads[1])
