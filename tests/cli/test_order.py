"""libra order: Algorithm 1 on a window small enough to do by hand."""

from __future__ import annotations

import pytest


def test_the_order_of_a_small_window(libra, write, window):
    """Works 81 2 64 4 34 16 49 36, four pools of two: heaviest first to the least loaded pool.

    81 64 49 36 open the pools; 34 joins 36 (70), 16 joins 49 (65),
    4 joins 64 (68), 2 joins 81 (83).
    """
    run = libra("order", write(window), "--json")
    answer = run.answer
    assert (run.code, run.err) == (0, "")
    assert answer["pools"] == [[0, 1], [2, 3], [6, 5], [7, 4]]
    assert answer["order"] == [0, 1, 2, 3, 6, 5, 7, 4]
    assert answer["imbalance"] == pytest.approx(83 / 71.5 - 1)
    # Pools 0 and 2 are of the first worker group, 1 and 3 of the second: 148 and 138.
    assert answer["step_imbalance"] == pytest.approx(148 / 143 - 1)


def test_scope_step_balances_the_groups(libra, write, window):
    window["scope"] = "step"
    answer = libra("order", write(window), "--json").answer
    assert sorted(answer["order"]) == list(range(8))
    assert answer["scope"] == "step"
    # Never behind Algorithm 1, whose groups do 148 and 138.
    assert answer["step_imbalance"] <= 148 / 143 - 1 + 1e-12


@pytest.mark.parametrize(("stages", "scope"), [(1, "step"), (2, "pipeline")])
def test_scope_auto_follows_the_pipeline(libra, write, window, stages, scope):
    window |= {"scope": "auto", "pipeline_parallel_size": stages}
    assert libra("order", write(window), "--json").answer["scope"] == scope


def test_the_table_names_the_gain(libra, write, window):
    run = libra("order", write(window))
    assert run.code == 0
    # As given: 83, 68, 50, 85 of mean 71.5.
    assert f"{85 / 71.5 - 1:.4f} as given -> {83 / 71.5 - 1:.4f}" in run.out
