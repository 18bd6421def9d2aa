"""A replay end to end on small pools: plans, times, measuring on the CPU, the file, summaries."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.rows import LengthRows
from megatron_libra.replay.archive import load_replay, save_replay
from megatron_libra.replay.calls import worker_calls
from megatron_libra.replay.methods import METHODS, methods_of, pools_of
from megatron_libra.replay.replay import Corpus, Replay, Series, prepare
from megatron_libra.replay.report import source_notes, source_of, speed_notes, summaries
from megatron_libra.replay.sampling import ModelError
from megatron_libra.replay.times import LOSSES, pass_times, pool_times, predicted
from megatron_libra.replay.workers import (
    by_work,
    calls_of_worker,
    part_columns,
    weights,
    worker_table,
)
from megatron_libra.simulator.calibration import built_in
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.processes import TaskPool

JOB = TrainingJob(
    seq_length=64,
    context_parallel_size=2,
    data_parallel_size=4,
    global_batch_size=8,
    shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
    workers_per_node=2,
)
BASE = LibraConfig(pool_size=2, block_size=8, head_split=2, chunks=2)
WINDOWS = [
    LengthRows.from_rows([[64], [8] * 8, [8] * 8, [64], *[[4] * 16] * 4]),
    LengthRows.from_rows([[40, 24], [64], [8] * 8, [16] * 4, [64], *[[4] * 16] * 3]),
]
MODEL = built_in("h200-fa4")
CORPUS = Corpus(name="small", packing="by hand", seeds=(0,), num_windows=2)


def prepared(*names: str) -> Replay:
    series = [Series(name=m.name, method=m, job=JOB) for m in methods_of(names, JOB, BASE)]
    with TaskPool(1) as tasks:
        return prepare("13", CORPUS, WINDOWS, series, tasks)


@pytest.fixture(scope="module")
def replay() -> Replay:
    return prepared(*METHODS)


def test_rows_are_the_pools_of_all_series_in_order(replay):
    assert [each.name for each in replay.series] == list(METHODS)
    assert replay.rows[replay.of_series("libra"), 1:4].tolist() == [
        [window, ga, pool] for window in range(2) for ga in range(2) for pool in range(2)
    ]
    assert len(replay.of_series("ulysses")) == 16


def test_equal_pools_are_planned_once(replay):
    """[4] * 16 is there seven times; Ulysses plans it once."""
    assert len(replay.works) < len(replay.rows)
    used = replay.rows[replay.of_series("ulysses"), 4]
    pairs = [int(replay.works[i].pairs.sum()) for i in used]
    task = pools_of(methods_of(["ulysses"], JOB, BASE)[0], WINDOWS[0], JOB, 0)
    assert pairs[:8] == [int(each.plan().loads.sum()) for each in task]


def test_calls_are_those_of_the_plans_workers():
    (libra,) = methods_of(["libra"], JOB, BASE)
    replay = prepared("libra")
    first = pools_of(libra, WINDOWS[0], JOB, 0)[0].plan()
    work = replay.works[0]
    for worker in range(work.num_workers):
        expected = worker_calls(first.worker_plan(worker))
        found = calls_of_worker(work, worker)
        assert sorted(call.key for call in found) == sorted(call.key for call in expected)
        assert sorted((c.part, c.repeats) for c in found) == sorted(
            (c.part, c.repeats) for c in expected
        )


def test_workers_with_equal_calls_are_known(replay):
    """The workers of a Ulysses group compute the same tokens, each for its heads."""
    table = worker_table(replay, predicted(replay, MODEL))
    for pool in np.unique(table.pool[table.method == 0]):
        assert len(set(table.calls[table.pool == pool].tolist())) == 1
    number = [each.name for each in replay.series].index("libra")
    assert len(set(table.calls[table.method == number].tolist())) > 4


def test_columns_and_works_are_two_views_of_the_same_seconds(replay):
    parts = predicted(replay, MODEL)
    columns = part_columns(parts)
    for ours, again in zip(parts, by_work(replay, columns), strict=True):
        np.testing.assert_array_equal(ours, again)
    table = worker_table(replay, parts)
    np.testing.assert_allclose((columns * weights(replay)).sum(axis=1), table.seconds)


@pytest.mark.parametrize("is_overlapped", [True, False])
@pytest.mark.parametrize("backward", [True, False])
def test_losses_make_up_the_time(replay, backward, is_overlapped):
    for work, parts in zip(replay.works, predicted(replay, MODEL), strict=True):
        times = pass_times(
            work, parts[int(backward)], MODEL, backward=backward, is_overlapped=is_overlapped
        )
        assert times.mean_compute + times.losses.sum() == pytest.approx(times.seconds)
        assert times.seconds >= times.compute.total.max() - 1e-12


def test_without_overlap_nothing_runs_under_the_exchange():
    """Moving local work out from under the exchange makes a pool slower, never faster."""
    replay = prepared("tap")
    for work, parts in zip(replay.works, predicted(replay, MODEL), strict=True):
        open_, hidden = (
            pass_times(work, parts[0], MODEL, backward=False, is_overlapped=flag)
            for flag in (False, True)
        )
        assert open_.seconds >= hidden.seconds - 1e-12
        assert open_.compute.total.tolist() == pytest.approx(hidden.compute.total.tolist())


def test_summaries_by_hand(replay):
    """The straggler of a microbatch is its slowest pool; speedups are means over windows."""
    times = pool_times(replay, predicted(replay, MODEL), MODEL)
    found = {each.name: each for each in summaries(replay, times)}
    ulysses = times.layer[replay.of_series("ulysses")].reshape(2, 2, 4)
    libra = times.layer[replay.of_series("libra")].reshape(2, 2, 2)
    slow, fast = ulysses.max(axis=2), libra.max(axis=2)
    each = found["libra"]
    assert each.mean_ms == pytest.approx(fast.mean() * 1e3)
    assert each.worst_ms == pytest.approx(fast.max(axis=1).mean() * 1e3)
    assert each.speedup_mean == pytest.approx(np.mean(slow.mean(axis=1) / fast.mean(axis=1)))
    assert each.speedup_worst == pytest.approx(np.mean(slow.max(axis=1) / fast.max(axis=1)))
    assert each.step_ms == pytest.approx(libra.sum(axis=1).max(axis=1).mean() * 1e3)
    assert found["ulysses"].speedup_mean == 1
    whole = each.perfect_ms + each.between_ms + sum(each.losses_ms[name] for name in LOSSES)
    assert whole == pytest.approx(each.mean_ms)


def test_a_file_gives_the_same_replay(replay, tmp_path):
    path = tmp_path / "replay.npz"
    save_replay(replay, path)
    again = load_replay(path)
    assert (again.series, again.bounds, again.corpus) == (
        replay.series,
        replay.bounds,
        replay.corpus,
    )
    np.testing.assert_array_equal(again.rows, replay.rows)
    ours, theirs = (pool_times(each, predicted(each, MODEL), MODEL) for each in (replay, again))
    np.testing.assert_array_equal(ours.seconds, theirs.seconds)
    np.testing.assert_array_equal(ours.losses, theirs.losses)
    assert [path.name for path in tmp_path.iterdir()] == ["replay.npz"]


def test_other_files_are_refused(tmp_path):
    path = tmp_path / "other.npz"
    np.savez(path, rows=np.zeros(3))
    with pytest.raises(ValueError, match=r"other.npz holds no replay .* --prepare"):
        load_replay(path)
    with pytest.raises(ValueError, match="does not exist"):
        load_replay(tmp_path / "none.npz")


@pytest.mark.parametrize(
    ("header", "reason"),
    [
        (b"{", "header: is not JSON: line 1, column 2: "),
        (b"", "header: is empty"),
        (b"\xff", "header: is not UTF-8: byte 0 is 0xff"),
        (b"[" * 100_000, "header: nests too deeply"),
        (b'{"format": 1, "format": 2}', 'header: key "format" is given twice'),
        (b'{"bounds": [Infinity]}', "header: Infinity is not a number"),
    ],
)
def test_a_damaged_header_is_refused_in_our_words(tmp_path, header, reason):
    path = tmp_path / "damaged.npz"
    np.savez(path, header=np.frombuffer(header, np.uint8), rows=np.zeros(3))
    with pytest.raises(ValueError, match=rf"damaged.npz holds no replay .* \({reason}.*--prepare"):
        load_replay(path)


def test_measuring_runs_the_kernel_calls_until_the_seconds_are_over():
    torch = pytest.importorskip("torch")
    from megatron_libra.replay.measuring import measure, timer_for

    replay = prepared("libra")
    columns = part_columns(predicted(replay, MODEL))
    timer = timer_for(JOB.shape.head_dim, "auto", "cpu", MODEL)
    order = [3, 0, 5]
    run = measure(replay, columns, order, timer, budget_s=60)
    assert np.flatnonzero(~np.isnan(run.columns).any(axis=1)).tolist() == sorted(order)
    has_calls = columns[3] > 0
    assert (run.columns[3] > 0).tolist() == has_calls.tolist()
    assert (run.num_measured, run.refusals, run.num_wanted) == (3, (), 3)
    assert "no GPU" in run.label
    nothing = measure(replay, columns, order, timer, budget_s=0)
    assert nothing.num_measured == 0
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="needs a CUDA device .* --measure 0"):
            timer_for(JOB.shape.head_dim, "auto", "cuda", MODEL)


def test_a_long_pass_is_run_once_unless_it_takes_longer_than_predicted(monkeypatch):
    torch = pytest.importorskip("torch")
    from megatron_libra.replay import measuring

    timer = measuring.timer_for(JOB.shape.head_dim, "auto", "cpu", MODEL)
    runs = []
    taken = [0.7, 0.9]
    monkeypatch.setattr(measuring, "run_seconds", lambda run, device, count: [taken.pop(0)])
    monkeypatch.setattr(timer, "_median", lambda run: runs.append(run) or 0.65)
    assert timer.device == torch.device("cpu")
    assert timer._pass_seconds(lambda: None, 0.6) == 0.7
    assert runs == []
    assert timer._pass_seconds(lambda: None, 0.6) == 0.65, "0.9 s is a compilation, not a kernel"
    assert timer._pass_seconds(lambda: None, 0.1) == 0.65 and len(runs) == 2 and taken == []


def test_a_worker_that_cannot_be_run_is_told_and_the_others_go_on(monkeypatch):
    pytest.importorskip("torch")
    from megatron_libra.replay import measuring

    replay = prepared("libra")
    columns = part_columns(predicted(replay, MODEL))
    timer = measuring.timer_for(JOB.shape.head_dim, "auto", "cpu", MODEL)
    run_worker, turns = measuring.measure_worker, []

    def fails_first(calls, timer):
        turns.append(1)
        if len(turns) == 1:
            raise RuntimeError("out of\nmemory")
        return run_worker(calls, timer)

    monkeypatch.setattr(measuring, "measure_worker", fails_first)
    run = measuring.measure(replay, columns, [3, 0], timer, budget_s=60)
    assert (run.num_measured, run.refusals) == (1, ("out of memory",))


def test_every_kind_of_call_is_compiled_before_the_first_worker(monkeypatch):
    pytest.importorskip("torch")
    from megatron_libra.replay import measuring

    replay = prepared("ulysses", "libra")
    columns = part_columns(predicted(replay, MODEL))
    timer = measuring.timer_for(JOB.shape.head_dim, "auto", "cpu", MODEL)
    run_call, run_worker, small, later = timer.seconds, measuring.measure_worker, [], []

    def worker(calls, timer):
        later.extend((call.query_heads, call.kv_heads) for call in calls)
        return run_worker(calls, timer)

    def seconds(call):
        if not later:
            small.append((call.query_heads, call.kv_heads))
            assert call.round.query_stop == 2
        return run_call(call)

    monkeypatch.setattr(measuring, "measure_worker", worker)
    monkeypatch.setattr(timer, "seconds", seconds)
    measuring.measure(replay, columns, range(len(columns)), timer, budget_s=60)
    assert set(later) <= set(small) and len(set(small)) == len(small) > 1


def test_summaries_say_what_was_run(replay):
    """A series is measured if every straggler has a worker that was run, scaled if not."""
    times = pool_times(replay, predicted(replay, MODEL), MODEL)
    nothing = [np.zeros(work.num_workers, np.bool_) for work in replay.works]
    assert {each.times for each in summaries(replay, times, nothing)} == {"predicted"}
    assert source_notes(summaries(replay, times), {}) == ()
    rows = replay.of_series("libra")
    layer = times.layer[rows].reshape(4, 2)
    for index in replay.rows[rows[layer.argmax(axis=1) + 2 * np.arange(4)], 4]:
        nothing[index][1] = True
    found = {each.name: each for each in summaries(replay, times, nothing)}
    assert (found["libra"].times, found["ulysses"].times) == ("measured", "scaled")
    assert found["libra"].workers_run > 0 == found["ulysses"].workers_run
    assert source_of(list(found.values())) == "partly measured"
    (note,) = source_notes(list(found.values()), {"all": ModelError(4, 0.1, 0.2, 1.07)})
    assert "ulysses" in note and "x 1.070" in note and "libra" not in note
    for run in nothing[1:]:
        run[:] = False
    nothing[int(replay.rows[rows[0], 4])][:] = True
    some = {each.name: each for each in summaries(replay, times, nothing)}["libra"]
    assert some.times == "scaled" and "same method" in source_notes([some], {})[0]


def test_a_speedup_that_misleads_has_a_note(replay):
    found = {
        each.name: each
        for each in summaries(replay, pool_times(replay, predicted(replay, MODEL), MODEL))
    }
    ours = replace(found["libra"], speedup_mean=1.5, bound_mean=2.0)
    assert speed_notes([found["ulysses"], ours]) == ()
    (slow,) = speed_notes([found["ulysses"], replace(ours, speedup_mean=0.9)])
    assert "slower than Ulysses" in slow
    tap = replace(ours, name="tap", speedup_mean=0.9)
    assert speed_notes([tap]) == (), "a step of the ablation, nobody trains with it"
    (fast,) = speed_notes([replace(ours, speedup_mean=2.1), replace(tap, speedup_mean=2.0)])
    assert fast.startswith("libra: faster than perfect balance")
