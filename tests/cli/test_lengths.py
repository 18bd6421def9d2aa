"""`libra lengths`: what it shows, what it writes, and its faults as one line with exit code 2."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from megatron_libra.data.corpora import packed_corpus
from megatron_libra.data.sidecar import load_sidecar, sidecar_path
from megatron_libra.data.summary import summarize_skew

CHAT = [
    [("system", "abcd"), ("user", "efgh"), ("system", "ijkl")],
    [("system", "m")],
]


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    lines = [{"messages": [{"role": r, "content": c} for r, c in talk]} for talk in CHAT]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_documents_and_their_skew(libra: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "docs.json"
    path.write_text("[5, 4, 3, 2]")
    answer = libra("lengths", path, "--seq-length", 8, "--pack", "best_fit", "--json").answer
    assert answer["lengths"]["samples"] == 4
    assert answer["lengths"]["tokens"] == 14
    # 5 3 | 4 2: work 34 and 20, mean 27.
    assert answer["skew"]["sequences"] == 2
    assert answer["skew"]["imbalance"] == pytest.approx(34 / 27 - 1)
    assert "skew" not in libra("lengths", path, "--json").answer


def test_packed_sequences_stay_as_they_are(libra: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "packs.json"
    path.write_text("[[5, 3], [4, 4], [8]]")
    answer = libra("lengths", path, "--seq-length", 8, "--json").answer
    assert answer["skew"]["sequences"] == 3
    assert answer["skew"]["imbalance"] == pytest.approx(64 / (130 / 3) - 1)


def test_an_empty_packed_sequence_makes_no_documents(
    libra: Callable[..., Any], tmp_path: Path
) -> None:
    """Two rows, two lengths: still lists of lists, as libra simulate takes them."""
    path = tmp_path / "packs.json"
    path.write_text("[[3, 3], []]")
    answer = libra("lengths", path, "--seq-length", 8, "--json").answer
    assert (answer["skew"]["sequences"], answer["skew"]["imbalance"]) == (2, 1)


def test_a_jsonl_in_capitals_is_a_chat(libra: Callable[..., Any], chat: Path) -> None:
    chat = chat.rename(chat.with_name("CHAT.JSONL"))
    words = ("--tokenizer", "byte", "--seq-length", 16, "--json")
    assert libra("lengths", chat, *words).answer["skew"]["fill"] == 1.0
    assert libra("lengths", chat, *words[2:]).answer["skew"]["fill"] == 1.0


def test_a_preset_is_what_libra_simulate_takes(libra: Callable[..., Any]) -> None:
    answer = libra("lengths", "longtail-256k", "--json").answer
    rows = packed_corpus("longtail-256k", num_sequences=16 * 128, seed=0)
    assert answer["skew"]["sequences"] == 2048
    assert answer["lengths"]["tokens"] == int(rows.flat.sum())
    assert answer["skew"] == asdict(summarize_skew(rows, 262_144))
    assert libra("lengths", "longtail-256k", "--seq-length", 262_144, "--json").answer == answer
    assert "longtail-1m" in libra("lengths", "longtail-1m").out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["longtail-2m"], "'longtail-2m' is neither a file nor a preset (longtail-256k, longtail"),
        (["longtail-256k", "--seq-length", 512], "seq_length (512) must be 262144 for longtail"),
        (["longtail-256k", "--pack", "cut"], "--pack: not with a preset (longtail-256k); leave"),
        (["longtail-256k", "--tokenizer", "byte"], "--tokenizer: not with a preset"),
    ],
)
def test_faults_of_a_preset(libra: Callable[..., Any], words: list[Any], message: str) -> None:
    run = libra("lengths", *words)
    assert (run.code, run.out) == (2, "")
    assert message in run.err and run.err.count("\n") == 1


def test_a_file_with_the_name_of_a_preset_is_a_file(
    libra: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("longtail-256k").write_text("[3]")
    assert "suffix '' must be one of .json" in libra("lengths", "longtail-256k").err


def test_a_table_for_people(libra: Callable[..., Any], tmp_path: Path) -> None:
    path = tmp_path / "docs.json"
    path.write_text("[5, 4, 3, 2]")
    run = libra("lengths", path, "--seq-length", 8)
    assert run.code == 0
    assert "docs.json" in run.out
    assert "attention skew" in run.out


def test_counting_writes_the_sidecar(libra: Callable[..., Any], chat: Path) -> None:
    run = libra("lengths", chat, "--tokenizer", "byte", "--json")
    assert run.answer["sidecar"] == str(sidecar_path(chat))
    assert list(load_sidecar(sidecar_path(chat), source=chat)) == [(8, 4), (1,)]
    assert libra("lengths", chat, "--json").answer["lengths"]["tokens"] == 13
    # Megatron folds the tail into the last conversation: 8 8 and 16.
    skew = libra("lengths", chat, "--seq-length", 16, "--json").answer["skew"]
    assert skew["imbalance"] == pytest.approx(256 / 192 - 1)
    assert skew["fill"] == 1.0


def test_counting_to_another_file(libra: Callable[..., Any], chat: Path) -> None:
    output = chat.parent / "out.npz"
    libra("lengths", chat, "--tokenizer", "byte", "-o", output, "--json")
    assert output.is_file()
    assert not sidecar_path(chat).exists()


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("[3, -1]", [], "lengths[1] (-1) must be an integer"),
        ("[]", [], "a.json has no sample with tokens"),
        ("[3, 9]", ["--seq-length", 8, "--pack", "greedy"], "lengths[1] (9) must be at most"),
        ("[[3, 9]]", ["--seq-length", 8], "--seq-length (8) must be at least the longest"),
        ("[3]", ["--seq-length", 8, "--pack", "x"], "--pack ('x') must be one of cut"),
        ("[3]", ["--pack", "x"], "--pack ('x') must be one of cut"),
        ("[3]", ["--pack", "cut"], "--pack: for --seq-length TOKENS, without which nothing is"),
        (
            "[[3, 4], [5]]",
            ["--seq-length", 8, "--pack", "best_fit"],
            "a.json holds packed sequences already; leave out what is named",
        ),
        ('{"sequences": [3], "sequences": [4]}', [], 'a.json: key "sequences" is given twice; wr'),
        ("[3, NaN]", [], "a.json: NaN is not a number; write [1200, 3000]"),
        ("[" + "7" * 4000 + "]", [], "lengths[0] (7777777777"),
        ("[3]", ["--tokenizer", "byte"], "counts the lines of a .jsonl"),
        ("[3]", ["--output", "x.npz"], "--output: for counting, which --tokenizer NAME asks for"),
        ("[3]", ["--workers", 2], "--workers: for counting, which --tokenizer NAME asks for"),
        ("[3]", ["--column", "x"], "is for .parquet files"),
        ("[3]", ["--workers", 0], "--workers"),
        ("[3]", ["--seq-length", 2**40], "--seq-length"),
    ],
)
def test_faults(
    libra: Callable[..., Any], tmp_path: Path, content: str, options: list[Any], message: str
) -> None:
    path = tmp_path / "a.json"
    path.write_text(content)
    run = libra("lengths", path, *options)
    assert (run.code, run.out) == (2, "")
    assert message in run.err
    assert run.err.count("\n") == 1 and len(run.err) < 500


@pytest.mark.parametrize(
    ("content", "options", "message"),
    [
        ("nothing", ["byte"], "a.jsonl, line 1: is not JSON"),
        ("{}", ["byte"], "a.jsonl, line 1: has no 'messages'"),
        (
            "{}",
            ["byte", "--output", "no/folder/a.npz"],
            "cannot be written: no/folder is no folder",
        ),
        ("{}", ["byte", "--output", "."], "cannot be written: it is a folder"),
        ("{}", ["byte", "--output", "/proc/a.npz"], "/proc/a.npz cannot be written: No such file"),
        ("{}", ["byte", "--output", "a.jsonl"], "a.jsonl cannot be written: it is what this"),
        ("{}", ["byte", "--output", "./a.jsonl"], "a.jsonl cannot be written: it is what this"),
        ("{}", ["json:loads"], "line 1: the counter raised TypeError"),
        ("{}", [":"], "tokenizer :: Empty module name; give MODULE:FUNCTION"),
        ("{}", ["byte", "--chat-template", "latin"], "latin: is not UTF-8"),
        ("{}", ["byte", "--pack", "cut"], "--pack: for --seq-length TOKENS"),
        (
            "{}",
            ["byte", "--pack", "cut", "--seq-length", "8"],
            "--pack: for documents, and the lines of a .jsonl are packed sequences already",
        ),
    ],
)
def test_faults_of_counting(
    libra: Callable[..., Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    content: str,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a.jsonl").write_text(content)
    Path("latin").write_bytes(b"\xe9")
    run = libra("lengths", "a.jsonl", "--tokenizer", *options)
    assert (run.code, run.out) == (2, "")
    assert message in run.err
    assert run.err.count("\n") == 1
    assert Path("a.jsonl").read_text() == content


def test_a_jsonl_without_its_sidecar_names_the_command(
    libra: Callable[..., Any], chat: Path
) -> None:
    run = libra("lengths", chat)
    assert run.code == 2
    assert f"libra lengths {chat} --tokenizer NAME" in run.err
