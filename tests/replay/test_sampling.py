"""Which workers are measured first, and what their measurements do to the others."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_libra.replay.sampling import (
    WorkerTable,
    corrected,
    known_calls,
    measuring_order,
    model_error,
)
from megatron_libra.replay.workers import _stragglers

NAN = float("nan")


@pytest.fixture
def table() -> WorkerTable:
    """Method 0: microbatch 0 with pools 0 and 1, microbatch 1 with pool 2; method 1: pool 3, whose
    workers have equal calls."""
    pool = np.repeat([0, 1, 2, 3], 3)
    return WorkerTable(
        method=np.repeat([0, 0, 0, 1], 3),
        microbatch=np.repeat([0, 0, 1, 0], 3),
        pool=pool,
        worker=np.tile([0, 1, 2], 4),
        calls=np.array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 9, 9]),
        seconds=np.array([1.0, 5, 2, 4, 3, 6, 1, 1, 1, 2, 2, 2]),
        is_straggler=pool != 0,
    )


def test_ranks(table):
    assert table.rank.tolist() == [2, 0, 1, 1, 2, 0, 0, 1, 2, 0, 1, 2]


def test_a_work_is_a_straggler_of_any_of_its_microbatches():
    """Series, window, microbatch, pool, work: work 0 leads both microbatches of series 0 though it
    is listed with the first; work 2 leads series 1; works 1 and 3 lead nothing."""
    rows = np.array(
        [[0, 0, 0, 0, 1], [0, 0, 0, 1, 0], [0, 0, 1, 0, 0], [0, 0, 1, 1, 1], [1, 0, 0, 0, 2],
         [1, 0, 0, 1, 3]]
    )  # fmt: skip
    seconds = [np.array([1.0, 9]), np.array([5.0, 5]), np.array([3.0, 1]), np.array([2.0, 2])]
    assert _stragglers(rows, seconds).tolist() == [True, False, True, False]
    assert _stragglers(rows[:0], []).tolist() == []


def test_stragglers_come_first_then_other_heaviest(table):
    """Row 5 is the heaviest of microbatch 0, row 9 that of the other method, row 6 of the next
    microbatch; then the second of the heaviest pools, then the lighter pool."""
    assert measuring_order(table, heaviest=1, sample=0, seed=0).tolist() == [5, 9, 6, 1]
    assert measuring_order(table, heaviest=2, sample=0, seed=0).tolist() == [5, 9, 6, 3, 7, 1, 2]


def test_all_workers_once_each_for_equal_calls(table):
    order = measuring_order(table, heaviest=None, sample=0, seed=0)
    assert sorted(order.tolist()) == list(range(10))


def test_a_sample_is_drawn_for_each_method_and_stands_behind_the_stragglers(table):
    order = measuring_order(table, heaviest=0, sample=2, seed=3)
    methods = table.method[order].tolist()
    assert methods.count(0) == 2 and methods.count(1) == 1  # two of three equal ones
    again = measuring_order(table, heaviest=0, sample=2, seed=3)
    assert order.tolist() == again.tolist()
    both = measuring_order(table, heaviest=1, sample=2, seed=3)
    assert both[:3].tolist() == [5, 9, 6]


def test_measured_workers_count_and_the_others_are_scaled(table):
    predicted = np.stack([table.seconds, 2 * table.seconds], axis=1)
    measured = np.full_like(predicted, NAN)
    measured[5] = [9.0, 12]  # 1.5 and 1 times the prediction
    measured[9] = [1.0, 1]
    seconds = corrected(table, predicted, measured)
    assert seconds[5].tolist() == [9, 12]
    assert seconds[1].tolist() == [7.5, 10]
    assert seconds[9:].tolist() == [[1, 1]] * 3, "equal calls take equal time"


def test_a_method_without_a_measured_worker_takes_the_common_ratio(table):
    predicted = np.stack([table.seconds, table.seconds], axis=1)
    measured = np.full_like(predicted, NAN)
    measured[5] = 2 * predicted[5]
    seconds = corrected(table, predicted, measured, 1.5)
    assert seconds[:9].tolist() == (2 * predicted[:9]).tolist()
    assert seconds[9:].tolist() == (1.5 * predicted[9:]).tolist()
    assert np.flatnonzero(known_calls(table, measured)).tolist() == [5]
    measured[10] = 1.0
    assert np.flatnonzero(known_calls(table, measured)).tolist() == [5, 9, 10, 11]


def test_without_measurements_nothing_changes(table):
    predicted = np.stack([table.seconds, table.seconds], axis=1)
    nothing = np.full_like(predicted, NAN)
    assert corrected(table, predicted, nothing).tolist() == predicted.tolist()
    assert model_error(predicted, nothing) is None


def test_errors_of_the_model():
    predicted = np.array([[1.0, 1], [2, 2], [3, 3], [0, 0]])
    measured = np.array([[1.0, 1], [2, 3], [NAN, NAN], [0, 0]])
    error = model_error(predicted, measured)
    assert error.num_measured == 2
    assert error.worst == pytest.approx(0.2)
    assert error.median == pytest.approx(0.1)
    assert error.ratio == pytest.approx(7 / 6)
