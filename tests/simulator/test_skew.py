"""VRSP statistics, metrics and scaling by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.data.rows import LengthRows
from megatron_libra.plan.vrsp import order_window
from megatron_libra.simulator.candidates import Candidate
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.metrics import evaluate, step_seconds, straggler
from megatron_libra.simulator.pipeline import one_forward_one_backward, pipeline_seconds
from megatron_libra.simulator.replay import WindowReplay
from megatron_libra.simulator.scaling import scaling_points, scaling_sizes
from megatron_libra.simulator.skew import measure_windows, pool_skew, skew_tasks


def replay_of(forward: list[list[float]], **changes: float) -> WindowReplay:
    """A replay with forward times, backward twice that, and one value for everything else."""
    times = np.array(forward)
    values = dict(compute_s=0.0, imbalance=0.0, total_bytes=0.0, worker_bytes=0.0,
                  inter_node_bytes=0.0, resident_kv_bytes=0.0, tile_over_target=0.0)  # fmt: skip
    rest = {name: np.full(times.shape, value) for name, value in (values | changes).items()}
    return WindowReplay(forward_s=times, backward_s=2 * times, **rest)


def test_two_packs_a_pool_by_hand(job: TrainingJob) -> None:
    """Works 9 9 1 1, DP 2, P 2: pools 18 and 2 become 10 and 10. Ulysses waits for 9, then for 1;
    ideal pools take 5 and 5.
    """
    small = replace(job, data_parallel_size=2, global_batch_size=4)
    rows = LengthRows.from_rows([[3], [3], [1], [1]])
    keys = ((2, "microbatch"),)
    (task,) = skew_tasks(rows, small, keys, windows_per_task=5)
    (skew,) = pool_skew([measure_windows(task)], keys)
    assert skew.before.tolist() == pytest.approx([0.8])
    assert skew.after.tolist() == [0]
    assert skew.step_before.tolist() == skew.step_after.tolist() == [0]
    assert skew.limits() == pytest.approx((5 / 5, 9 / 5))


def test_step_scope_balances_sums(job: TrainingJob) -> None:
    """Works 9 9 1 1, DP 2, P 1: both replicas do 10 in a step, in microbatches of 9 and 1."""
    small = replace(job, data_parallel_size=2, global_batch_size=4)
    rows = LengthRows.from_rows([[3], [1], [3], [1]])
    keys = ((1, "off"), (1, "step"))
    off, step = pool_skew([measure_windows(t) for t in skew_tasks(rows, small, keys, 1)], keys)
    assert off.step_before.tolist() == off.step_after.tolist() == pytest.approx([0.8])
    assert step.step_after.tolist() == [0]
    assert step.before.tolist() == step.after.tolist() == pytest.approx([0.8])


def test_all_windows_equal_order_window(job: TrainingJob) -> None:
    """Split over tasks or not, the numbers are those of the order that a run uses."""
    rng = np.random.default_rng(3)
    rows = LengthRows.from_rows([rng.integers(1, 20, 3).tolist() for _ in range(8 * 5 + 3)])
    keys = tuple((size, scope) for size in (1, 2, 4) for scope in ("microbatch", "step"))
    parts = [measure_windows(task) for task in skew_tasks(rows, job, keys, windows_per_task=2)]
    found = pool_skew(parts, keys)
    for skew, (pool_size, scope) in zip(found, keys, strict=True):
        orders = [
            order_window(list(rows)[at : at + 8], pool_size=pool_size, data_parallel_size=4,
                         scope=scope)
            for at in range(0, 40, 8)
        ]  # fmt: skip
        assert skew.after.tolist() == pytest.approx([each.imbalance for each in orders])
        assert skew.step_after.tolist() == pytest.approx([each.step_imbalance for each in orders])
    subset = found[0].limits([1, 3])
    assert subset != found[0].limits() and min(subset) >= 1


@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({}, 24.0),  # groups do 2 * (1 + 3) = 8 and 6 forward, and twice that backward
        ({"lockstep": True}, 30.0),  # the longest of each GA index: 2 * (2 + 3)
        ({"pipeline_parallel_size": 2}, 19.0),  # one layer a stage: drawn in pipeline.py
        ({"other_ms": 500.0}, 25.0),  # half a second more for each microbatch
    ],
)
def test_step_seconds_by_hand(job: TrainingJob, changes: dict[str, float], seconds: float) -> None:
    two_layers = replace(job, num_layers=2, **changes)
    forward = np.array([[1.0, 2.0], [3.0, 1.0]])
    assert step_seconds(forward, 2 * forward, two_layers) == pytest.approx(seconds)


def test_one_forward_one_backward_by_hand() -> None:
    """F B are 0 1: stage 0 of 3 has two forwards ahead, the last stage none."""
    forwards = [(False, m) for m in range(4)]
    backwards = [(True, m) for m in range(4)]
    first = one_forward_one_backward(0, 3, 4)
    assert first == [*forwards[:3], backwards[0], forwards[3], *backwards[1:]]
    last = one_forward_one_backward(2, 3, 4)
    assert last == [op for pair in zip(forwards, backwards, strict=True) for op in pair]
    assert one_forward_one_backward(0, 8, 2) == [*forwards[:2], *backwards[:2]]


@pytest.mark.parametrize(("stages", "microbatches"), [(1, 5), (2, 2), (4, 3), (4, 9)])
def test_equal_microbatches_have_the_known_bubble(stages: int, microbatches: int) -> None:
    """(m + p - 1) times forward and backward of one; each group on its own."""
    times = np.ones((microbatches, 1)) * np.array([1.0, 3.0])
    found = pipeline_seconds(times, 2 * times, stages)
    assert found == pytest.approx((microbatches + stages - 1) * np.array([3.0, 9.0]))


def test_a_heavy_microbatch_stalls_the_pipeline() -> None:
    """The same work, 9 forward and 18 backward, on four stages: evenly, and with one of 4."""
    uneven = np.array([[1.0], [1.0], [4.0], [1.0], [1.0], [1.0]])
    even = np.full((6, 1), 1.5)
    slow, fast = (float(pipeline_seconds(x, 2 * x, 4)[0]) for x in (uneven, even))
    assert fast == pytest.approx((6 + 3) * 4.5)
    assert slow > 1.1 * fast


def test_metrics_by_hand(job: TrainingJob) -> None:
    """Layer times 3 6 / 9 3 and 3 3 / 3 3 against a reference of 6 12 / 18 6 in both windows."""
    own = [replay_of([[1, 2], [3, 1]], total_bytes=100.0, inter_node_bytes=25.0, compute_s=3.0,
                     imbalance=0.1, tile_over_target=0.5),
           replay_of([[1, 1], [1, 1]], total_bytes=300.0, inter_node_bytes=75.0, compute_s=3.0,
                     imbalance=0.3, tile_over_target=0.25)]  # fmt: skip
    reference = [replay_of([[2, 4], [6, 2]])] * 2
    result = evaluate(Candidate(2, 8, 1, 1, "microbatch", "paper"), own, reference, job)
    assert straggler(own, job).mean_s == pytest.approx((7.5 + 3) / 2)
    assert result.layer_ms == pytest.approx(5250)
    assert result.worst_layer_ms == pytest.approx((9 + 3) / 2 * 1e3)
    assert result.step_ms == pytest.approx((12 + 6) / 2 * 1e3)
    assert result.speedup_mean == pytest.approx(15 / 5.25)
    assert result.speedup_worst == pytest.approx(18 / 6)
    assert result.speedup_step == pytest.approx(24 / 9)
    assert (result.num_windows, result.num_pools) == (2, 8)
    assert (result.pool_bytes, result.sequence_bytes) == (200, 100)
    assert result.inter_node_share == pytest.approx(0.25)
    assert result.compute_share == pytest.approx(24 / (3 * 11))
    assert result.intra_imbalance == pytest.approx(0.2)
    assert (result.worst_intra_imbalance, result.tile_over_target) == (0.3, 0.5)
    assert (result.spread.least, result.spread.most) == pytest.approx((8 / 11, 24 / 11))
    assert result.spread.mean_ms == pytest.approx(11 / 8 * 1e3)


def test_scaling_by_hand(job: TrainingJob) -> None:
    """Eight sequences of 3 s, one of 24: with DP 4 the reference waits for 24 + 3 of 45."""
    sequences = replay_of([[8, 1, 1, 1], [1, 1, 1, 1]])
    balanced = {
        1: [replay_of([[8], [1], [1], [1], [1], [1], [1], [1]])],
        2: [replay_of([[5], [1], [1], [1]])],
        4: [replay_of([[2.0], [2.0]])],
    }
    points = scaling_points(job, 4, [sequences], balanced)
    assert [p.data_parallel_size for p in points] == [1, 2, 4] == scaling_sizes(job)
    assert [p.pool_size for p in points] == [1, 2, 4]
    assert [p.reference_step_ms for p in points] == pytest.approx([45e3, 33e3, 27e3])
    assert [p.reference_scaling for p in points] == pytest.approx([1, 45 / 33, 45 / 27])
    assert [p.scaling for p in points] == pytest.approx([1, 45 / 24, 45 / 12])


def test_sizes_divide_the_batch(job: TrainingJob) -> None:
    assert scaling_sizes(replace(job, data_parallel_size=6, global_batch_size=12)) == [1, 2, 4, 6]
