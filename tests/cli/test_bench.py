"""libra bench plans: what cannot work is refused in one line, before the first plan."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

PLACE = "<!-- table targets docs -->\n<!-- end -->\n"
SMALL = ("--seq-length", 4096, "--context-parallel-size", 2, "--pool-size", 2)


@pytest.fixture
def nothing_begins(monkeypatch):
    """The first plan fails the test."""

    def begun(*_):
        raise AssertionError("it began")

    monkeypatch.setattr("megatron_libra.cli.bench._compute", begun)


@pytest.fixture
def docs(write) -> Path:
    """Lengths of documents, enough for two sequences of 4096 tokens."""
    return write([1000] * 10, "docs.json")


def refused(run) -> str:
    """The one line on stderr."""
    assert (run.code, run.out) == (2, ""), run.err
    assert run.err.startswith("error: ") and run.err.count("\n") == 1
    return run.err


def test_a_document_may_hold_any_text(libra, docs, tmp_path):
    document = tmp_path / "results.md"
    document.write_text("# \u00b5s\n\n" + PLACE, encoding="utf-8")
    run = libra("bench", "plans", "--table", "targets", "--lengths", docs, *SMALL, "--write",
                document)  # fmt: skip
    assert (run.code, run.err) == (0, "")
    text = document.read_text(encoding="utf-8")
    assert text.startswith("# \u00b5s\n\n<!-- table targets docs -->") and "| floor |" in text


def test_a_log_says_how_many_rows_are_planned(libra, docs, monkeypatch):
    monkeypatch.setattr("megatron_libra.cli.progress.QUIET_S", 0.0)
    run = libra("bench", "plans", "--table", "planners", "--lengths", docs, *SMALL)
    lines = run.err.splitlines()
    assert run.code == 0 and lines[0].startswith("planning: 1 of ")
    numbers = [int(line.split()[1]) for line in lines]
    total = int(lines[0].split()[3].rstrip(","))
    assert numbers == sorted(set(numbers)) and numbers[-1] < total
    assert run.out.count("\n| ") >= total  # Markdown, a line for each row


@pytest.mark.parametrize("content", [b"# \xb5s\n", b"\xff\xfe"])
def test_a_document_that_is_no_text_is_named(libra, nothing_begins, write, content):
    path = write(content, "results.md")
    place = content.index(max(content))
    message = refused(libra("bench", "plans", "--write", path))
    assert f"--write {path} is not UTF-8 (byte {place} is 0x{max(content):02x})" in message


def test_a_document_without_a_place_is_named(libra, nothing_begins, write):
    path = write("# Results\n", "results.md")
    message = refused(libra("bench", "plans", "--write", path))
    assert f"{path}: the document has no place for table 'planners longtail-256k'" in message


def test_a_document_that_cannot_be_written_is_refused_first(
    libra, nothing_begins, write, docs, monkeypatch
):
    """Root may write everything, so the system's answer stands in."""
    path = write(PLACE, "results.md")
    words = ("bench", "plans", "--table", "targets", "--lengths", docs, *SMALL, "--write", path)
    with pytest.raises(AssertionError, match="it began"):
        libra(*words)
    monkeypatch.setattr("os.access", lambda path, mode: mode != os.W_OK)
    assert f"{path} cannot be written: no permission" in refused(libra(*words))


def test_a_document_is_no_file_of_lengths(libra, nothing_begins, docs):
    message = refused(libra("bench", "plans", "--lengths", docs, "--write", docs))
    assert f"{docs} cannot be written: it is what this command reads" in message


def test_presets_and_files_have_an_option_each(libra, nothing_begins, docs):
    message = refused(libra("bench", "plans", "--lengths", "longtail-256k"))
    assert (
        "--lengths (longtail-256k) is a preset, not a file; try --corpus longtail-256k." in message
    )
    message = refused(libra("bench", "plans", "--corpus", docs))
    assert f"--corpus ({docs}) is a file, not a preset; try --lengths {docs}." in message


def test_a_file_with_the_name_of_a_preset_is_a_file(libra, nothing_begins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("longtail-256k").write_text("[3]")
    with pytest.raises(AssertionError, match="it began"):
        libra("bench", "plans", "--lengths", "longtail-256k")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--seq-length", 10**15),
            "'--seq-length': Input should be less than or equal to 21474836",
        ),
        (("--pool-size", 10**15), "'--pool-size': Input should be less than or equal to 4096"),
        (("--context-parallel-size", 10**15), "'--context-parallel-size': Input should be less th"),
        (("--processes", 10**6), "'--processes': Input should be less than or equal to 1024"),
        (
            ("--pool-size", 1024),
            "--pool-size (1024) x --context-parallel-size (8) are 8192 workers of a pool; at most "
            "4096 are planned; try --pool-size 512.",
        ),
        (
            ("--seq-length", 2**30),
            "--pool-size (8) sequences of --seq-length (1073741824) are 8589934592 tokens of a "
            "pool; it holds at most 2147483647; try --seq-length 3969008.",
        ),
        (
            ("--seq-length", 2**27),
            "--seq-length (134217728) makes about 16781312 tiles of a pool of --pool-size (8); at "
            "most 500000 are planned; try --seq-length 3969008.",
        ),
    ],
)
def test_an_absurd_size_is_refused_at_once(libra, nothing_begins, docs, arguments, words):
    message = refused(libra("bench", "plans", "--lengths", docs, *arguments))
    assert words in message and str(arguments[1]) in message


@pytest.mark.parametrize("length", [2**30, 2**27])
def test_the_sequence_length_that_is_named_can_be_planned(libra, nothing_begins, docs, length):
    """It is the largest: one step of 2 CP more is refused."""
    words = ("bench", "plans", "--lengths", docs, "--seq-length")
    way_out = int(refused(libra(*words, length)).split("try --seq-length ")[1].rstrip(".\n"))
    assert way_out < length
    with pytest.raises(AssertionError, match="it began"):
        libra(*words, way_out)
    assert f"try --seq-length {way_out}." in refused(libra(*words, way_out + 16))


def test_sizes_of_a_file_need_one(libra, nothing_begins):
    message = refused(libra("bench", "plans", "--seq-length", 4096, "--pool-size", 4))
    assert "--seq-length, --pool-size: for the files of --lengths, and none is given" in message
