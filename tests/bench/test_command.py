"""`libra bench plans` as people run it: tables, JSON, a document, faults in one line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from megatron_libra.bench.document import read_rows

ROOT = Path(__file__).resolve().parent.parent.parent
SMALL = ("--seq-length", "4096", "--context-parallel-size", "2", "--pool-size", "2")


def libra(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", "from megatron_libra.cli import main; main()", "bench", "plans"]
        + [str(argument) for argument in arguments],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=120,
        check=False,
    )


@pytest.fixture
def documents(tmp_path):
    lengths = np.random.default_rng(0).lognormal(5, 1.5, 400).astype(int) + 1
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(lengths.tolist()))
    return path


def test_every_planner_on_a_file(documents):
    run = libra("--lengths", documents, *SMALL, "--json")
    assert (run.returncode, run.stderr) == (0, "")
    (table,) = json.loads(run.stdout)
    assert table["name"] == "planners documents"
    assert table["command"] == "libra bench plans --table planners --lengths documents.json"
    rows = {row[0]: dict(zip(table["columns"], row, strict=True)) for row in table["rows"]}
    assert len(rows) == 11
    ours, ulysses = rows["ours, B 2048 H 16, tau 0.01"], rows["Ulysses"]
    assert 1 <= ours["max / mean"] <= 1.01 <= ulysses["max / mean"]
    assert all(row["worst pool"] >= row["max / mean"] >= 1 for row in rows.values())


def test_a_document_is_written_in_place(documents, tmp_path):
    document = tmp_path / "results.md"
    document.write_text("# Here\n\n<!-- table targets documents -->\n<!-- end -->\n")
    run = libra("--table", "targets", "--lengths", documents, *SMALL, "--write", document)
    assert (run.returncode, run.stderr) == (0, "")
    assert "ours, B 2048 H 16" in run.stdout
    rows = read_rows(document.read_text(), "targets documents")
    assert list(rows)[0] == "ours, B 4096 H 16" and list(rows)[-1] == "floor"
    assert float(rows["floor"][1]) <= float(rows["ours, B 1024 H 16"][1])


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        (("--table", "figure-2"), "table 'figure-2' must be one of planners"),
        (("--corpus", "x"), "corpus 'x' must be one of longtail-256k"),
        (("--lengths", "none.json"), "none.json does not exist"),
        (("--distca-preset",), "--distca-preset: for the files of --lengths, and none is given"),
        (("--lengths", "LICENSE", "--seq-length", "100"), "seq_length (100) must be a multiple of"),
        (("--table", "steps", "--write", "LICENSE"), "no place for table 'steps'"),
    ],
)
def test_faults_are_one_line(arguments, fault):
    run = libra(*arguments)
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith("error: ") and fault in run.stderr
    assert run.stderr.count("\n") == 1
