"""The report is one file with every picture inside; pictures are the same in every run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_libra.cli.simulation import show_simulation
from megatron_libra.simulator.calibration import built_in
from megatron_libra.simulator.plots import FIGURES, draw, figures
from megatron_libra.simulator.report import (
    COLUMNS,
    columns_of,
    headings,
    html_report,
    model_sentence,
)
from megatron_libra.simulator.simulation import Simulation
from megatron_libra.simulator.units import bytes_text, gb_text, gib_text


def test_columns_by_hand(simulation: Simulation) -> None:
    best = simulation.recommendation.result
    cells = dict(zip(COLUMNS, columns_of(best, simulation), strict=True))
    skew = simulation.skew_of(best.candidate.pool_size, best.candidate.scope)
    assert cells["P"] == str(best.candidate.pool_size)
    assert cells["pools"] == f"{skew.after.mean():.4f}"
    assert cells["step"] == f"{best.speedup_step:.2f}x"
    reference = dict(zip(COLUMNS, columns_of(simulation.references["home"], simulation),
                         strict=True))  # fmt: skip
    assert (reference["pools"], reference["placer"]) == ("-", "home")


def test_the_source_of_times_is_stated(simulation: Simulation) -> None:
    assert "cost model by hand, read from a file" in model_sentence(simulation)
    default = replace(simulation, model=built_in("h200-fa4"))
    assert "not of your machine (measure it with libra calibrate" in model_sentence(default)


def test_a_report_is_complete_and_alone(simulation: Simulation) -> None:
    pytest.importorskip("matplotlib")
    page = html_report(simulation)
    assert re.findall(r'<figure id="(\w+)">', page) == list(FIGURES)
    assert page.count("data:image/svg+xml;base64,") == len(FIGURES)
    assert not re.findall(r'(?:src|href)="(?!data:)', page)
    assert "<script" not in page and "$" not in page
    assert page.count('class="best"') == 2  # among finalists and among all
    assert "libra-pool-size" in page and simulation.sampling.sentence in page


@pytest.mark.parametrize("name", FIGURES)
def test_pictures_are_reproducible(simulation: Simulation, name: str) -> None:
    pytest.importorskip("matplotlib")
    picture = draw(simulation, name)
    assert picture.startswith(b"<?xml") and picture == draw(simulation, name)


def test_without_matplotlib_the_extra_is_named(
    simulation: Simulation, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(figures.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"\.\[plots\]"):
        draw(simulation, "skew")


def test_small_jobs_have_units_and_large_ones_gb(simulation: Simulation) -> None:
    best = simulation.recommendation.result
    names = headings(simulation)
    cells = dict(zip(names.values(), columns_of(best, simulation), strict=True))
    assert (names["GB"], names["GB worker"], names["K/V GiB"]) == ("bytes", "bytes worker", "K/V")
    assert cells["bytes worker"] == bytes_text(round(best.worker_bytes))
    assert cells["K/V"] == bytes_text(round(best.resident_kv_bytes))
    large = replace(best, worker_bytes=4.206e9, pool_bytes=1.75e10, resident_kv_bytes=2**31)
    many = replace(simulation, finalists=(large, best))
    assert headings(many) == {name: name for name in COLUMNS}
    for result, amounts in ((large, ["17.5", "4.21", "2.00"]), (best, ["0.0", "0.00", "0.00"])):
        shown = dict(zip(COLUMNS, columns_of(result, many), strict=True))
        assert [shown[name] for name in ("GB", "GB worker", "K/V GiB")] == amounts


def test_bytes_in_sentences() -> None:
    assert (gb_text(4.206e9), gb_text(1.75e10, 1), gb_text(1e7)) == (
        "4.21 GB",
        "17.5 GB",
        "0.01 GB",
    )
    assert (gb_text(9.99e6), gb_text(5e7, 1), gb_text(0)) == ("9.53 MiB", "47.7 MiB", "0 B")
    assert (gib_text(2**31), gib_text(2**20), gib_text(3)) == ("2.00 GiB", "1 MiB", "3 B")


def test_a_report_without_a_recommendation_says_so_and_marks_nothing(
    simulation: Simulation,
) -> None:
    pytest.importorskip("matplotlib")
    for speedup, marks, said in ((1.2, 2, 0), (0.9, 0, 2)):  # in the reasons and in the run file
        result = replace(simulation.recommendation.result, speedup_step=speedup)
        recommendation = replace(simulation.recommendation, result=result)
        page = html_report(replace(simulation, recommendation=recommendation))
        assert page.count('class="best"') == marks
        assert page.count("Nothing is recommended: train without libra.") == said


def test_the_terminal_says_first_whether_something_is_recommended(
    simulation: Simulation, capsys: pytest.CaptureFixture[str]
) -> None:
    for speedup, first in ((1.2, "Recommended (*): P = "), (0.9, "Nothing is recommended: train")):
        result = replace(simulation.recommendation.result, speedup_step=speedup)
        show_simulation(
            replace(simulation, recommendation=replace(simulation.recommendation, result=result))
        )
        lines = [line for line in capsys.readouterr().out.splitlines() if "ecommended" in line]
        assert lines[0].startswith(first)
