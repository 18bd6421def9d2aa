"""The end-to-end benchmarks on the CPU: two short trainings of real runs, and their arithmetic."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "scripts" / "gpu"


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(GPU))
    yield
    for path in GPU.glob("bench_*.py"):
        sys.modules.pop(path.stem, None)


@pytest.mark.slow
def test_both_are_trained_and_compared(tmp_path):
    command = [sys.executable, str(GPU / "bench_train.py"), "--device", "cpu", "--tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, "--out", str(tmp_path)], capture_output=True, text=True, env=environment,
        timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    assert [row.get("run") for row in rows] == [
        *("ulysses-dp2-cp1-pp1", "libra-dp2-cp1-pp1"), None
    ]  # fmt: skip
    assert all(len(row["losses"]) == len(row["elapsed_ms"]) == 3 for row in rows[:2])
    for row in rows[:2]:
        stages = list(row["startup_s"].values())
        assert len(stages) > 3 and stages[0] > 0 and stages == sorted(stages)
        assert stages[-1] + sum(row["elapsed_ms"]) / 1e3 < row["wall_s"]
    assert done.stdout.count("s before its iterations") == 2
    compared = rows[2]
    assert compared["max_loss_difference"] < 1e-4
    assert compared["speedup"] == pytest.approx(rows[1]["tokens_s"] / rows[0]["tokens_s"])
    assert compared["bound_flops"] > 1 and compared["bound_time"] > 1


def job_of(elapsed_ms: float, heaviest: int) -> dict:
    """A training of one step in which the mean worker has 1,000 pairs."""
    record = {"step_straggler_pairs": heaviest, "mean_pairs": 1000}
    return {"ms": elapsed_ms, "tokens_s": 1e6 / elapsed_ms, "losses": [2.0], "telemetry": [record]}


def test_the_bound_is_ulysses_without_what_is_above_the_mean():
    from bench_runs import CPU_MODEL
    from bench_train import compare

    args = SimpleNamespace(warmup=0, microbatches=2, seq_length=100, kernel="a", transport="b")
    done = {"ulysses": [job_of(30.0, 1500)], "libra": [job_of(25.0, 1010)]}
    found = compare(args, CPU_MODEL, done, {"ms_per_pair": 0.005}, layout=(2, 1, 1))
    # two layers of 0.005 ms a pair: the heaviest waits 5 ms above the mean, the mean computes 10
    assert found["bound_time"] == pytest.approx(30 / 25)
    assert found["share_time"] == pytest.approx(10 / 25)
    assert found["speedup"] == pytest.approx(30 / 25)
    dense, pair = 200 * CPU_MODEL.dense_flops, CPU_MODEL.attention_flops
    assert found["bound_flops"] == pytest.approx((dense + 1500 * pair) / (dense + 1000 * pair))


def test_flops_of_a_model():
    from bench_runs import CPU_MODEL

    # by hand: qkv and output 64 x (4 + 2 * 2 + 4) * 16, swiglu 3 x 64 x 128, output layer
    assert CPU_MODEL.dense_flops == 6 * (2 * (64 * 12 * 16 + 3 * 64 * 128) + 64 * 257)
    assert CPU_MODEL.attention_flops == 2 * (4 * 16 * 4) * 7 // 2


def test_the_benchmark_s_attention_is_most_of_the_work():
    from bench_runs import GPU_MODEL
    from bench_work import scaled_rows

    rows = scaled_rows("longtail-256k", 65536, 200, seed=0)
    pairs = np.mean([sum(n * (n + 1) // 2 for n in row) for row in rows])
    attention = pairs * GPU_MODEL.attention_flops
    assert attention / (attention + 65536 * GPU_MODEL.dense_flops) > 0.6


def test_documents_count_in_steps_and_end():
    from bench_runs import EOD, documents

    lengths = np.array([0, 1, 40, 2000])
    made = documents(lengths, np.random.default_rng(5))
    assert [len(tokens) for tokens in made] == (lengths + 1).tolist()
    for tokens in made:
        assert tokens.dtype == np.uint16 and tokens[-1] == EOD and (tokens[:-1] < EOD).all()
    steps = np.diff(made[3][:-1].astype(int)) % EOD
    share = np.bincount(steps).max() / len(steps)  # neither of two neighbours is noise
    assert 0.75 < share < 0.87
    assert not np.array_equal(made[2][:20], made[3][:20])


def test_efficiency_is_of_a_gpu_over_dp_1():
    from bench_scaling import per_gpu, sizes, spread

    sides = {"ulysses_tokens_s": 60.0, "libra_tokens_s": 90.0}
    base = {"ulysses_tokens_s_gpu": 20.0, "libra_tokens_s_gpu": 25.0}
    found = per_gpu({"dp": 2, "cp": 2, "pp": 1, **sides}, base)
    assert (found["ulysses_tokens_s_gpu"], found["libra_tokens_s_gpu"]) == (15, 22.5)
    assert (found["ulysses_efficiency"], found["libra_efficiency"]) == (0.75, 0.9)
    assert (sizes(1), sizes(6), sizes(8)) == ([1], [1, 2, 4], [1, 2, 4, 8])
    records = [{"inter_pool_imbalance": 0.5}, {"inter_pool_imbalance": 0.1}]
    assert spread(records) == pytest.approx(1.3)


def test_a_training_that_fails_shows_the_end_of_its_log(tmp_path, monkeypatch):
    import bench_runs

    monkeypatch.setattr(
        bench_runs.Run, "command", lambda self, folder: ["sh", "-c", "echo the reason; exit 3"]
    )
    run = bench_runs.Run(
        name="x", model=bench_runs.CPU_MODEL, gpus=1, context_parallel=1, pipeline_parallel=1,
        global_batch=1, seq_length=8, iterations=1, device="cpu", corpus=tmp_path, libra=(),
        connections="1",
    )  # fmt: skip
    with pytest.raises(bench_runs.RunFailed, match="ended with 3 after 0 iterations[^z]*reason"):
        run.train(tmp_path, 60)
    monkeypatch.setattr(bench_runs.Run, "command", lambda self, folder: ["sleep", "100"])
    with pytest.raises(bench_runs.RunFailed, match="took too long"):
        run.train(tmp_path, 0.1)
