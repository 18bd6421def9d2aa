"""Calibration without a GPU: a machine whose times are known, files of calls, and the command on
this CPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megatron_libra.cli import main
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.replay import machine
from megatron_libra.replay.calibrate import (
    FewCalls,
    MeasuredCall,
    fit_kernel,
    measure_calls,
)
from megatron_libra.replay.calls import KernelCall, table_of
from megatron_libra.replay.grid import FIT, HEADS, GridSize, fit_calls, plan_calls
from megatron_libra.replay.links import LinkFit
from megatron_libra.replay.machine import CalibrationWish, Measurements, fit_model, measure_machine
from megatron_libra.replay.measure import CallSeconds, CallTimer
from megatron_libra.replay.samples import read_measurements, write_measurements
from megatron_libra.simulator.calibration import built_in, load_cost_model

SIZE = GridSize(tokens=16_384, flops=2e12)
TRUTH = built_in("h200-fa4").kernels[128]
HOST = CallSeconds(76e-6, 103e-6)


class KnownTimer(CallTimer):
    """A machine whose calls take what the built-in model says, and 2 % of noise."""

    def __init__(self) -> None:
        super().__init__(ReferenceKernel(), torch.device("cpu"))
        self.random = np.random.default_rng(0)

    def seconds(self, call: KernelCall) -> CallSeconds:
        table = table_of([call])
        forward, backward = (
            float(cost.seconds(table, 132)[0] * self.random.normal(1, 0.02))
            for cost in (TRUTH.forward, TRUTH.backward)
        )
        return CallSeconds(forward, backward)


def _measured(budget_s: float = 60.0) -> list[MeasuredCall]:
    return measure_calls(KnownTimer(), 128, size=SIZE, heads=HEADS[128], budget_s=budget_s)


def test_workers_that_were_not_fitted_are_predicted() -> None:
    """The aim: a median error below 3 %, the worst below 10 %."""
    found = fit_kernel(_measured(), kernel="fa4", head_dim=128, num_sms=132, host=HOST)
    assert found.cost.forward.host_us == pytest.approx(76)
    assert [each.passes for each in found.validations] == ["forward", "backward"]
    for each in found.validations:
        assert each.workers is not None and each.workers.count == 16
        assert each.workers.median < 0.03 and each.workers.worst < 0.1
        assert each.fitted.count == len(fit_calls(128, SIZE, HEADS[128]))


def test_too_little_time_is_said() -> None:
    with pytest.raises(FewCalls, match="only 0 calls of head dimension 128 ran in 0 s.*--seconds"):
        _measured(budget_s=0.0)


def test_a_worker_that_is_not_whole_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0
        return now[0]

    monkeypatch.setattr("megatron_libra.replay.calibrate.time.perf_counter", clock)
    plans = plan_calls(128, SIZE)
    budget = len(fit_calls(128, SIZE, HEADS[128])) + 20.0  # a call a second
    tested = [each for each in _measured(budget_s=budget) if each.group != FIT]
    assert 0 < len(tested) < len(plans)
    for group in {each.group for each in tested}:
        whole = [each for each in plans if each.group == group]
        assert len(whole) == sum(each.group == group for each in tested)


def test_the_grid_and_the_plans_are_of_the_sizes_asked_for() -> None:
    for head_dim, heads in HEADS.items():
        grid = fit_calls(head_dim, SIZE, heads)
        assert len(grid) > 30 and max(each.call.flops for each in grid) <= SIZE.flops
        assert {(each.call.query_heads, each.call.kv_heads) for each in grid} == set(heads)
        groups = {each.group for each in plan_calls(head_dim, SIZE)}
        assert len(groups) == 16 and FIT not in groups


def _measurements() -> Measurements:
    return Measurements(
        label="a machine",
        kernel="fa4",
        num_sms=132,
        gather_gb_s=3000.0,
        host={128: HOST},
        calls=tuple(_measured()),
        links={"symmetric": LinkFit(380.0, 15.0, 0.0), "nccl": LinkFit(270.0, 50.0, 0.25)},
    )


def test_measured_links_and_given_ones() -> None:
    measured = _measurements()
    found = fit_model(measured, name="x", given={"inter_node_gb_s": 50.0}, transport="nccl")
    model = found.model
    assert (model.intra_node_gb_s, model.message_us, model.overlap_loss) == (270, 50, 0.25)
    assert model.inter_node_gb_s == 50 and model.gather_gb_s == 3000
    assert found.sources["inter_node_gb_s"] == "given"
    assert found.sources["intra_node_gb_s"] == "measured"
    alone = fit_model(replace(measured, links={}), name="x", given={}, transport="nccl")
    assert alone.model.intra_node_gb_s == built_in("h200-fa4").intra_node_gb_s
    assert set(alone.sources.values()) == {"default, not measured"}


def test_kept_calls_give_the_same_model(tmp_path: Path) -> None:
    measured = _measurements()
    write_measurements(tmp_path / "calls.json", measured)
    again = read_measurements(tmp_path / "calls.json")
    models = [
        fit_model(each, name="x", given={}, transport="symmetric") for each in (measured, again)
    ]
    assert models[0].model == models[1].model
    assert models[0].validations == models[1].validations


def test_the_command_names_the_file_of_a_single_call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "calls.json", tmp_path / "x.json"
    measured = _measurements()
    write_measurements(path, replace(measured, calls=measured.calls[:1]))
    assert _libra("--from-calls", path, "--out", out, monkeypatch=monkeypatch) == 2
    assert capsys.readouterr().err.startswith(f"error: {path}: no measurements")
    assert _libra("--from-calls", path, "--out", path, monkeypatch=monkeypatch) == 2
    assert "it is what this command reads" in capsys.readouterr().err
    assert len(json.loads(path.read_text())["calls"]) == 1 and not out.exists()


def test_a_model_that_fits_badly_is_not_written_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = tmp_path / "calls.json", tmp_path / "x.json"
    measured = _measurements()
    noise = np.random.default_rng(1)
    wild = [
        replace(each, seconds=CallSeconds(*(noise.lognormal(0, 2, 2) * 1e-3)))
        for each in measured.calls
    ]
    for calls, warned in ((measured.calls, False), (tuple(wild), True)):
        write_measurements(path, replace(measured, calls=calls))
        assert not _libra("--from-calls", path, "--out", out, monkeypatch=monkeypatch)
        captured = capsys.readouterr()
        text = " ".join(captured.out.split())
        assert f"libra simulate CORPUS --cost-model {out}" in text.replace(" x.json", "x.json")
        assert ("Warning: median errors up to" in captured.err) == warned
        assert captured.err.count("\n") == warned and "Warning" not in text
    assert not _libra("--from-calls", path, "--out", out, "--json", monkeypatch=monkeypatch)
    captured = capsys.readouterr()
    json.loads(captured.out)
    assert "not for decisions; raise --seconds or drop --quick" in captured.err


def test_links_that_cannot_be_measured_cost_no_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come first: what fails in seconds does not throw minutes of calls away."""

    def timed(*_: object) -> None:
        raise AssertionError("calls came first")

    def noisy(device: object) -> None:
        raise ValueError("more bytes took no longer")

    monkeypatch.setattr(machine.CallTimer, "seconds", timed)
    monkeypatch.setattr(machine, "_links", noisy)
    wish = CalibrationWish(device=torch.device("cpu"), head_dims=(64,), size=SIZE)
    with pytest.raises(ValueError, match="more bytes took no longer"):
        measure_machine(wish)
    with pytest.raises(ValueError, match="fa4 needs a CUDA device"):
        measure_machine(replace(wish, kernel="fa4"))


def test_a_cpu_is_measured_and_labelled(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = KnownTimer().seconds
    monkeypatch.setattr(machine.CallTimer, "seconds", lambda self, call: seconds(call))
    texts: list[str] = []
    wish = CalibrationWish(device=torch.device("cpu"), head_dims=(64,), size=SIZE)
    found = measure_machine(wish, texts.append)
    assert found.label == "CPU, reference kernel (no GPU was measured)"
    assert (found.num_sms, found.kernel, dict(found.links)) == (1, "reference", {})
    assert texts[:2] == ["links", "head dim 64: kernels"] and texts[-1] == "rows"
    assert texts[2].startswith("head dim 64: grid, call 1 of")


def _libra(*arguments: object, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr("sys.argv", ["libra", "calibrate", *map(str, arguments)])
    with pytest.raises(SystemExit) as end:
        main()
    return int(end.value.code or 0)


@pytest.mark.slow
def test_the_command_on_this_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From measuring to a file that the simulator reads, then fitted again from the calls."""
    out, kept = tmp_path / "mine.json", tmp_path / "calls.json"
    words = ("--device", "cpu", "--head-dim", "64", "--heads", "4x1", "--out", out,
             "--keep-calls", kept, "--inter-node-gb-s", "12.5")  # fmt: skip
    if _libra("--seconds", "12", *words, monkeypatch=monkeypatch):
        # this machine is busy: what the refusal suggests is enough
        assert "try --seconds 48 or --quick" in capsys.readouterr().err
        assert not _libra("--seconds", "48", *words, monkeypatch=monkeypatch)
    text = capsys.readouterr().out
    assert "no GPU was measured" in text and "workers of pools, not fitted" in text
    assert "inter_node_gb_s 12.5 (given)" in text and "message_us 26.2 (default" in text
    model = load_cost_model(str(out))
    assert (model.name, model.kernel, model.num_sms) == ("mine", "reference", 1)
    assert not _libra(
        "--from-calls", kept, "--out", out, "--json", "--inter-node-gb-s", "12.5",
        monkeypatch=monkeypatch,
    )  # fmt: skip
    answer = json.loads(capsys.readouterr().out)
    assert answer["cost_model"]["kernels"]["64"]["forward"]["step_ns"] == pytest.approx(
        model.kernels[64].forward.step_ns
    )
    assert load_cost_model(str(out)) == model


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--head-dim", "80"), "--head-dim ('80') must be of 64, 128, 256; try --head-dim 128,256"),
        (("--head-dim", "64,x"), "--head-dim ('x') must be of 64, 128, 256"),
        (("--head-dim", "9" * 5000), "must be of 64, 128, 256"),
        (("--heads", "8x3"), "--heads (8x3): kv heads must divide query heads"),
        (("--heads", "8"), "--heads ('8') must be numbers like 8x1; try --heads 8x1,32x4"),
        (("--heads", "0x1"), "--heads ('0x1') must be numbers like 8x1"),
        (("--heads", "9" * 5000 + "x1"), "must be numbers like 8x1; try --heads 8x1,32x4"),
        (("--transport", "tcp"), "--transport ('tcp') must be one of symmetric, nccl"),
        (("--kernel", "fa4"), "kernel (fa4): fa4 needs a CUDA device"),
        (("--out", "none/x.json"), "none/x.json cannot be written: none is no folder"),
        (("--heads", "9999999999999x1"), "--heads (9999999999999x1): at most 4096 heads"),
        (("--overlap-loss", "2"), "overlap_loss (2) must be from 0 to 1"),
        (("--intra-node-gb-s", "0"), "intra_node_gb_s (0.0) must be above 0"),
        (("--message-us", "inf"), "message_us (inf) must be finite"),
        (("--from-calls", "calls.json"), "--device: not with --from-calls"),
    ],
)
def test_bad_options_are_named(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = () if "--out" in arguments else ("--out", str(tmp_path / "x.json"))
    assert _libra("--device", "cpu", *out, *arguments, monkeypatch=monkeypatch) == 2
    assert message in capsys.readouterr().err


def test_without_a_gpu_the_way_out_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert _libra("--out", tmp_path / "x.json", monkeypatch=monkeypatch) == 2
    assert "there is no CUDA device; try --device cpu" in capsys.readouterr().err
