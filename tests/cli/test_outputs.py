"""No output of a command replaces what the command reads, or another output."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from megatron_libra.data.sidecar import build_sidecar, sidecar_path
from megatron_libra.simulator.calibration import built_in, model_json
from megatron_libra.simulator.plots import require_matplotlib
from tests.helpers.replay_cases import HEADS, PREDICTED, SIZES, SMALL

SIMULATE = (*SIZES, *HEADS, "--processes", 1)
OUTPUTS = [("simulate", "--html"), ("simulate", "--yaml"), ("replay", "--prepare"),
           ("replay", "--out"), ("replay", "--png"), ("replay", "--trace")]  # fmt: skip
COMMANDS = {"simulate": SIMULATE, "replay": SMALL}


@pytest.fixture(autouse=True)
def nothing_begins(monkeypatch):
    """Reading a corpus or a prepared file fails the test."""

    def begun(*_, **__):
        raise AssertionError("it began")

    for name in ("simulate.load_corpus", "replay.read_windows", "replay.load_replay"):
        monkeypatch.setattr(f"megatron_libra.cli.{name}", begun)
    for name in ("simulate", "replay"):
        monkeypatch.setattr(f"megatron_libra.cli.{name}.require_matplotlib", lambda *_: None)


def check_refused(run, path: Path, kept: bytes) -> None:
    """One line that names the output; the file is as it was."""
    assert (run.code, run.out) == (2, ""), run.err
    assert f"{path} cannot be written: it is what this command reads" in run.err
    assert run.err.count("\n") == 1 and path.read_bytes() == kept


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_the_corpus_is_kept(libra, tmp_path, command, option):
    """Under its name, under another path to it, and under a second name of the same file."""
    corpus, link, twin = (tmp_path / f"{name}.json" for name in ("packs", "link", "twin"))
    corpus.write_text(json.dumps([[64]] * 8))
    link.symlink_to(corpus)
    os.link(corpus, twin)
    kept = corpus.read_bytes()
    for path in (corpus, tmp_path / ".." / tmp_path.name / "packs.json", link, twin):
        run = libra(command, corpus, *COMMANDS[command], option, path)
        check_refused(run, path, kept)


@pytest.mark.parametrize(("command", "option"), OUTPUTS)
def test_the_sidecar_of_a_chat_is_kept(libra, tmp_path, command, option):
    chat = tmp_path / "chat.jsonl"
    chat.write_text('{"messages": [{"role": "user", "content": "abcd"}]}\n')
    build_sidecar(chat, tokenizer="byte")
    path = sidecar_path(chat)
    kept = path.read_bytes()
    check_refused(libra(command, chat, *COMMANDS[command], option, path), path, kept)


@pytest.mark.parametrize(
    ("command", "option"), [each for each in OUTPUTS if "--prepare" not in each]
)
def test_the_cost_model_is_kept(libra, write, corpus, command, option):
    path = write(model_json(built_in("h200-fa4")), "mine.json")
    words = (*COMMANDS[command], "--cost-model", path, option, path)
    check_refused(libra(command, corpus, *words), path, path.read_bytes())


@pytest.mark.parametrize("option", ["--out", "--png", "--trace"])
def test_a_prepared_file_is_kept(libra, tmp_path, option):
    path = tmp_path / "replay.npz"
    path.write_bytes(b"prepared")
    check_refused(libra("replay", "--load", path, *PREDICTED, option, path), path, b"prepared")


def test_a_preset_reads_no_file(libra, tmp_path, monkeypatch):
    """A file that happens to have its name may be an output."""
    monkeypatch.chdir(tmp_path)
    Path("longtail-256k").touch()
    for command, option in (("simulate", "--yaml"), ("replay", "--out")):
        with pytest.raises(AssertionError, match="it began"):
            libra(command, "longtail-256k", option, "longtail-256k")


@pytest.mark.parametrize(
    ("command", "options"),
    [
        ("simulate", ("--html", "--yaml")),
        ("replay", ("--out", "--png")),
        ("replay", ("--out", "--trace")),
        ("replay", ("--png", "--trace")),
    ],
)
def test_two_outputs_need_two_files(libra, corpus, tmp_path, command, options):
    first, second = tmp_path / "a.png", tmp_path / ".." / tmp_path.name / "a.png"
    words = (*COMMANDS[command], options[0], first, options[1], second)
    run = libra(command, corpus, *words)
    assert (run.code, run.out) == (2, "") and run.err.count("\n") == 1
    assert f"{second} is given for two outputs" in run.err and not first.exists()


@pytest.mark.parametrize("figure", ["5", "13"])
def test_a_picture_is_a_png(libra, corpus, tmp_path, figure):
    """Told before the work; a suffix that is missing is not put behind a path in silence."""
    for name in ("a.pdf", "a.json", "a"):
        sizes = (*SIZES, *HEADS) if figure == "5" else SMALL
        words = (*sizes, *PREDICTED, "--figure", figure, "--png", tmp_path / name)
        run = libra("replay", corpus, *words)
        assert (run.code, run.out) == (2, "")
        assert f"--png ({tmp_path / name}) must end with .png; try {tmp_path / 'a.png'}." in run.err


def test_a_missing_package_is_told_before_the_work(libra, corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for command, option, pictures in (
        ("simulate", "--html", "the HTML report"),
        ("replay", "--png", "--png"),
    ):
        monkeypatch.setattr(f"megatron_libra.cli.{command}.require_matplotlib", require_matplotlib)
        run = libra(command, corpus, *COMMANDS[command], option, tmp_path / "a.png")
        assert run.code == 2 and "pictures need matplotlib" in run.err
        assert f"or leave {pictures} out" in run.err
