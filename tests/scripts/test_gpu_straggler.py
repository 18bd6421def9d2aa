"""bench_straggler.py on the CPU: its arithmetic by hand, one pool and several through the executor,
and the simulator's figures of the same plans. Times mean nothing here."""

from __future__ import annotations

import argparse

import numpy as np
import pytest

from tests.scripts.gpu_scripts import dry_run, on_path


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    yield from on_path(monkeypatch)


@pytest.mark.slow
def test_a_straggler_has_bounds_of_pairs_and_of_time(tmp_path):
    flags = ("--presets", "longtail-256k", "--chunks", "2", "--seq-length", "4096", "2048")
    _, rows = dry_run("bench_straggler.py", tmp_path, *flags)
    assert [(row["seq_length"], row["layout"]) for row in rows] == [
        (size, layout) for size in (512, 1024) for layout in ("2x1", "1x2", "1x1")
    ]
    assert rows[0]["bound_pairs"] > 1.2 and rows[1]["bound_pairs"] == 1
    assert rows[2]["bound_pairs"] == rows[0]["bound_pairs"]
    for row in rows:
        times = {name: np.array(values) for name, values in row["times"].items()}
        assert {array.shape for array in times.values()} == {(2, 2)}
        straggler = {name: array.max(axis=1).sum() for name, array in times.items()}
        assert row["speedup"] == pytest.approx(straggler["ulysses"] / straggler["libra"])
        ideal = times["bare"].mean(axis=1).sum()
        assert row["share_time"] == pytest.approx(row["speedup"] * ideal / straggler["bare"])
        parts = {"kernels": "kernels", "compute": "compute", "layer": "libra"}
        for column, name in parts.items():
            assert row[column] == pytest.approx(straggler[name] / ideal)
        assert row["chunks"] == [2] and row["ideal_ms"] == pytest.approx(ideal)
        if row["layout"] == "1x1":
            assert row["exchange"] == row["hidden"] == row["ok"] == "none"
        else:
            assert row["exchange"] == pytest.approx(straggler["exchange"] / ideal)
            assert row["exchange"] > 0 and np.isfinite(row["hidden"])


@pytest.mark.slow
def test_several_pools_are_measured_and_predicted_side_by_side(tmp_path):
    layouts = ("2x1", "1x1")
    flags = ("--presets", "longtail-256k", "--workers", "4", "--layouts", *layouts)
    text, rows = dry_run("bench_straggler.py", tmp_path, *flags)
    assert [row["layout"] for row in rows] == list(layouts)
    for row in rows:
        assert {np.array(values).shape for values in row["times"].values()} == {(2, 4)}
        for name in ("ulysses_ms", "libra_ms", "speedup"):
            error = 100 * (row[f"predicted_{name}"] / row[name] - 1)
            assert row[f"error_{name}"] == pytest.approx(error)
        assert row["cost_model"] == "h200-fa4"
    # the same packs in the same order, on replicas that exchange nothing
    assert rows[0]["predicted_ulysses_ms"] == pytest.approx(rows[1]["predicted_ulysses_ms"])
    assert "predicted by the simulator" in text


def test_predictions_are_of_the_slowest_pool():
    """Two workers of different pools, two microbatches; seconds of ulysses and libra."""
    from bench_straggler import prediction

    measured = {"ulysses_ms": 6000.0, "libra_ms": 4000.0, "speedup": 1.5}
    seconds = [[[3.0, 2.0], [1.0, 1.0]], [[1.0, 1.0], [2.0, 0.5]]]
    found = prediction(measured, np.array(seconds))
    assert (found["predicted_ulysses_ms"], found["predicted_libra_ms"]) == (5000, 3000)
    assert found["predicted_speedup"] == pytest.approx(5 / 3)
    assert found["error_libra_ms"] == -25
    assert found["error_speedup"] == pytest.approx(100 / 9)


def test_what_a_layer_waits_for_is_of_each_turn_s_slowest_workers():
    """Two workers, one microbatch after the other; by hand."""
    from bench_straggler import waited

    first = {"libra": [5.0, 7.0, 9.0], "compute": [4.0, 4.0, 4.0]}
    other = {"libra": [6.0, 6.0, 6.0], "compute": [5.0, 3.0, 5.0]}
    still = {"libra": [1.0, 1.0, 1.0], "compute": [1.0, 1.0, 1.0]}
    # differences 6 - 5, 7 - 4, 9 - 5; then nothing
    assert waited([[first, still], [other, still]]) == 3


def test_nothing_that_moves_hides_nothing():
    from bench_timing import hidden_share

    assert hidden_share(1.0, 4.0) == 0.75
    assert hidden_share(0.0, 0.0) == hidden_share(0.5, 0.0) == "none"


def test_a_prediction_is_the_simulator_s():
    from bench_prediction import pool_seconds

    from megatron_libra import AttentionShape, LibraConfig, plan_pool
    from megatron_libra.simulator.calibration import built_in
    from megatron_libra.simulator.cost_model import predict
    from megatron_libra.simulator.pool_work import PoolWork

    model = built_in("h200-fa4")
    shape = AttentionShape(query_heads=32, kv_heads=4, head_dim=128)

    def plan_of(pool_size, lengths, **choices):
        return plan_pool(
            lengths, context_parallel_size=1, shape=shape,
            config=LibraConfig(pool_size=pool_size, **choices), seq_length=32768,
        )  # fmt: skip

    alone = pool_seconds(plan_of(1, [[32768]]), model)
    lengths = [[32768], [1024] * 32]
    heavy = pool_seconds(plan_of(2, lengths, placer="ulysses"), model)
    assert heavy == pytest.approx(alone)
    shared = plan_of(2, lengths, backward_kv="refetch")
    forward, backward = pool_seconds(shared, model)
    assert forward < alone[0] and backward < alone[1]
    time = predict(PoolWork.of(shared, 8), model, refetch=True)
    assert (forward, backward) == (time.forward_s, time.backward_s)


def test_layouts_cover_every_factorization():
    from bench_windows import layouts_of

    heads = ["8q2kv16", "32q4kv128"]
    assert layouts_of(1, heads) == ["1x1"]
    assert layouts_of(2, heads) == ["2x1", "1x2", "1x1"]
    assert layouts_of(8, heads) == ["8x1", "4x2", "2x4", "1x8", "1x1", "2x1", "4x1"]
    assert layouts_of(6, heads) == ["6x1", "3x2", "1x1", "2x1", "3x1"], "CP 3 divides no heads"


@pytest.mark.parametrize("layout", ["5x1", "2", "0x2", "2x2x2", "axb", "2x3"])
def test_a_layout_that_does_not_fit_is_one_line(layout, capsys):
    from bench_windows import check_layout

    with pytest.raises(SystemExit):
        check_layout(layout, 6, ["8q2kv16"], argparse.ArgumentParser())
    assert f"layout ({layout})" in capsys.readouterr().err


def test_a_cost_model_that_is_not_there_is_one_line(capsys, tmp_path):
    from bench_prediction import add_cost_model, cost_model_of

    parser = argparse.ArgumentParser()
    add_cost_model(parser)
    assert cost_model_of(parser.parse_args([]), parser).name == "h200-fa4"
    args = parser.parse_args(["--cost-model", str(tmp_path / "mine.json")])
    with pytest.raises(SystemExit):
        cost_model_of(args, parser)
    assert "mine.json" in capsys.readouterr().err
