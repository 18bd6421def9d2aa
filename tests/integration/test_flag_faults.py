"""A flag of libra that the parser cannot take: one line with the nearest flag, not all of
Megatron's usage. On plain parsers; test_launcher.py has the real one."""

from __future__ import annotations

import argparse

import pytest

from megatron_libra.integration import launch
from megatron_libra.integration.arguments import add_arguments


def parser(*, allow_abbrev: bool = False) -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="train", allow_abbrev=allow_abbrev)
    made.add_argument("--context-parallel-size", type=int)
    made.add_argument("--words", nargs="*")
    return add_arguments(made)


def refusal(words: str, capsys: pytest.CaptureFixture[str]) -> list[str]:
    """The lines on stderr of a command line that exits with code 2."""
    with pytest.raises(SystemExit) as caught:
        parser().parse_args(words.split())
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    return captured.err.splitlines()


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ("--libra-pol-size 4", "--libra-pol-size: no such flag; did you mean --libra-pool-size?"),
        ("--libra-pol-size=4", "--libra-pol-size: no such flag; did you mean --libra-pool-size?"),
        ("--libra_pool_size 4", "--libra_pool_size: no such flag; did you mean --libra-pool-size?"),
        ("-libra-pool-size 4", "-libra-pool-size: no such flag; did you mean --libra-pool-size?"),
        ("--libra-pool 4", "--libra-pool: no such flag; did you mean --libra-pool-size?"),
        (
            "--libra-plan 4",
            "--libra-plan: no such flag; did you mean --libra-plan-ahead or "
            "--libra-plan-timeout-s?",
        ),
        (
            "--libra-xyzzy-42",
            "--libra-xyzzy-42: no such flag; the script's --help lists the flags.",
        ),
        ("--lbra-pool-size 4", "--lbra-pool-size: no such flag; did you mean --libra-pool-size?"),
        (
            "--context-paralel-impl libra",
            "--context-paralel-impl: no such flag; did you mean --context-parallel-impl?",
        ),
        (
            "--libra-pool-size x",
            "--libra-pool-size: invalid int value: 'x'; try --libra-pool-size 8.",
        ),
        ("--libra-chunks", "--libra-chunks: expected one argument; try --libra-chunks CHUNKS."),
        ("--libra-cpu=yes", "--libra-cpu: ignored explicit argument 'yes'; try --libra-cpu."),
    ],
)
def test_one_line(words: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert refusal(words, capsys) == [f"megatron_libra: {line}"]


def test_each_flag_has_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    lines = refusal("--libra-block 4 --foo 3 --libra-chunk 2", capsys)
    assert [line.partition(": no")[0] for line in lines] == [
        "megatron_libra: --libra-block",
        "megatron_libra: --libra-chunk",
    ]


@pytest.mark.parametrize(
    "words", ["--foo", "--context-parallel-siz 2", "--context-parallel-size x"]
)
def test_other_flags_are_the_parser_s(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    lines = refusal(words, capsys)
    assert lines[0].startswith("usage: train")
    assert lines[-1].startswith("train: error: ")


def test_what_a_parser_takes_is_taken() -> None:
    """Abbreviations where they are allowed, values that look like flags, unknown words left."""
    args = parser(allow_abbrev=True).parse_args(["--libra-pool", "4"])
    assert args.libra_pool_size == 4
    assert parser().parse_args(["--words", "--libra-x y"]).words == ["--libra-x y"]
    assert parser().parse_known_args(["--libra-own", "4"])[1] == ["--libra-own", "4"]


def test_other_ranks_let_rank_0_speak_first(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun ends them once rank 0 has exited."""
    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    for rank, expected in (("0", []), ("3", [launch.PATIENCE_S])):
        monkeypatch.setenv("RANK", rank)
        assert len(refusal("--libra-pol-size 4", capsys)) == 1
        assert waited == expected
