"""What libra replay prints and writes: narrow tables, terms, bounds, files, refusals."""

from __future__ import annotations

import json

import pytest

from tests.helpers.replay_cases import HEADS, PREDICTED, SIZES, SMALL


@pytest.mark.parametrize("figure", ["5", "11", "13", "14", "15"])
def test_tables_can_be_read_at_80_columns(libra, corpus, figure, monkeypatch):
    """No line is longer, no name or number is broken or cut; what is left out is named."""
    monkeypatch.setenv("COLUMNS", "80")
    sizes = SMALL if figure != "5" else (*SIZES, *HEADS, "--seq-length", 4096)
    narrow = libra("replay", corpus, *sizes, *PREDICTED, "--figure", figure).out
    assert max(map(len, narrow.splitlines())) <= 80 and "\u2026" not in narrow
    monkeypatch.setenv("COLUMNS", "200")
    wide = libra("replay", corpus, *sizes, *PREDICTED, "--figure", figure).out
    if figure == "13":
        assert "Not shown, for a wider terminal: GB pool" in narrow and "Not shown" not in wide
        assert [row for row in narrow.splitlines() if row.startswith(" tap_vrsp")]
        assert [row for row in wide.splitlines() if row.startswith(" Libra TAP + VRSP")]
        (row, *_) = (row.split() for row in narrow.splitlines() if row.startswith(" libra"))
        (full, *_) = (row.split() for row in wide.splitlines() if row.startswith(" Libra  "))
        assert set(row[1:]) < set(full[1:])


def test_a_table_has_no_negative_zero(capsys):
    from megatron_libra.bench.table import Column
    from megatron_libra.cli.replay_tables import _text

    assert _text(Column("ms", ".1f"), -0.04) == "0.0"
    assert _text(Column("ms", ".1f"), -0.06) == "-0.1"
    assert _text(Column("part", ".0%"), -0.001) == "0%"
    assert _text(Column("ms", ".1f"), None) == ""


def test_the_terms_of_the_time_add_up_in_print(libra, corpus):
    """All that is printed behind mean ms, within rounding."""
    table = libra("replay", corpus, *SMALL, *PREDICTED).out.split("straggler's time goes")[1]
    rows = [row.split()[1:] for row in table.splitlines() if row.startswith((" libra ", " Libra "))]
    assert rows and "Below 0" in table
    for row in rows:
        mean, *terms = map(float, row[-8:])
        assert mean == pytest.approx(sum(terms), abs=0.4) and "-0.0" not in row


def test_bounds_are_shown_for_every_method_that_has_pools(libra, corpus, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    run = libra("replay", corpus, *SMALL, *PREDICTED)
    bounds = {each["name"]: each["bound_mean"] for each in
              libra("replay", corpus, *SMALL, *PREDICTED, "--json").answer["series"]}  # fmt: skip
    lines = {"distca": "DistCA", "tap": "Libra TAP  ", "libra": "Libra  "}
    for name, start in lines.items():
        (line, *_) = (row for row in run.out.splitlines() if row.startswith(f" {start}"))
        assert f" {bounds[name]:.2f} " in line


REST = "tau 0.01, placer home_first, scope microbatch, backward_kv save."


@pytest.mark.parametrize(
    ("options", "line"),
    [
        ((), f"Plans of Libra: P 2, B 8, H 2, M by size, {REST}"),
        (("--figure", 11), f"Plans of Libra: P 1/2, B 8, H 2, M by size, {REST}"),
        (("--figure", 14), f"Plans of Libra: P 2/4, B 8, H 2, M by size, {REST}"),
        (
            ("--figure", 15),
            f"Plans of Libra TAP + VRSP: P 4, B 2/4/8/16, H 1/2/4, M 1, {REST}",
        ),
        (
            ("--chunks", 2, "--load-slack", 0.5, "--scope", "step", "--placer", "paper"),
            "Plans of Libra: P 2, B 8, H 2, M 2, tau 0.5, placer paper, scope step, "
            "backward_kv save.",
        ),
        (
            ("--method", "libra", "--method", "distca"),
            f"Plans of Libra: P 2, B 8, H 2, M by size, {REST}",
        ),
        (
            ("--method", "wlb", "--method", "tap"),
            "Plans of Libra TAP: P 2, B 8, H 2, M 1, tau 0.01, placer home_first, scope off, "
            "backward_kv save.",
        ),
        (("--method", "wlb"), None),
    ],
)
def test_the_choices_of_the_plans_are_shown(libra, corpus, tmp_path, monkeypatch, options, line):
    """Also of a prepared file, whose options are not on the command line; JSON has all of them."""
    monkeypatch.setenv("COLUMNS", "200")
    path = tmp_path / "made.npz"
    shown = libra("replay", corpus, *SMALL, *PREDICTED, *options).out
    assert libra("replay", corpus, *SMALL, *options, "--prepare", path).code == 0
    loaded = libra("replay", "--load", path, *PREDICTED).out
    for text in (shown, loaded):
        found = [each.rstrip() for each in text.splitlines() if each.startswith("Plans of")]
        assert found == ([] if line is None else [line])


def test_written_files_are_named(libra, corpus, tmp_path):
    pytest.importorskip("matplotlib")
    out, png, trace = (tmp_path / name for name in ("a.json", "a.png", "trace.json"))
    options = ("replay", corpus, *SMALL, *PREDICTED, "--out", out, "--png", png, "--trace", trace)
    text = libra(*options, "--trace-pool", "libra:0:1:0").out.replace("\n", "")
    assert f"Written: {out}" in text and f"Written: {png}" in text
    assert f"Written: {trace}" in text and "pool libra:0:1:0" in text and "ui.perfetto.dev" in text
    assert libra(*options, "--json").answer == json.loads(out.read_text())
    sizes = (*SIZES, *HEADS, "--seq-length", 4096)
    run = libra("replay", corpus, *sizes, *PREDICTED, "--figure", 5, "--out", out)
    assert f"Written: {out}" in run.out.replace("\n", "")


@pytest.mark.parametrize("figure", ["5", "13"])
def test_measuring_without_a_gpu_is_refused_before_planning(libra, corpus, figure, monkeypatch):
    def planned(*_):
        raise AssertionError("planned first")

    monkeypatch.setattr("megatron_libra.cli.replay_measuring._has_cuda", lambda: False)
    monkeypatch.setattr("megatron_libra.cli.replay.read_windows", planned)
    run = libra("replay", corpus, *SIZES, *HEADS, "--measure", 1, "--figure", figure)
    assert (run.code, run.out) == (2, "")
    assert "needs a CUDA device" in run.err and "try --measure 0" in run.err
    assert run.err.count("\n") == 1


def test_a_prepared_file_is_no_corpus(libra, corpus, tmp_path):
    path = tmp_path / "made.npz"
    assert libra("replay", corpus, *SMALL, "--prepare", path).code == 0
    run = libra("replay", path, *SMALL, *PREDICTED)
    assert (
        run.code == 2 and f"{path} is a prepared replay, not a corpus; try --load {path}" in run.err
    )
