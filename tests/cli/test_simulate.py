"""libra simulate: a small corpus end to end, its files, and every kind of bad input in one line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

SIZES = ("--seq-length", 64, "--cp", 2, "--dp", 4, "--gbs", 8)
HEADS = ("--query-heads", 4, "--kv-heads", 2, "--head-dim", 8)
GRID = ("--pool-sizes", "2,4", "--block-sizes", 16, "--head-splits", 2, "--chunks", 2)
SMALL = (*SIZES, *HEADS, *GRID, "--processes", 1)
STEP = [[64], [8] * 8, [8] * 8, [64], *[[4] * 16] * 4]


@pytest.fixture
def corpus(write) -> Path:
    """Two steps of eight packed sequences."""
    return write(STEP * 2, "packs.json")


def test_json_of_a_small_corpus(libra, corpus):
    """Works 4096 512 512 4096 256 256 256 256: in pools of four, in order, 9216 and 1024."""
    run = libra("simulate", corpus, *SMALL, "--json")
    assert run.code == 0
    answer = run.answer
    (four,) = [v for v in answer["vrsp"] if (v["pool_size"], v["scope"]) == (4, "microbatch")]
    assert four["inter_pool_imbalance_before"] == pytest.approx(9216 / 5120 - 1)
    assert four["inter_pool_imbalance"] == pytest.approx(0)
    assert answer["corpus"]["sequences"]["sequences"] == 16
    assert answer["reference"] == "ulysses"
    assert answer["recommendation"]["placer"] == "home_first"
    assert {(c["pool_size"], c["block_size"], c["head_split"]) for c in answer["screened"]} == {
        (2, 16, 2),
        (4, 16, 2),
    }


def test_the_table_says_first_that_nothing_is_recommended(libra, corpus):
    """The job is too small: every choice is slower than ulysses."""
    run = libra("simulate", corpus, *SMALL)
    assert run.code == 0
    said = run.out.index("Nothing is recommended: train without libra.")
    assert said < run.out.index("Best of those tried (*): P = ") and "Recommended" not in run.out
    assert "bytes worker" in run.out and "0.00 G" not in run.out and "0.0 G" not in run.out
    assert "VRSP on all 2 steps." in run.out
    assert "not of your machine" in " ".join(run.out.split())
    assert max(map(len, run.out.splitlines())) <= 80


def test_files_are_written(libra, corpus, tmp_path):
    pytest.importorskip("matplotlib")
    html, yaml = tmp_path / "report.html", tmp_path / "libra.yaml"
    assert libra("simulate", corpus, *SMALL, "--html", html, "--yaml", yaml).code == 0
    assert html.read_text().startswith("<!DOCTYPE html>")
    assert "context-parallel-impl: megatron\n# libra-pool-size: " in yaml.read_text()
    assert "# libra-load-slack: 0.01\n" in yaml.read_text(), "tau of LibraConfig and libra replay"


def test_a_preset_brings_its_job(libra):
    run = libra("simulate", "longtail-256k", "--pool-sizes", 8, "--block-sizes", 8192,
                "--head-splits", 8, "--scopes", "microbatch", "--sequences", 128, "--steps", 1,
                "--processes", 1, "--json")  # fmt: skip
    answer = run.answer
    assert answer["job"]["data_parallel_size"] == 32
    assert answer["job"]["shape"]["kv_heads"] == 16
    assert answer["vrsp"][0]["inter_pool_imbalance"] < 0.02
    assert answer["recommendation"]["speedup_mean"] > 3


def test_tensor_parallelism_divides_heads_and_nodes(libra, corpus):
    run = libra("simulate", corpus, *SIZES, "--query-heads", 8, "--kv-heads", 2, "--head-dim", 8,
                "--tp", 4, "--pool-sizes", 2, "--block-sizes", 32, "--head-splits", 1,
                "--processes", 1, "--json")  # fmt: skip
    job = run.answer["job"]
    assert (job["shape"]["query_heads"], job["shape"]["kv_heads"]) == (2, 1)
    assert job["workers_per_node"] == 2


def test_a_calibration_changes_times_but_not_bytes(libra, corpus, write):
    from megatron_libra.simulator.calibration import built_in, model_json

    fast = model_json(built_in("h200-fa4")) | {"name": "mine", "message_us": 0.0}
    for cost in fast["kernels"].values():
        cost["forward"]["host_us"] = cost["backward"]["host_us"] = 0.0  # or calls are hidden
    slow = libra("simulate", corpus, *SMALL, "--json").answer
    quick = libra("simulate", corpus, *SMALL, "--json", "--cost-model", write(fast)).answer
    assert quick["cost_model"]["name"] == "mine"
    by_choice = {json.dumps([c["pool_size"], c["scope"]]): c for c in slow["screened"]}
    for each in quick["screened"]:
        other = by_choice[json.dumps([each["pool_size"], each["scope"]])]
        assert each["pool_bytes"] == other["pool_bytes"]
        assert each["layer_ms"] < other["layer_ms"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (("--pool-sizes", "3"), "pool_size (3) must divide data_parallel_size (4)"),
        (("--pool-sizes", "a,2"), "--pool-sizes ('a,2') must be numbers with commas"),
        (
            ("--head-splits", "2,3"),
            "--head-splits (3) must divide --query-heads (4); try one of [1",
        ),
        (("--gbs", "9"), "data_parallel_size (4) must divide global_batch_size (9)"),
        (("--gbs", "64"), "16 packed sequences, fewer than global_batch_size (64)"),
        (("--seq-length", "32"), "the longest packed sequence has 64 tokens"),
        (
            ("--seq-length", "66"),
            "seq_length (66) must be a multiple of 2 * context_parallel_size (4); try 68 or CP 1.",
        ),
        (("--kv-heads", "3"), "kv_heads (3) must divide query_heads (4)"),
        (("--tp", "3"), "tensor_parallel_size (3) must divide query_heads (4)"),
        (("--placers", "best"), "placer ('best') must be one of"),
        (("--scopes", "week"), "scope ('week') must be one of off, microbatch, step, pipeline"),
        (("--pack", "tight"), "pack ('tight') must be one of auto, none"),
        (("--column", "x"), "column ('x') is for .parquet files"),
        (("--kv-fetch", "all"), "kv_fetch ('all') must be one of prefix, group"),
        (("--steps", "-1"), "'--steps': Input should be greater than or equal to 1, not '-1'"),
        (("--query-heads", "0"), "'--query-heads': Input should be greater than or equal to 1"),
        (("--seq-length", "63"), "2 * context_parallel_size (4); try 64."),
        (("--cp", "64"), "context_parallel_size (64) must be at most half of seq_length (64)"),
        (("--tp", "8"), "tensor_parallel_size (8) must divide query_heads (4); try one of [1, 2,"),
        (("--kv-heads", "3", "--tp", "2"), "kv_heads (3) must divide query_heads (4)"),
        (("--block-sizes", "0"), "--block-sizes ('0') must be numbers from 1 to 2147483647"),
        (("--head-splits", "9" * 5000), "--head-splits ('9999999"),
        (("--processes", "0"), "--processes"),
        (("--cost-model", "h100"), "h100 does not exist"),
        (("--other-ms", "nan"), "other_ms (nan) must be at least 0"),
        (("--max-kv-gib", "0"), "max_kv_gib (0) must be above 0"),
        (("--max-kv-gib", "1e-9"), "max_kv_gib (1e-09) must be at least"),
        (("--html", "no/such/folder/a.html"), "give a file in a folder that exists"),
        (("--yaml", "."), "cannot be written"),
    ],
)
def test_bad_input_is_one_line(libra, corpus, changes, message):
    run = libra("simulate", corpus, *SMALL, *changes)
    assert (run.code, run.out) == (2, "")
    assert run.err.startswith("error: ") and message in run.err
    assert run.err.count("\n") == 1


def test_missing_options_are_listed(libra, corpus):
    run = libra("simulate", corpus, *SIZES)
    assert run.code == 2
    assert "missing --query-heads --kv-heads --head-dim;" in run.err


def test_unknown_corpora_name_the_presets(libra, tmp_path):
    for options in (SMALL, ()):
        run = libra("simulate", tmp_path / "nothing", *options)
        assert run.code == 2 and "longtail-256k, longtail-1m" in run.err
        assert "neither a file nor a preset" in run.err
