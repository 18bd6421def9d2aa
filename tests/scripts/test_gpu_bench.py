"""The GPU benchmarks on the CPU: their arithmetic by hand, their cases through the real executor,
and what happens to a case that fails. Times mean nothing here."""

from __future__ import annotations

import json
import os
import time
from types import SimpleNamespace

import numpy as np
import pytest

from megatron_libra import LibraConfig, plan_pool
from tests.scripts.gpu_scripts import dry_run, on_path


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    yield from on_path(monkeypatch)


@pytest.mark.slow
def test_a_layer_is_compared_with_its_kernel_calls(tmp_path):
    text, rows = dry_run("bench_layer.py", tmp_path)
    by_part = {part: [row for row in rows if row["part"] == part] for part in ("time", "memory")}
    assert len(by_part["time"]) == 12 and len(by_part["memory"]) == 2 and len(rows) == 18
    for row in by_part["time"]:
        assert row["forward_ratio"] == row["forward_ms"] / row["forward_bare_ms"]
        assert (row["forward_ok"] == "pass") == (row["forward_ratio"] <= row["limit"])
        assert len(row["backward_times"]["layer"]) == row["repeats"]
    host = next(row for row in rows if row["part"] == "host")
    assert 0 < host["forward_bare_launches"] < host["forward_launches"]
    assert text.count("the times mean nothing") == 4


@pytest.mark.slow
def test_an_exchange_is_measured_with_both_settings_of_connections(tmp_path):
    _, rows = dry_run("bench_exchange.py", tmp_path, "--shares", "0.5")
    timed = [row for row in rows if row["part"] == "time"]
    assert [(row["connections"], row["transport"]) for row in timed] == [
        (setting, transport) for setting in ("unset", "1") for transport in ("gloo", "symmetric")
    ]
    assert all(row["moved_bytes"] > 0 for row in timed)
    assert all(len(row["backward"]["times"]) == 2 for row in timed)
    assert {row["backward_kv"] for row in rows if row["part"] == "memory"} == {"save", "refetch"}


class Alone:
    """A world of one worker that says how long calls take."""

    on_gpu = False

    def gather(self, value):
        return [value]


@pytest.mark.parametrize(
    ("ms", "most_s", "least", "turns", "calls"),
    [(10, 9.0, 3, 6, 8), (1000, 4.0, 3, 4, 6), (1000, 2.0, 2, 2, 4), (5000, 3.0, 2, 2, 3)],
)
def test_long_calls_take_fewer_turns(monkeypatch, ms, most_s, least, turns, calls):
    """One warm-up and one call to size the others, which counts only where time is short."""
    import bench_timing

    made = []
    monkeypatch.setattr(bench_timing, "timed", lambda call, world, count: call() or float(ms))
    times = bench_timing.alternate(
        {"one": lambda: made.append(1)}, Alone(),
        repeats=6, warmup=1, most_s=most_s, least=least,
    )  # fmt: skip
    assert times == {"one": [ms] * turns} and len(made) == calls


def layers_on_shared_inputs(world, case):
    """Body of a case: a layer that takes another's inputs returns what that layer returns."""
    from bench_work import Layer, runtime_of

    plan = pool_plan()
    runtime = runtime_of(world, plan.config, plan.shape)
    base = Layer(plan, world.worker, runtime, world)
    other = Layer(plan, world.worker, runtime, world, inputs_of=base)
    same = all((a == b).all().item() for a, b in zip(base.both(), other.both(), strict=True))
    return {"same": world.gather(same), "shared": other.dout is base.dout}


def test_layers_share_their_inputs(tmp_path):
    (row,) = run(layers_on_shared_inputs, [{}], tmp_path)
    assert row["same"] == [True, True] and row["shared"]


def test_hidden_is_what_the_layer_does_not_wait_for():
    from bench_exchange import summary

    fast = {
        "kernels": [8.0, 8.0],
        "signals": [9.5, 9.5],
        "compute": [9.0, 9.0],
        "exchange": [4.0, 4.0],
        "layer": [10.0, 10.0],
    }
    slow = {"kernels": [9.0, 9.0], "compute": [10.0, 10.0], "exchange": [3.0] * 2}
    slow |= {"signals": [10.5, 10.5], "layer": [11.0, 11.0]}
    found = summary([fast, slow], limit=0.6)
    assert (found["compute_ms"], found["exchange_ms"], found["extra_ms"]) == (10, 4, 1)
    assert (found["hidden"], found["+-"], found["ok"]) == (0.75, 0, "pass")
    assert found["signals_ms"] == 10.5
    uneven = {**slow, "layer": [10.0, 12.0]}
    assert summary([fast, uneven], limit=0.6)["+-"] == pytest.approx(1.25 * 2**0.5 / 2**0.5 / 4)
    assert summary([fast, slow], limit=0.9)["ok"] == "FAIL"


@pytest.mark.parametrize("pairs", [10_000, 3_000_000])
def test_a_long_tail_has_the_pairs_that_were_asked_for(pairs):
    from bench_work import long_tail

    lengths = np.array(long_tail(pairs, seed=3))
    each = lengths * (lengths + 1) // 2
    assert each.sum() == pytest.approx(pairs, rel=0.02)
    assert each.max() <= 0.27 * pairs


def test_scaled_rows_keep_the_skew():
    from bench_work import scaled_rows

    rows = scaled_rows("longtail-256k", 4096, 32, seed=0)
    assert all(3500 < sum(row) <= 4096 and min(row) >= 1 for row in rows)
    work = np.array([sum(length**2 for length in row) for row in rows], float)
    assert work.max() > 3 * work.mean()


def pool_plan(transport="gloo"):
    """Something moves, something stays, chunks share kv heads."""
    from bench_work import shape_of

    config = LibraConfig(
        pool_size=2, block_size=32, head_split=2, chunks=2, transport=transport, kernel="reference"
    )
    return plan_pool(
        [[200, 9, 30], [40, 50, 3]],
        context_parallel_size=1, shape=shape_of("8q2kv16"), config=config,
    )  # fmt: skip


def weigh_parts(world, case):
    """Body of a case: pairs of the bare calls, bytes of the bare exchange."""
    from bench_alone import Exchange, KernelCalls
    from bench_work import runtime_of

    plan = pool_plan()
    mine = plan.worker_plan(world.worker)
    runtime = runtime_of(world, plan.config, plan.shape)
    calls, exchange = KernelCalls(mine, runtime.kernel, world), Exchange(mine, runtime, world)
    pairs = 0
    for call in calls.calls:
        q, r = call.tensors[0], call.bound_round
        queries, keys = r.cu_queries.diff(), r.cu_keys.diff()
        pairs += int((queries * keys - queries * (queries - 1) // 2).sum()) * q.shape[1]
    sent = []
    for request in (exchange.queries, exchange.keys, exchange.results):
        rows = sum(traffic.num_sent for traffic in request.traffics)
        sent.append(rows * request.width * plan.shape.bytes_per_element)
    exchange.forward()
    exchange.backward()
    calls.both()
    return {"pairs": world.gather(pairs), "bytes": world.gather(sum(sent))}


def test_bare_parts_are_the_layer_s_own(tmp_path):
    rows = run(weigh_parts, [{}], tmp_path)
    plan = pool_plan()
    heads = plan.heads.query_heads_per_shard
    assert rows[0]["pairs"] == [load * heads for load in plan.loads.tolist()]
    traffic = plan.traffic_bytes
    assert traffic.sum() > 0
    assert rows[0]["bytes"] == [int(row.sum() - row[w]) for w, row in enumerate(traffic)]


def leave_rows_out(world, case):
    """Body of a case: outputs of one layer with its rows, with signals alone, with rows again, and
    with a transport that moves nothing."""
    from bench_alone import copies_rows, signals_alone, without_transfers
    from bench_work import Layer, runtime_of

    plan = pool_plan(transport="symmetric")
    runtime = runtime_of(world, plan.config, plan.shape)
    layer = Layer(plan, world.worker, runtime, world)
    right = layer.forward()
    for leaf in layer.leaves:
        leaf.data.mul_(2)
    changed = layer.forward()
    for leaf in layer.leaves:
        leaf.data.div_(2)
    with signals_alone(runtime):
        stale = layer.forward()
    again = layer.forward()
    still = Layer(plan, world.worker, without_transfers(runtime), world, inputs_of=layer)
    alone = [still.forward() for _ in range(2)]
    return {
        "can": copies_rows(runtime),
        "again": world.gather(bool((again == right).all())),
        "stale": world.gather(bool((stale == right).all())),
        "changed": world.gather(bool((changed == right).all())),
        "alone": world.gather([bool((each == right).all()) for each in alone]),
        "finite": world.gather([bool(each.isfinite().all()) for each in alone]),
    }


def test_a_layer_without_rows_waits_and_computes_with_other_rows(tmp_path):
    (row,) = run(leave_rows_out, [{}], tmp_path)
    assert row["can"] and row["again"] == [True, True]
    assert row["changed"] == [False, False]
    # worker 0 gives queries away; worker 1 computes its own tokens itself
    assert row["stale"] == [False, True]
    assert row["alone"] == [[False, False], [True, True]] and row["finite"] == [[True, True]] * 2


def misbehave(world, case):
    """Body of a case that fails in some way on one worker."""
    if world.worker == world.num_workers - 1:
        if case["how"] == "raise":
            raise ValueError("the reason")
        if case["how"] == "exit":
            os._exit(3)
        if case["how"] == "hang":
            time.sleep(1000)
    world.align()
    return {"workers": world.gather(world.worker)}


def test_other_cases_are_measured_when_one_fails_alone(tmp_path):
    """One worker: what it raises ends its case only, what kills it ends the process."""
    hows = ["well", "raise", "well", "exit", "well"]
    rows = run(misbehave, [{"how": how} for how in hows], tmp_path, 1, failures=2)
    assert [(row["how"], "error" in row) for row in rows] == [
        (how, how != "well") for how in hows
    ], rows
    assert "the reason" in rows[1]["error"] and "exit code 3" in rows[3]["error"]


def test_other_cases_are_measured_when_a_worker_fails_or_hangs(tmp_path):
    """Two workers: the other one waits for the failing one, so both start afresh."""
    hows = ["well", "raise", "hang", "well"]
    rows = run(misbehave, [{"how": how} for how in hows], tmp_path, 2, failures=2)
    assert [(row["how"], "error" in row) for row in rows] == [
        (how, how != "well") for how in hows
    ], rows
    assert "the reason" in rows[1]["error"] and "in misbehave" in rows[2]["error"]
    assert rows[-1]["workers"] == [0, 1]


def nothing(record):
    """No line for a record."""
    return ""


def run(body, cases, out, num_workers=2, failures=0):
    """The JSON lines of cases on CPU workers."""
    from bench_common import Job, run_cases

    job = Job("test", out, "cpu", num_workers, time.time() + 60, case_seconds=8)
    assert run_cases(body, cases, job, line=nothing) == failures
    return [json.loads(line) for line in job.path.read_text().splitlines()]


def test_more_workers_than_gpus_are_refused_before_any_work(tmp_path, monkeypatch):
    from bench_common import Job

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    args = SimpleNamespace(device="cuda", out=tmp_path / "new", seconds=1.0, case_seconds=1.0)
    with pytest.raises(SystemExit, match="error: 4 workers need as many GPUs, here are 2; "):
        Job.of("straggler", args, 4)
    assert not args.out.exists()
    assert Job.of("straggler", args, 2).num_workers == 2


def test_no_case_is_begun_when_the_time_is_over(tmp_path, capsys):
    from bench_common import Job, run_cases

    job = Job("test", tmp_path, "cpu", 1, time.time() - 1, case_seconds=3)
    assert run_cases(misbehave, [{"how": "well"}], job, line=nothing) == 0
    assert "no time for 1 cases" in capsys.readouterr().out
    assert not job.path.exists()
