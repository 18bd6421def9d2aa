"""libra plan: the answer is the plan, as JSON and as a table."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from megatron_libra import AttentionShape, LibraConfig, plan_pool

KEYS = {
    "workers",
    "tiles",
    "loads",
    "imbalance",
    "max_tile_over_mean",
    "traffic_bytes",
    "rounds",
    "peak_resident_kv_bytes",
    "plan_ms",
    "digest",
}


def planned(request):
    """The same request, planned by a library call."""
    return plan_pool(
        request["sequences"],
        context_parallel_size=request["context_parallel_size"],
        shape=AttentionShape(**request["attention"]),
        config=LibraConfig(**request["libra"]),
        seq_length=request["seq_length"],
    )


def test_the_answer_is_the_plan(libra, write, pool):
    run = libra("plan", write(pool), "--json")
    plan = planned(pool)
    answer = run.answer
    assert (run.code, run.err) == (0, "")
    assert set(answer) == KEYS
    assert answer["digest"] == plan.digest
    assert answer["loads"] == plan.loads.tolist()
    assert answer["imbalance"] == plan.imbalance
    assert answer["traffic_bytes"] == plan.traffic_bytes.tolist()
    assert answer["peak_resident_kv_bytes"] == plan.peak_resident_kv_bytes.tolist()
    workers = [plan.worker_plan(w) for w in range(4)]
    assert answer["rounds"] == [
        len(w.near.rounds)
        + len(w.far.rounds)
        + sum(len(rounds) for rounds, _ in w.local.halves(plan.shape.kv_heads))
        for w in workers
    ]
    assert answer["plan_ms"] > 0


def test_tiles_are_listed_by_id(libra, write, pool):
    answer = libra("plan", write(pool), "--json").answer
    tiles = answer["tiles"]
    assert [tile["tile"] for tile in tiles] == list(range(len(tiles)))
    first = dict(tiles[0])
    assert first.pop("worker") in range(4)
    assert first == {
        "tile": 0, "slot": 0, "head_shard": 0, "start": 0, "stop": 512, "pairs": 131328, "home": 0
    }  # fmt: skip
    # Every causal pair of every sample once for each head shard, and the loads are the tiles' sums.
    pairs = sum(n * (n + 1) // 2 for sequence in pool["sequences"] for n in sequence)
    assert sum(tile["pairs"] for tile in tiles) == 2 * pairs
    loads = [sum(t["pairs"] for t in tiles if t["worker"] == w) for w in range(4)]
    assert loads == answer["loads"]


def test_pool_size_and_the_rest_of_libra_may_be_left_out(libra, write, pool):
    del pool["libra"]["pool_size"], pool["seq_length"], pool["attention"]["bytes_per_element"]
    given = libra("plan", write(pool), "--json").answer
    assert given["workers"] == 4
    pool["attention"]["query_heads"] = 8
    del pool["libra"]
    assert libra("plan", write(pool), "--json").answer["workers"] == 4


def test_empty_sequences_and_zero_lengths_are_legal(libra, write, pool):
    pool["sequences"] = [[], [64, 0, 3]]
    answer = libra("plan", write(pool), "--json").answer
    assert sum(answer["loads"]) == 2 * (64 * 65 // 2 + 6)


@pytest.mark.parametrize("columns", ["40", "80", "200"])
def test_the_table_is_readable_at_every_width(libra, write, pool, monkeypatch, columns):
    monkeypatch.setenv("COLUMNS", columns)
    run = libra("plan", write(pool))
    assert run.code == 0
    assert all(len(line) <= int(columns) for line in run.out.splitlines())
    assert "\x1b" not in run.out
    words = " ".join(run.out.split())
    assert "4 = 2 sequences x CP 2" in words
    assert f"{planned(pool).imbalance:.4f}" in words


def test_a_reader_that_stops_early_is_no_error(write, pool):
    command = [sys.executable, "-c", "from megatron_libra.cli import main; main()", "plan"]
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    process = subprocess.Popen(
        [*command, str(write(pool)), "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment,
    )
    process.stdout.close()
    assert process.stderr.read() == b""
    process.wait()
