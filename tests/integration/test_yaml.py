"""Run files: expansion to argv by hand, the command line wins, every fault is one clear line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from megatron_libra.integration.errors import RunError
from megatron_libra.integration.yaml import expand, load


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(allow_abbrev=False)
    made.add_argument("--seq-length", type=int)
    made.add_argument("--lr", type=float)
    made.add_argument("--bf16", action="store_true")
    made.add_argument("--no-rope-fusion", action="store_false", dest="rope_fusion")
    made.add_argument("--data-path", nargs="*")
    made.add_argument("--profile", action=argparse.BooleanOptionalAction, default=True)
    return made


def write(path: Path, text: str) -> Path:
    (path / "run.yaml").write_text(text)
    return path / "run.yaml"


def test_expands_by_hand(tmp_path: Path) -> None:
    settings = load(
        write(
            tmp_path,
            "seq_length: 4096\nlr: 1.0e-4\nbf16: true\nno-rope-fusion: false\n"
            "data-path: [0.3, corpus/a, 0.7, corpus/b]\nprofile: false\n",
        )
    )
    words = expand(settings, parser())
    assert " ".join(words) == (
        "--seq-length 4096 --lr 0.0001 --bf16 --data-path 0.3 corpus/a 0.7 corpus/b --no-profile"
    )
    args = parser().parse_args([*words, "--seq-length", "512"])
    assert (args.seq_length, args.bf16, args.rope_fusion) == (512, True, True)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        ({"seq-lenght": 1}, "seq-lenght: no such flag; did you mean seq-length?"),
        ({"qqq": 1}, "qqq: no such flag; the script's --help lists the flags."),
        ({"bf16": 1}, "bf16: 1 must be true or false; this flag takes no value."),
        ({"profile": "no"}, "profile: 'no' must be true or false; this flag takes no value."),
        ({"seq-length": [1, 2]}, "seq-length: [1, 2] is a list; this flag takes one value."),
        (
            {"seq-length": None},
            "seq-length: None must be a number or a text; remove the line to leave it out.",
        ),
        (
            {"lr": {"max": 1}},
            "lr: {'max': 1} must be a number or a text; remove the line to leave it out.",
        ),
    ],
)
def test_faults_are_one_line(settings: dict[str, Any], line: str) -> None:
    with pytest.raises(RunError) as fault:
        expand(settings, parser())
    assert str(fault.value) == line


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("- a\n- b\n", "must be a mapping"),
        ("a: [1\n", "not YAML"),
        ("", "must be a mapping"),
        ("[" * 9999, "not YAML"),
        ("a: 1\na: 1\n", "a is given twice; keep one"),
        ("a_b: 1\nc: 2\na-b: 3\n", "a-b is given twice; keep one"),
    ],
)
def test_unreadable_files_are_one_line(tmp_path: Path, text: str, part: str) -> None:
    with pytest.raises(RunError, match=part) as fault:
        load(write(tmp_path, text))
    assert "\n" not in str(fault.value)


def test_a_file_that_is_no_text_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_bytes(b"seq-length: \xff\xfe")
    with pytest.raises(RunError, match="not YAML"):
        load(path)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="No such file"):
        load(tmp_path / "none.yaml")
