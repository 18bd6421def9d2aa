"""The documents name what exists: files, functions, flags and commands."""

from __future__ import annotations

import json
import re
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from megatron_libra import LibraConfig
from megatron_libra.cli import main
from megatron_libra.integration.telemetry import IterationReport

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [
    "README.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    "docs/log.md",
    "docs/paper_map.md",
    "docs/replay.md",
    "docs/simulator.md",
    "docs/results/planning.md",
    "docs/results/replay.md",
    "docs/results/two_gpus.md",
    "docs/results/speed.md",
    "patches/README.md",
]
FOLDERS = ("megatron_libra", "configs", "scripts", "patches", "docs", "tests", "examples")


def run(arguments, monkeypatch, capsys):
    """What `libra` prints, on a terminal of 80 columns."""
    monkeypatch.setattr("sys.argv", ["libra", *arguments])
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        main()
    return capsys.readouterr().out


def paper_map_entries():
    """(path, name) of every `path.py: name` of the map, with the names that follow it."""
    text = (ROOT / "docs" / "paper_map.md").read_text()
    entry = re.compile(r"`([a-z_]+/[\w/]+\.py): ([\w.]+)`((?:, `[\w.]+`)*)")
    for path, first, others in entry.findall(text):
        for name in (first, *re.findall(r"`([\w.]+)`", others)):
            yield path, name


def test_the_map_names_functions_that_exist():
    entries = list(paper_map_entries())
    assert len(entries) > 30
    missing = []
    for path, name in entries:
        source = (ROOT / "megatron_libra" / path).read_text()
        if not all(re.search(rf"(?:def|class) {part}\b", source) for part in name.split(".")):
            missing.append(f"{path}: {name}")
    assert not missing, missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_paths_in_a_document_exist(document):
    text = (ROOT / document).read_text()
    named = set(re.findall(rf"(?<![\w/.-])((?:{'|'.join(FOLDERS)})/[\w./-]*\w)", text))
    missing = [path for path in sorted(named) if not (ROOT / path).exists()]
    assert not missing, missing


@pytest.mark.parametrize("document", DOCUMENTS)
def test_libra_flags_in_a_document_exist(document):
    text = (ROOT / document).read_text()
    known = {"--libra-" + field.name.replace("_", "-") for field in fields(LibraConfig)}
    known |= {"--libra-cpu", "--libra-log-file", "--libra-keep-one-queue"}
    assert set(re.findall(r"--libra-[a-z-]*[a-z]", text)) <= known


@pytest.mark.parametrize("document", DOCUMENTS)
def test_a_document_is_ascii_of_readable_width(document):
    lines = (ROOT / document).read_text(encoding="ascii").splitlines()
    prose = [line for line in lines if not line.startswith(("|", "    "))]
    assert max(map(len, prose)) <= 120


def test_the_readme_s_plan_is_what_libra_plan_prints(tmp_path, capsys, monkeypatch):
    text = (ROOT / "README.md").read_text()
    request = textwrap.dedent(re.search(r"\n    \{\"sequences\".*?\}\}\n", text, re.DOTALL)[0])
    shown = text.split("`libra plan POOL.json` prints")[1].split("`--json`")[0]
    pool = tmp_path / "POOL.json"
    pool.write_text(request)
    printed = run(["plan", str(pool)], monkeypatch, capsys).splitlines()
    printed = {" ".join(line.split()) for line in printed}
    expected = {" ".join(line.split()) for line in shown.splitlines() if "---" not in line}
    stale = {line for line in expected - printed if not line.startswith("planned in")} - {""}
    assert not stale, f"copy what `libra plan` prints for its POOL.json into README.md: {stale}"


def test_the_readme_s_window_is_read_and_has_every_key(tmp_path, capsys, monkeypatch):
    text = (ROOT / "README.md").read_text()
    request = textwrap.dedent(re.search(r"\n    \{\"sequences\"[^}]*\"scope\"[^}]*\}\n", text)[0])
    assert set(json.loads(request)) == {
        "sequences", "pool_size", "data_parallel_size", "pipeline_parallel_size", "scope",
    }  # fmt: skip
    window = tmp_path / "WINDOW.json"
    window.write_text(request)
    assert "8 sequences = 4 pools of 2" in run(["order", str(window)], monkeypatch, capsys)


def test_the_log_s_legend_has_every_key_and_the_line_as_it_is_written():
    text = (ROOT / "docs" / "log.md").read_text()
    names = [field.name for field in fields(IterationReport)]
    assert re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE) == names
    numbers = dict.fromkeys(names, 0.5) | {"iteration": 2, "losses": {}}
    written = re.sub(r"[\d.]+(?:E[+-]\d+)?", "#", IterationReport(**numbers).line())
    shown = re.sub(r"[\d.]+(?:E[+-]\d+)?", "#", " ".join(text.split("\n\n")[1].split()))
    assert shown == " ".join(written.split())


def test_words_and_letters_of_the_readme_are_in_the_word_list():
    words = (ROOT / "docs" / "paper_map.md").read_text().split("## Sections")[0]
    introduced = re.search(
        r"words and letters of this project \(([^)]*)\)",
        " ".join((ROOT / "README.md").read_text().split()),
    )[1]
    missing = [word for word in introduced.split(", ") if f"| {word} |" not in words]
    assert not missing and len(introduced) > 20, missing


def test_the_readme_leads_to_every_document():
    linked = set(re.findall(r"\]\(([\w/.-]+)\)", (ROOT / "README.md").read_text()))
    documents = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    assert documents | {"CONTRIBUTING.md", "patches/README.md"} <= linked
    assert not [path for path in linked if not (ROOT / path).exists()]


def test_the_simulator_s_speedups_are_what_libra_simulate_prints(capsys, monkeypatch):
    """Of its short command; the long example comes from the same planner at the same time."""
    text = " ".join((ROOT / "docs" / "simulator.md").read_text().split())
    flags = re.search(r"`(--lockstep --[^`]*)`", text)[1].split()
    shown = re.search(r"a step ([\d.]+x) as fast as with Ulysses, against ([\d.]+x)", text).groups()
    command = ["simulate", "longtail-256k", "--processes", "1", *flags]
    rows = run(command, monkeypatch, capsys).split("Recommended")[0].splitlines()
    printed = [row.split()[-1] for row in rows if row.endswith("x") or row.endswith("x ")]
    assert printed[2:] == list(shown), "run the commands of docs/simulator.md again, all of them"


def test_the_smallest_run_file_warms_up_within_any_number_of_iterations():
    """Megatron asserts that the warm-up is shorter than the run; the README runs two iterations."""
    settings = yaml.safe_load((ROOT / "configs" / "tiny_cpu.yaml").read_text())
    assert not {"lr-warmup-iters", "lr-warmup-samples"} & settings.keys()
    assert 0 <= settings["lr-warmup-fraction"] < 1
