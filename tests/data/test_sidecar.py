"""The sidecar of a jsonl: written once, and never used for a file that changed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron_libra.data.rows import LengthRows
from megatron_libra.data.sidecar import build_sidecar, load_sidecar, read_source, sidecar_path

LINES = '{"text": "abc"}\n{"text": "defgh"}\n'


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text(LINES)
    return path


def test_build_then_load(chat: Path) -> None:
    path = build_sidecar(chat, tokenizer="byte")
    assert path == sidecar_path(chat) == chat.parent / "chat.jsonl.lengths.npz"
    assert list(load_sidecar(path, source=chat)) == [(3,), (5,)]
    source = read_source(path)
    assert (source.name, source.num_bytes, source.tokenizer) == ("chat.jsonl", len(LINES), "byte")


def test_another_output(chat: Path, tmp_path: Path) -> None:
    output = tmp_path / "elsewhere.npz"
    assert build_sidecar(chat, tokenizer="byte", output=output) == output
    assert list(load_sidecar(output, source=chat)) == [(3,), (5,)]
    assert not sidecar_path(chat).exists()


def test_a_copy_with_another_time_is_still_the_same_file(chat: Path) -> None:
    path = build_sidecar(chat, tokenizer="byte")
    os.utime(chat, ns=(1, 1))
    assert list(load_sidecar(path, source=chat)) == [(3,), (5,)]


@pytest.mark.parametrize("text", [LINES + '{"text": "i"}\n', LINES.replace("abc", "abd")])
def test_a_changed_file_is_stale(chat: Path, text: str) -> None:
    path = build_sidecar(chat, tokenizer="byte")
    chat.write_text(text)
    os.utime(chat, ns=(1, 1))
    with pytest.raises(
        ValueError, match="is stale.*count them again: libra lengths .*--tokenizer byte"
    ):
        load_sidecar(path, source=chat)


def test_a_missing_sidecar_names_the_command(chat: Path) -> None:
    with pytest.raises(ValueError, match=r"does not exist.*libra lengths .*chat.jsonl --tokenizer"):
        load_sidecar(sidecar_path(chat), source=chat)


def test_a_missing_jsonl_is_named(chat: Path) -> None:
    path = build_sidecar(chat, tokenizer="byte")
    chat.unlink()
    with pytest.raises(ValueError, match="chat.jsonl does not exist"):
        load_sidecar(path, source=chat)
    with pytest.raises(ValueError, match="chat.jsonl does not exist"):
        build_sidecar(chat, tokenizer="byte")


def test_another_npz_is_no_sidecar(tmp_path: Path) -> None:
    path = tmp_path / "rows.npz"
    LengthRows.from_flat([1]).save(path)
    with pytest.raises(ValueError, match="is no sidecar of a jsonl"):
        load_sidecar(path)
    LengthRows.from_flat([1]).save(path, source='{"name": 3}')
    with pytest.raises(ValueError, match="is no sidecar of a jsonl"):
        load_sidecar(path)


def test_a_failed_count_writes_nothing(chat: Path) -> None:
    chat.write_text(LINES + "{oops\n")
    with pytest.raises(ValueError, match="line 3: is not JSON"):
        build_sidecar(chat, tokenizer="byte")
    assert [file.name for file in chat.parent.iterdir()] == ["chat.jsonl"]
