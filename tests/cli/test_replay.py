"""libra replay: small corpora end to end, prepared files, measuring on the CPU, faults."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SIZES = ("--seq-length", 64, "--cp", 2, "--dp", 4, "--gbs", 8)
HEADS = ("--query-heads", 4, "--kv-heads", 2, "--head-dim", 8)
CHOICES = ("--pool-size", 2, "--block-size", 8, "--head-split", 2)
SMALL = (*SIZES, *HEADS, *CHOICES, "--seeds", 0, "--processes", 1)
PREDICTED = ("--measure", 0)
STEP = [[64], [8] * 8, [8] * 8, [64], *[[4] * 16] * 4]


@pytest.fixture
def corpus(write) -> Path:
    """Two steps of eight packed sequences."""
    return write(STEP * 2, "packs.json")


def test_json_has_every_method_of_figure_13(libra, corpus):
    run = libra("replay", corpus, *SMALL, *PREDICTED, "--json")
    assert run.code == 0, run.err
    answer = run.answer
    names = [each["name"] for each in answer["series"]]
    assert names == ["ulysses", "wlb", "distca", "tap", "tap_vrsp", "libra"]
    assert (answer["times"], answer["measured"]) == ("predicted", None)
    assert answer["series"][0]["speedup_mean"] == 1
    last = answer["series"][-1]
    assert last["config"]["pool_size"] == 2 and last["scope"] == "microbatch"
    assert last["bound_mean"] > 1
    assert answer["model"]["inter_node_gb_s"] == 50


def test_the_table_says_that_nothing_was_run(libra, corpus):
    run = libra("replay", corpus, *SMALL, *PREDICTED, "--method", "libra")
    text = " ".join(run.out.split())
    assert "no kernel was run" in text and "Where the straggler's time goes" in text
    assert "DistCA" not in text


@pytest.mark.parametrize("figure", ["11", "14", "15", "5"])
def test_other_figures(libra, corpus, tmp_path, figure):
    pytest.importorskip("matplotlib")
    out, png = tmp_path / "figure.json", tmp_path / "figure.png"
    sizes = SMALL if figure != "5" else (*SMALL, "--seq-length", 4096)
    run = libra(
        "replay", corpus, *sizes, *PREDICTED, "--figure", figure, "--out", out, "--png", png
    )
    assert run.code == 0, run.err
    assert json.loads(out.read_text())["figure"] == figure
    assert png.read_bytes()[:4] == b"\x89PNG"


def test_a_prepared_file_gives_the_same_answer(libra, corpus, tmp_path):
    path = tmp_path / "replay.npz"
    told = libra("replay", corpus, *SMALL, "--prepare", path)
    assert told.code == 0 and "--load" in told.out
    again = libra("replay", "--load", path, *PREDICTED, "--json")
    assert again.answer == libra("replay", corpus, *SMALL, *PREDICTED, "--json").answer


def test_measured_on_the_cpu(libra, corpus):
    pytest.importorskip("torch")
    run = libra("replay", corpus, *SMALL, "--measure", "all", "--device", "cpu", "--method",
                "libra", "--json")  # fmt: skip
    assert run.code == 0, run.err
    measured = run.answer["measured"]
    assert run.answer["times"] == "measured"
    assert "no GPU" in measured["device"]
    assert measured["workers_measured"] == measured["workers_wanted"] > 8
    assert measured["model_error"]["num_measured"] == measured["workers_measured"]
    libra_row = run.answer["series"][1]
    assert libra_row["model_error"]["worst"] >= libra_row["model_error"]["median"] > 0


def test_seconds_end_the_measuring(libra, corpus):
    pytest.importorskip("torch")
    run = libra("replay", corpus, *SMALL, "--measure", 1, "--device", "cpu", "--seconds", 0)
    assert run.code == 0, run.err
    assert "0 of" in run.out


def test_a_trace_has_a_row_for_each_worker_and_stream(libra, corpus, tmp_path):
    path = tmp_path / "trace.json"
    run = libra("replay", corpus, *SMALL, *PREDICTED, "--trace", path, "--trace-pool",
                "libra:0:1:0")  # fmt: skip
    assert run.code == 0, run.err
    trace = json.loads(path.read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"predicted, worker {worker}" for worker in range(4)}
    assert "microbatch 1, pool 0" in trace["otherData"]["note"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "give either CORPUS or --load"),
        (("no-such",), "neither a file nor a preset"),
        (("longtail-256k", "--figure", "12"), "must be one of 5, 11, 13, 14, 15"),
        (("longtail-256k", "--measure", "some"), "--measure ('some') must be a number or all"),
        (("longtail-256k", "--device", "tpu"), "must be cuda or cpu"),
        (("longtail-256k", "--pool-size", 3), "must divide data_parallel_size (32)"),
        (("longtail-256k", "--head-split", 3), "must divide query_heads"),
        (("longtail-256k", "--method", "ring"), "method 'ring' must be one of"),
        (("longtail-256k", "--scope", "off"), "scope ('off') must be one of"),
        (("longtail-256k", "--seeds", "1,x"), "--seeds ('1,x') must be different numbers"),
        (("longtail-256k", "--inter-node-gb-s", 0), "inter_node_gb_s (0.0) must be above 0"),
        (("longtail-256k", "--cost-model", "none"), "none does not exist"),
        (("longtail-256k", "--out", "/none/x.json"), "cannot be written"),
        (("--load", "none.npz"), "none.npz does not exist"),
    ],
)
def test_faults_are_one_line(libra, arguments, words):
    run = libra("replay", *arguments)
    assert (run.code, run.out) == (2, "")
    assert words in run.err and run.err.count("\n") == 1


def test_a_file_that_is_too_short(libra, corpus):
    run = libra("replay", corpus, *SMALL, "--steps", 3)
    assert run.code == 2 and "has 2 steps, --steps is 3; try 2" in run.err


def test_a_pool_that_is_not_there(libra, corpus, tmp_path):
    run = libra("replay", corpus, *SMALL, *PREDICTED, "--trace", tmp_path / "t.json",
                "--trace-pool", "libra:0:0:9")  # fmt: skip
    assert run.code == 2 and "try libra:0:1:1" in run.err


def test_a_file_says_nothing_about_the_job(libra, corpus):
    run = libra("replay", corpus)
    assert run.code == 2 and "missing --seq-length" in run.err
