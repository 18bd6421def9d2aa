"""The end-to-end benchmarks on the CPU: two short trainings of real runs, and their arithmetic."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.scripts.gpu_scripts import GPU, ROOT, dry_run, on_path

FLAGS = ("--nproc-per-node", "--global-batch-size", "--num-attention-heads")


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    yield from on_path(monkeypatch)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dense", "moe"])
def test_both_are_trained_and_compared(tmp_path, name):
    text, rows = dry_run("bench_train.py", tmp_path, "--model", name)
    assert [row.get("run") for row in rows] == [
        *("ulysses-dp2-cp1-pp1", "libra-dp2-cp1-pp1"), None
    ]  # fmt: skip
    assert all(len(row["losses"]) == len(row["elapsed_ms"]) == 3 for row in rows[:2])
    for row in rows[:2]:
        stages = list(row["startup_s"].values())
        assert len(stages) > 3 and stages[0] > 0 and stages == sorted(stages)
        assert stages[-1] + sum(row["elapsed_ms"]) / 1e3 < row["wall_s"]
    assert text.count("s before its iterations") == 2
    log = (tmp_path / rows[0]["run"] / "train.log").read_text()
    shown = dict(re.findall(r"(num_experts|recompute_granularity|moe_grouped_gemm) \.+ (\w+)", log))
    experts = "4" if name == "moe" else "None"
    assert shown == {
        "num_experts": experts, "recompute_granularity": "full", "moe_grouped_gemm": "False"
    }  # fmt: skip
    compared = rows[2]
    assert compared["max_loss_difference"] < 1e-4
    assert compared["speedup"] == pytest.approx(rows[1]["tokens_s"] / rows[0]["tokens_s"])
    assert compared["bound_flops"] > 1 and compared["bound_time"] > 1


def job_of(elapsed_ms: float, heaviest: int) -> dict:
    """A training of one step in which the mean worker has 1,000 pairs."""
    record = {"step_straggler_pairs": heaviest, "mean_pairs": 1000}
    return {"ms": elapsed_ms, "tokens_s": 1e6 / elapsed_ms, "losses": [2.0], "telemetry": [record]}


def test_the_bound_is_ulysses_without_what_is_above_the_mean():
    from bench_models import MODELS
    from bench_train import compare

    model = MODELS["small"].tiny
    args = SimpleNamespace(warmup=0, microbatches=2, seq_length=100, kernel="a", transport="b")
    done = {"ulysses": [job_of(30.0, 1500)], "libra": [job_of(25.0, 1010)]}
    rate = {"ms_per_pair": 0.005, "forward_ms_per_pair": 0.001}
    found = compare(args, model, done, rate, layout=(2, 1, 1))
    # two layers of 0.005 ms a pair: the heaviest waits 5 ms above the mean, the mean computes 10
    assert found["bound_time"] == pytest.approx(30 / 25)
    assert found["share_time"] == pytest.approx(10 / 25)
    assert found["speedup"] == pytest.approx(30 / 25)
    dense, pair = 200 * model.dense_flops, model.attention_flops
    assert found["bound_flops"] == pytest.approx((dense + 1500 * pair) / (dense + 1000 * pair))
    # a second forward: 0.006 ms a pair
    again = compare(args, replace(model, recompute=True), done, rate, layout=(2, 1, 1))
    assert again["share_time"] == pytest.approx(12 / 25)
    assert again["bound_time"] == pytest.approx(30 / 24)


def test_losses_differ_beside_what_ulysses_differs_from_itself():
    from bench_models import MODELS
    from bench_train import compare

    args = SimpleNamespace(warmup=0, microbatches=2, seq_length=100, kernel="a", transport="b")
    first, second, third, ours = (
        job_of(30.0, 1500) | {"losses": losses}
        for losses in ([2.0, 1.0], [2.0, 1.25], [1.875, 1.0], [2.5, 1.0])
    )
    done = {"ulysses": [first, second, third], "libra": [ours]}
    found = compare(args, MODELS["small"].tiny, done, {}, layout=(2, 1, 1))
    assert found["max_loss_difference"] == 0.5
    assert found["ulysses_loss_difference"] == 0.25
    alone = compare(args, MODELS["small"].tiny, done | {"ulysses": [first]}, {}, layout=(2, 1, 1))
    assert alone["ulysses_loss_difference"] == "none"


def test_megatron_s_second_time_is_the_mean_of_two():
    """Read in its log at --log-interval 1: 1168, 720 and 237 ms of iterations of 1168, 272, 237."""
    from bench_runs import each_ms

    assert each_ms([1168.0, 720.0, 237.0]) == [1168.0, 272.0, 237.0]
    assert each_ms([5.0]) == [5.0] and each_ms([]) == []


@pytest.mark.parametrize(
    "flag, size, line",
    [
        ("--gpus", "0", "--gpus (0) must be at least 1."),
        ("--context-parallel", "0", "--context-parallel (0) must be at least 1."),
        ("--context-parallel", "4", "--context-parallel (4) must divide the 2 GPUs."),
        ("--warmup", "-1", "--warmup (-1) must be at least 0."),
        ("--turns", "0", "--turns (0) must be at least 1."),
        ("--layers", "0", "--layers (0) must be at least 1."),
        ("--seconds", "-1", "--seconds (-1.0) must be at least 1."),
    ],
)
def test_sizes_that_cannot_be_are_refused(capsys, flag, size, line):
    from bench_train import flags, settle

    parser = flags("", 1, turns=1)
    args = parser.parse_args(["--device", "cpu", "--gpus", "2", flag, size])
    with pytest.raises(SystemExit, match="2"):
        settle(args, parser)
    assert capsys.readouterr().err.splitlines()[-1].endswith(f"error: {line}")


@pytest.mark.parametrize("script", ["bench_train.py", "bench_scaling.py"])
def test_nothing_is_begun_with_such_a_size(tmp_path, script):
    out = tmp_path / "new"
    command = [sys.executable, str(GPU / script), "--device", "cpu", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, "--gpus", "0"], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 2 and "--gpus (0) must be at least 1." in done.stderr
    assert not out.exists()


def test_a_line_that_a_killed_run_left_costs_no_other(tmp_path, capsys):
    from bench_common import append, read_rows

    file = tmp_path / "scaling.jsonl"
    file.write_text('{"dp": 1}\n{"dp": 2, "c')
    append(file, {"dp": 4})
    assert [row["dp"] for row in read_rows(file)] == [1, 4]
    assert capsys.readouterr().out == f"{file}, line 2 is not whole: left out\n"


def test_flops_and_parameters_of_a_model():
    """By hand: qkv and output 64 x (4 + 2 * 2 + 4) * 16, swiglu 3 x 64 x 128, two vocabularies."""
    from bench_models import MODELS

    heads, mlp, vocabulary = 64 * 12 * 16, 3 * 64 * 128, 64 * 257
    small, dense, moe = (MODELS[name].tiny for name in ("small", "dense", "moe"))
    assert small.num_parameters == 2 * (heads + mlp) + 2 * vocabulary
    assert small.dense_flops == 6 * (2 * (heads + mlp) + vocabulary)
    assert small.attention_flops == 2 * (4 * 16 * 4) * 7 // 2
    # recomputed: every layer's forward twice, the output layer's once
    assert dense.num_parameters == small.num_parameters
    assert dense.dense_flops == 8 * 2 * (heads + mlp) + 6 * vocabulary
    assert dense.attention_flops == 2 * (4 * 16 * 4) * 9 // 2
    # four experts of which a token uses two, and a router
    assert moe.num_parameters == 2 * (heads + 4 * mlp + 64 * 4) + 2 * vocabulary
    assert moe.dense_flops == 8 * 2 * (heads + 2 * mlp + 64 * 4) + 6 * vocabulary
    assert moe.attention_flops == dense.attention_flops


@pytest.mark.parametrize("name", ["dense", "moe"])
def test_the_large_models_have_1_to_3_billion_parameters_and_fit(name):
    from bench_models import MODELS

    model = MODELS[name]
    assert 1e9 < model.num_parameters < 3e9
    assert (model.query_heads, model.kv_heads, model.head_dim) == (32, 4, 128)
    # weights, gradients, Adam; inputs of layers at 131,072 tokens: what the docstring says
    state = 18 * model.num_parameters / 2**30
    inputs = 131072 * 2 * model.hidden_size * model.num_layers / 2**30
    expected = {"dense": (18, 10), "moe": (24, 8)}
    assert (round(state), round(inputs)) == expected[name]


def test_the_default_s_attention_is_most_of_the_work():
    from bench_models import MODELS
    from bench_work import scaled_rows

    rows = scaled_rows("longtail-256k", 65536, 200, seed=0)
    pairs = np.mean([sum(n * (n + 1) // 2 for n in row) for row in rows])
    attention = pairs * MODELS["small"].attention_flops
    assert attention / (attention + 65536 * MODELS["small"].dense_flops) > 0.6


def test_sizes_on_the_command_line_replace_a_model_s():
    from bench_models import MODELS
    from bench_train import flags, settle

    def model_of(*words: str):
        parser = flags("", 1, turns=1)
        return settle(parser.parse_args(["--gpus", "2", *words]), parser)

    assert model_of() == MODELS["small"]
    given = model_of("--model", "moe", "--layers", "3", "--ffn", "640")
    assert given == replace(MODELS["moe"], num_layers=3, ffn_size=640)
    tiny = model_of("--device", "cpu", "--model", "dense", "--hidden", "128")
    assert tiny == replace(MODELS["dense"].tiny, hidden_size=128) and tiny.recompute


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


def test_a_training_that_fails_shows_the_end_of_its_log(tmp_path, monkeypatch):
    import bench_runs
    from bench_models import MODELS

    monkeypatch.setattr(
        bench_runs.Run, "command", lambda self, folder: ["sh", "-c", "echo the reason; exit 3"]
    )
    run = bench_runs.Run(
        name="x", model=MODELS["small"].tiny, gpus=1, context_parallel=1, pipeline_parallel=1,
        global_batch=1, seq_length=8, iterations=1, device="cpu", corpus=tmp_path, libra=(),
        connections="1",
    )  # fmt: skip
    with pytest.raises(bench_runs.RunFailed, match="ended with 3 after 0 iterations[^z]*reason"):
        run.train(tmp_path, 60)
    monkeypatch.setattr(bench_runs.Run, "command", lambda self, folder: ["sleep", "100"])
    with pytest.raises(bench_runs.RunFailed, match="took too long"):
        run.train(tmp_path, 0.1)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_every_number_of_gpus_divides_the_batch_of_the_loss_comparison(tmp_path, monkeypatch, gpus):
    """As replicas and as one context parallel group, whose heads ulysses shares out."""
    import train

    commands = []

    def pretend(command, **options):
        commands.append(command)
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(train.subprocess, "run", pretend)
    train.run("x", gpus, [], tmp_path, "pretrain_gpt.py")
    (words,) = commands
    value = {flag: int(words[words.index(flag) + 1]) for flag in words if flag in FLAGS}
    assert value["--nproc-per-node"] == gpus and value["--global-batch-size"] == 2 * gpus
    assert value["--num-attention-heads"] % gpus == 0
