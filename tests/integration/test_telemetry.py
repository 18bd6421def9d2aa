"""What an iteration reports: rows and sums by hand, collection over iterations, files."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.rows import LengthRows
from megatron_libra.data.sampler import ReplicaLayout, order_samples
from megatron_libra.integration.telemetry import (
    IterationReport,
    measure,
    order_imbalance,
    summarize,
)
from megatron_libra.plan.pool_plan import plan_pool

SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=8, bytes_per_element=2)


def test_measure_by_hand() -> None:
    """One sample of 8 tokens on 2 contiguous workers: 10 and 26 pairs; nothing moves but K and
    V."""
    config = LibraConfig(
        pool_size=1, block_size=4, chunks=1, head_split=2, placer="home", layout="contiguous"
    )
    plan = plan_pool([[8]], context_parallel_size=2, shape=SHAPE, config=config)
    total, largest, at_home, num_bytes, plan_ms, wait_ms = measure(plan, 3.0, 1.5)
    assert (total, largest, at_home, plan_ms, wait_ms) == (36, 26, 26, 3, 1.5)
    assert num_bytes == 4 * 2 * 2 * 8 * 2  # 4 tokens of K and V, 2 heads of 8 elements, 2 bytes


def test_pairs_do_not_depend_on_the_head_split() -> None:
    for head_split in (1, 2, 4):
        config = LibraConfig(pool_size=1, block_size=4, chunks=1, head_split=head_split)
        plan = plan_pool([[8]], context_parallel_size=2, shape=SHAPE, config=config)
        assert measure(plan, 0.0, 0.0)[0] == 36


def test_summary_by_hand() -> None:
    """Two pools of two workers, two microbatches."""
    rows = np.array(
        [
            # total, largest, largest at home, bytes, plan, wait
            [[40.0, 20, 30, 100, 4, 0.5], [60.0, 36, 48, 10, 4, 0.0]],
            [[80.0, 44, 60, 1, 9, 0.0], [20.0, 10, 10, 0, 4, 2.5]],
        ]
    )
    report = summarize(7, rows, 2, 0.25, {"lm loss": 3.0})
    assert report.inter_pool_imbalance_before == 0.25
    assert report.inter_pool_imbalance == pytest.approx(80 / 50 - 1)
    assert report.intra_pool_imbalance_before == pytest.approx((0.5 + 0.6 + 0.5 + 0) / 4)
    assert report.intra_pool_imbalance == pytest.approx((0 + 0.2 + 0.1 + 0) / 4)
    assert report.exchanged_bytes == 111
    assert report.straggler_pairs == 44 + 36
    assert report.step_straggler_pairs == max(20 + 36, 44 + 10)
    assert report.step_imbalance == 0
    assert report.mean_pairs == 50
    assert (report.plan_ms, report.plan_wait_ms) == (9, 2.5)
    assert report.line().startswith(
        " [libra] iteration        7 | inter-pool imbalance: 0.250 -> 0.600 (of the step 0.000)"
    )
    assert report.scalars()["straggler_pairs"] == 80 and "losses" not in report.scalars()


def test_an_iteration_without_work_is_balanced() -> None:
    report = summarize(1, np.zeros((2, 3, 6)), 4, 0.0, {})
    assert report.inter_pool_imbalance == report.intra_pool_imbalance == 0
    assert report.straggler_pairs == report.mean_pairs == 0


def test_imbalance_of_megatron_s_order() -> None:
    """Samples 0 1 | 2 3 would make pools of 9 + 4 and 4 + 1 squared tokens, whatever the order."""
    table = LengthRows.from_rows([[3], [2], [2], [1]])
    layout = ReplicaLayout(data_parallel_size=4, pool_size=2)
    window = order_samples(table, range(4), start=0, layout=layout)
    assert window.samples == (0, 3, 1, 2)
    assert order_imbalance(window) == pytest.approx(13 / 9 - 1)


def test_a_report_survives_its_json_line() -> None:
    report = summarize(3, np.ones((1, 1, 6)), 1, 0.0, {"lm loss": 2.5})
    line = json.loads(json.dumps(asdict(report)))
    assert line["iteration"] == 3 and line["losses"] == {"lm loss": 2.5}
    assert IterationReport(**line) == report


def test_a_hint_when_pools_stay_uneven() -> None:
    report = summarize(3, np.ones((1, 1, 6)), 1, 0.0, {})
    uneven = replace(report, intra_pool_imbalance=0.634)
    assert report.hint() is None
    assert "63% uneven" in str(uneven.hint()) and "--libra-head-split" in str(uneven.hint())
