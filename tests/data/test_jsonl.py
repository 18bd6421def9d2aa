"""Counting a whole jsonl: the rows do not depend on how the file is cut into ranges."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatron_libra.data import jsonl
from megatron_libra.data.jsonl import count_jsonl, lines_of_range


def write_lines(path: Path, texts: list[str], newline: str = "\n") -> Path:
    path.write_bytes("".join(json.dumps({"text": text}) + newline for text in texts).encode())
    return path


def test_rows_are_the_lines_in_order_and_blank_lines_are_none(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "abc"}\n\n  \n{"text": ""}\r\n{"text": "d"}')
    assert list(count_jsonl(path, tokenizer="byte")) == [(3,), (0,), (1,)]


@pytest.mark.parametrize("range_bytes", [1, 7, 16, 17, 50, 10_000])
def test_ranges_of_any_size_give_the_same_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, range_bytes: int
) -> None:
    texts = ["x" * (i * 7 % 23) for i in range(30)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(jsonl, "RANGE_BYTES", range_bytes)
    seen: list[int] = []
    rows = count_jsonl(path, tokenizer="byte", progress=seen.append)
    assert list(rows) == [(len(text),) for text in texts]
    assert sum(seen) == path.stat().st_size


def test_a_line_belongs_to_the_range_of_its_first_byte(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"12345\n789\n")
    assert list(lines_of_range(path, 0, 1)) == [(0, b"12345\n")]
    assert list(lines_of_range(path, 1, 6)) == []
    assert list(lines_of_range(path, 6, 7)) == [(6, b"789\n")]


def test_processes_give_the_same_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = ["y" * (i % 13) for i in range(50)]
    path = write_lines(tmp_path / "a.jsonl", texts)
    monkeypatch.setattr(jsonl, "RANGE_BYTES", 200)
    rows = count_jsonl(path, tokenizer="byte", num_workers=2)
    assert list(rows) == [(len(text),) for text in texts]


def test_a_function_may_count_conversations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "talk_counter_xyz.py").write_text("def parts(line):\n    return line['parts']\n")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "a.jsonl"
    path.write_text('{"parts": [3, 4]}\n{"parts": 5}\n')
    assert list(count_jsonl(path, tokenizer="talk_counter_xyz:parts")) == [(3, 4), (5,)]
    for bad, message in [
        ('{"parts": []}', "a.jsonl, line 3: has no conversation"),
        ('{"parts": [-1]}', r"line 3: tokens\[0\] \(-1\) must be an integer"),
        ('{"parts": "x"}', r"line 3: tokens\[0\] \('x'\) must be an integer"),
        ('{"party": 1}', r"line 3: the counter raised KeyError\('parts'\)"),
    ]:
        path.write_text('{"parts": 3}\n\n' + bad + "\n")
        with pytest.raises(ValueError, match=message):
            count_jsonl(path, tokenizer="talk_counter_xyz:parts")


def test_the_line_of_an_error_is_its_line_in_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_lines(tmp_path / "a.jsonl", ["abc"] * 9)
    with path.open("a") as stream:
        stream.write("{oops\n")
    monkeypatch.setattr(jsonl, "RANGE_BYTES", 20)
    with pytest.raises(ValueError, match="a.jsonl, line 10: is not JSON"):
        count_jsonl(path, tokenizer="byte")


def test_a_line_that_python_cannot_read_is_one_of_ours(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    for line, reason in (
        (b"[" * 100_000, "nests too deeply"),
        (b"9" * 5000, "has an integer of some thousand digits"),
        (b"\xff\xff", "is not UTF-8: byte 0 is 0xff"),
    ):
        path.write_bytes(line + b"\n")
        with pytest.raises(ValueError, match=f"line 1: {reason}; write one JSON object a line"):
            count_jsonl(path, tokenizer="byte")


def test_a_file_without_lines_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ValueError, match="has no lines"):
        count_jsonl(path, tokenizer="byte")
    path.write_text("")
    with pytest.raises(ValueError, match="has no lines"):
        count_jsonl(path, tokenizer="byte")
