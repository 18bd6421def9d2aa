"""libra replay: small corpora end to end, prepared files, measuring on the CPU, faults."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import pytest

from megatron_libra.simulator.calibration import built_in, model_json
from tests.helpers.replay_cases import HEADS, PREDICTED, SIZES, SMALL


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
    sizes = SMALL if figure != "5" else (*SIZES, *HEADS, "--seq-length", 4096)
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
    assert "0 of" in run.out and "no kernel was run" in " ".join(run.out.split())


def test_a_method_without_a_measured_worker_is_told(libra, corpus, monkeypatch):
    """Only Ulysses fits the seconds: Libra's numbers are not shown as measured ones."""
    pytest.importorskip("torch")
    from megatron_libra.replay import measuring

    run_worker, turns = measuring.measure_worker, []

    def only_ulysses(calls, timer):
        """The heaviest of each microbatch come first, by method."""
        turns.append(1)
        if len(turns) not in (1, 3):
            raise RuntimeError("no more")
        return run_worker(calls, timer)

    monkeypatch.setattr(measuring, "measure_worker", only_ulysses)
    options = (*SMALL, "--measure", 1, "--sample", 0, "--device", "cpu", "--method", "libra")
    answer = libra("replay", corpus, *options, "--json").answer
    assert answer["times"] != "measured"  # of Ulysses it depends on the clock
    ours = {each["name"]: each for each in answer["series"]}
    assert (ours["libra"]["times"], ours["libra"]["workers_run"]) == ("scaled", 0)
    assert ours["ulysses"]["workers_run"] > 0
    assert answer["notes"][0].startswith("libra: no worker was run.")
    turns.clear()
    text = " ".join(libra("replay", corpus, *options).out.split())
    assert "speedups compare a prediction with a measurement" in text
    assert "libra scaled" in text


def test_a_trace_has_a_row_for_each_worker_and_stream(libra, corpus, tmp_path):
    path = tmp_path / "trace.json"
    run = libra("replay", corpus, *SMALL, *PREDICTED, "--trace", path, "--trace-pool",
                "libra:0:1:0")  # fmt: skip
    assert run.code == 0, run.err
    trace = json.loads(path.read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {f"predicted, worker {worker}" for worker in range(4)}
    assert "microbatch 1, pool 0" in trace["otherData"]["note"]


def test_the_bandwidth_between_nodes_is_the_files_own(libra, corpus, tmp_path):
    """50 GB/s stand only in for the built-in models, and the output says which it is."""
    model = built_in("h200-fa4")
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model_json(replace(model, inter_node_gb_s=17.5)), default=asdict))
    options = ("replay", corpus, *SMALL, *PREDICTED, "--method", "libra")
    for arguments, bandwidth, origin in (
        ((), 50, "default with a built-in model"),
        (("--cost-model", path), 17.5, "of the cost model"),
        (("--cost-model", path, "--inter-node-gb-s", 30), 30, "given"),
        (("--inter-node-gb-s", 40), 40, "given"),
    ):
        answer = libra(*options, *arguments, "--json").answer["model"]
        assert (answer["inter_node_gb_s"], answer["inter_node_gb_s_from"]) == (bandwidth, origin)
        text = " ".join(libra(*options, *arguments).out.split())
        assert f"{bandwidth:g} GB/s between nodes ({origin})" in text


@pytest.mark.parametrize(("seconds", "workers"), [(0, 0), (60, 1)])
def test_a_trace_has_measured_rows_only_of_workers_that_were_run(
    libra, corpus, tmp_path, seconds, workers
):
    pytest.importorskip("torch")
    path = tmp_path / "trace.json"
    run = libra("replay", corpus, *SMALL, "--measure", 1, "--sample", 0, "--device", "cpu",
                "--seconds", seconds, "--trace", path, "--method", "libra")  # fmt: skip
    assert run.code == 0, run.err
    trace = json.loads(path.read_text())
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert len([name for name in names if name.startswith("predicted")]) == 4
    assert len([name for name in names if name.startswith("measured")]) == workers
    assert ("no worker of this pool was run" in trace["otherData"]["note"]) == (not workers)


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
        (("longtail-256k", "--out", "/none/x.json"), "/none is no folder; make it first"),
        (("longtail-256k", "--overlap-loss", 2), "overlap_loss (2) must be from 0 to 1"),
        (("longtail-256k", "--overlap-loss", "nan"), "overlap_loss (nan) must be at least 0"),
        (("longtail-256k", "--inter-node-gb-s", "inf"), "inter_node_gb_s (inf) must be finite"),
        (("longtail-256k", "--gpus-per-node", "9" * 20), "Invalid value for '--gpus-per-node'"),
        (("longtail-256k", "--query-heads", 2**20), "Invalid value for '--query-heads'"),
        (("longtail-256k", "--kernel", "xyz"), "kernel ('xyz') must be one of auto"),
        (("longtail-256k", "--steps", 10**12), "at most 32768 are replayed; try --steps 64."),
        (("longtail-256k", "--steps", 65), "(65) x global_batch_size (128) x 4 seeds are 33280"),
        (("longtail-256k", "--gbs", 2**20), "try fewer seeds or a smaller --gbs."),
        (("--load", "none.npz"), "none.npz does not exist"),
    ],
)
def test_faults_are_one_line(libra, arguments, words):
    run = libra("replay", *arguments)
    assert (run.code, run.out) == (2, "")
    assert words in run.err and run.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--load", "x.npz", "--method", "libra", "--dp", 4, "--seq-length", 64),
         "--method, --seq-length, --data-parallel-size: not with --load"),
        (("--load", "x.npz", "--gpus-per-node", 8), "--gpus-per-node: not with --load"),
        (("--load", "x.npz", "--figure", 5), "--figure: not with --load"),
        (("--load", "x.npz", "--prepare", "y.npz"), "--prepare: not with --load"),
        (("longtail-256k", "--figure", 5, "--trace", "x.json"), "--trace: not with --figure 5"),
        (("longtail-256k", "--figure", 5, "--prepare", "x.npz"), "--prepare: not with --figure 5"),
        (("longtail-256k", "--figure", 5, "--steps", 2), "--steps: not with --figure 5"),
        (("longtail-256k", "--figure", 14, "--method", "libra"), "--method: not with --figure 14"),
        (("longtail-256k", "--prepare", "x.npz", "--out", "y.json", "--measure", 2),
         "--measure, --out: not with --prepare"),
        (("longtail-256k", "--trace-pool", "libra:0:0:0"), "--trace-pool: without --trace"),
        (("longtail-256k", "--out", "x.json", "--png", "x.json"), "given for two outputs"),
    ],
)  # fmt: skip
def test_an_option_without_effect_is_refused(libra, arguments, words, tmp_path, monkeypatch):
    """It is not ignored, and nothing is planned or written before."""
    monkeypatch.chdir(tmp_path)
    run = libra("replay", *arguments)
    assert (run.code, run.out) == (2, "")
    assert words in run.err and run.err.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_a_trace_of_a_prepared_file_keeps_its_options(libra, corpus, tmp_path):
    """What is asked of the times still goes with --load."""
    path, trace = tmp_path / "replay.npz", tmp_path / "trace.json"
    assert libra("replay", corpus, *SMALL, "--prepare", path).code == 0
    run = libra("replay", "--load", path, *PREDICTED, "--trace", trace, "--trace-pool",
                "libra:0:0:0", "--overlap-loss", 1, "--sample", 3)  # fmt: skip
    assert run.code == 0, run.err
    assert trace.exists() and "overlap loss 1." in " ".join(run.out.split())


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
