"""bench_scaling.py and pretrain_timed.py on the CPU: trainings with a clock on forwards, what
follows from their times by hand, and predictions. Times mean nothing here."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from types import SimpleNamespace

import numpy as np
import pytest

from tests.scripts.gpu_scripts import dry_run, on_path


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    yield from on_path(monkeypatch)


@pytest.mark.slow
def test_layouts_are_trained_timed_and_predicted(tmp_path):
    text, rows = dry_run("bench_scaling.py", tmp_path, "--layouts", "1x1x1", "1x1x2")
    runs = {row["run"]: row for row in rows if "run" in row}
    assert list(runs) == [
        f"{name}-dp1-cp1-pp{stages}" for stages in (1, 2) for name in ("ulysses", "libra")
    ]
    for name, row in runs.items():
        stages = int(name[-1])
        places = [(rank["stage"], rank["replica"], rank["context"]) for rank in row["forwards"]]
        assert places == [(stage, 0, 0) for stage in range(stages)]
        for rank in row["forwards"]:
            times = np.array(rank["forward_ms"])
            assert times.shape == (3, 2 * stages) and (times > 0).all()
            # a later stage's wait for its input is no forward: all are inside the iteration
            assert (times.sum(axis=1) < row["elapsed_ms"]).all()
        first, *others = [rank["attention_s"] for rank in row["forwards"]]
        assert np.array(first).shape == (3, 2 * stages, 2) and others == [None] * (stages - 1)
    first, piped = (row for row in rows if "comparison" in row)
    assert first["ulysses_efficiency"] == first["ulysses_predicted_efficiency"] == 1
    step = sum(runs["ulysses-dp1-cp1-pp1"]["elapsed_ms"][1:]) / 2
    assert first["ulysses_predicted_ms"] == pytest.approx(step)
    assert piped["rest_ms"] == first["rest_ms"] and piped["libra_forward_spread"] >= 1
    predicted = piped["ulysses_predicted_ms"] / piped["libra_predicted_ms"]
    assert piped["predicted_speedup"] == pytest.approx(predicted)
    assert 0.5 < piped["libra_predicted_efficiency"] < 1  # three of four units are no bubble
    assert text.count("the times mean nothing") == 3


class FakeEvent:
    """A CUDA event on a clock of its own: each record is 3 ms behind the last."""

    made: list = []

    def __init__(self, *, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.made.append(self)
        self.ms = 3.0 * len(self.made)

    def elapsed_time(self, other) -> float:
        return other.ms - self.ms


def test_events_are_read_when_training_is_over(monkeypatch):
    """Two steps of two microbatches on a rank that predicts: its pool's first worker."""
    import pretrain_timed
    import torch

    from megatron_libra import AttentionShape, LibraConfig, plan_pool
    from megatron_libra.simulator.calibration import built_in

    waits = []
    monkeypatch.setattr(FakeEvent, "made", [])
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append(len(FakeEvent.made)))
    plan = plan_pool(
        [[900], [300, 200]], context_parallel_size=1, config=LibraConfig(pool_size=2),
        shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=128), seq_length=1024,
    )  # fmt: skip

    def record_of(**place: int) -> dict:
        monkeypatch.setattr(pretrain_timed, "place", lambda: place)

        def forward_step(*, current_microbatch: int) -> str:
            forwards.keep(plan)
            return "out"

        forwards = pretrain_timed.Forwards(forward_step, on_gpu=True)
        for number in (0, 1, 0, 1):
            assert forwards(current_microbatch=number) == "out"
        assert not waits
        record = forwards.record(built_in("h200-fa4"))
        assert len(waits) == 1
        waits.clear()
        return record

    found = record_of(stage=0, replica=2, context=0)
    assert found["forward_ms"] == [[3, 3], [3, 3]] and found["replica"] == 2
    assert np.array(found["attention_s"]).shape == (2, 2, 2)
    assert (np.array(found["attention_s"]) > 0).all()
    for place in ({"stage": 1}, {"replica": 1}, {"context": 1}):
        others = {"stage": 0, "replica": 0, "context": 0} | place
        assert record_of(**others)["attention_s"] is None


def rank_of(stage: int, replica: int, context: int, forward_ms: list, attention_s=None) -> dict:
    """What a rank of pretrain_timed.py writes."""
    return {
        "stage": stage, "replica": replica, "context": context,
        "forward_ms": forward_ms, "attention_s": attention_s,
    }  # fmt: skip


def test_the_spread_is_over_microbatches_and_replicas_of_the_first_stage():
    from bench_forwards import forward_spread

    warm = [100.0, 1.0]
    ranks = [
        rank_of(0, 0, 0, [warm, [1.0, 2.0], [2.0, 2.0]]),
        rank_of(0, 0, 1, [warm, [3.0, 1.0], [2.0, 2.0]]),  # its slower rank: 3 and 2
        rank_of(0, 1, 0, [warm, [2.0, 1.0], [2.0, 2.0]]),
        rank_of(1, 0, 0, [warm, [90.0, 1.0], [80.0, 2.0]]),
    ]
    assert forward_spread(ranks, 1) == pytest.approx((3 / 2 + 1) / 2)


def model_of(**sizes: int) -> SimpleNamespace:
    """What a prediction asks of a model; one layer unless said."""
    return SimpleNamespace(**{"num_layers": 1, "num_forwards": 1, **sizes})


def test_a_step_is_the_attention_of_its_slowest_group_and_the_rest():
    """One step of two microbatches on two groups; a rest of 6 ms is 2 of forward, 4 of backward."""
    from bench_forwards import attention_of, rest_of, step_ms

    ranks = [
        rank_of(0, 1, 0, [[]], [[[0.002, 0.004], [0.001, 0.002]]]),
        rank_of(0, 0, 0, [[]], [[[0.001, 0.002], [0.001, 0.002]]]),
        rank_of(0, 0, 1, [[]]),
    ]
    attention = attention_of(ranks, 0)
    assert attention.shape == (1, 2, 2, 2)
    assert step_ms(attention, model_of(), 1, 0.0) == pytest.approx(9)
    assert step_ms(attention, model_of(num_layers=3), 1, 6.0) == pytest.approx(27 + 12)
    # recomputed: 2 + 4 + 2 and 1 + 2 + 1, and a rest with as much again
    assert step_ms(attention, model_of(num_forwards=2), 1, 8.0) == pytest.approx(12 + 16)
    assert rest_of(39.0, attention, model_of(num_layers=3)) == pytest.approx(6)
    assert rest_of(8.0, attention, model_of()) is None


def test_stages_share_a_step_and_wait_for_each_other():
    """The example of simulator/pipeline.py: two stages, forwards of 1 and 3, backwards of 2 and 6;
    then the same made of half attention and half rest."""
    from bench_forwards import step_ms

    attention = np.array([[[[0.001, 0.002]], [[0.003, 0.006]]]])
    assert step_ms(attention, model_of(num_layers=2), 2, 0.0) == pytest.approx(19)
    even = np.array([[[[0.001, 0.002]], [[0.001, 0.002]]]])
    # stage times of 1 + 1 and 2 + 2 ms: three units of six, a bubble among them
    assert step_ms(even, model_of(num_layers=2), 2, 6.0) == pytest.approx(18)


def result_of(**changed) -> dict:
    """A comparison as it is written."""
    sizes = {"dp": 1, "cp": 1, "pp": 1, "model": {"num_layers": 2}, "preset": "a", "kernel": "k"}
    sizes |= {"seq_length": 8, "microbatches": 2, "cost_model": "m"}
    return {"comparison": True, **sizes, **changed}


def test_the_base_is_the_newest_dp_1_of_the_same_kind():
    from bench_scaling import base_of

    rows = [result_of(speedup=1), result_of(speedup=2), {"run": "x"}, result_of(dp=2)]
    rows += [result_of(cp=2), result_of(pp=2), result_of(model={"num_layers": 3})]
    assert base_of(rows, result_of(dp=4)) == rows[1]
    assert base_of(rows, result_of(dp=4, cp=2)) == rows[4]
    assert base_of(rows, result_of(dp=4, seq_length=16)) is None


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


def done_of(attention_s: dict, ms: float) -> dict:
    """One training of each, of a single rank."""
    return {
        name: [{"ms": ms, "forwards": [rank_of(0, 0, 0, [], value)]}]
        for name, value in attention_s.items()
    }


def test_a_layout_is_predicted_from_the_rest_of_dp_1(capsys):
    """DP 1: 10 ms, of them 3 attention. A larger layout waits for 9 or, balanced, for 4."""
    from bench_scaling import prediction

    args = Namespace(warmup=0, iterations=2, cost_model="mine")
    even = {"ulysses": [[[0.001, 0.002]]], "libra": [[[0.001, 0.002]]]}
    base = {"pp": 1, "speedup": 1.0}
    base |= prediction(args, model_of(), done_of(even, 20.0), base, base)
    assert (base["rest_ms"], base["predicted_speedup"]) == (7, 1)
    uneven = {"ulysses": [[[0.003, 0.006]]], "libra": [[[0.001, 0.003]]]}
    found = prediction(args, model_of(), done_of(uneven, 99.0), {"pp": 1, "speedup": 16 / 10}, base)
    assert found["predicted_speedup"] == pytest.approx(16 / 11)
    assert found["error_speedup"] == pytest.approx(100 * (10 / 11 - 1))
    assert found["ulysses_predicted_efficiency"] == pytest.approx(10 / 16)
    assert found["libra_predicted_efficiency"] == pytest.approx(10 / 11)
    slow = {"pp": 1, "speedup": 1.0}
    assert prediction(args, model_of(), done_of(even, 4.0), slow, slow) == {}
    assert "it was mine" in capsys.readouterr().out


def test_layouts_are_those_that_were_asked_for(capsys):
    from bench_scaling import layouts_of

    def found(**changed):
        args = Namespace(**{"gpus": 8, "context_parallel": 2, "layouts": None, **changed})
        return layouts_of(args, ArgumentParser())

    assert found() == [(1, 2, 1), (2, 2, 1), (4, 2, 1), (2, 2, 2)]
    assert found(layouts=["1x1x1", "4x1x2"]) == [(1, 1, 1), (4, 1, 2)]
    for wrong in ("4x2", "0x1x1", "9x1x1", "axbxc"):
        with pytest.raises(SystemExit):
            found(layouts=[wrong])
        assert f"layout ({wrong})" in capsys.readouterr().err
