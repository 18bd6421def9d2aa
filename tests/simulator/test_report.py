"""The report is one file with every picture inside; pictures are the same in every run."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from megatron_libra.simulator.calibration import built_in
from megatron_libra.simulator.plots import FIGURES, draw, figures
from megatron_libra.simulator.report import COLUMNS, columns_of, html_report, model_sentence
from megatron_libra.simulator.simulation import Simulation


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
