"""Progress where stderr is no terminal: a few lines for a long stage, none for short ones."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from megatron_libra.cli import progress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """Seconds, to be set."""
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    yield now


def test_a_log_has_lines_for_a_long_stage(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.show_progress() as told:
        for stage, seconds in (("packing", 0.5), ("screening", 4.0), ("finalists", 0.1)):
            for finished in range(1, 6):
                clock[0] += seconds
                told(stage)(finished, 5)
    captured = capsys.readouterr()
    assert captured.out == ""
    # 8 s of the stage after two of its five parts: 4 s each; then after twice as long
    assert captured.err.splitlines() == [
        "screening: 2 of 5, about 12 s more", "screening: 4 of 5, about 4 s more"
    ]  # fmt: skip


def test_a_stage_of_many_parts_says_little(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.show_progress() as told:
        for finished in range(1, 1000):
            clock[0] += 1.0
            told("screening")(finished, 1000)
    lines = capsys.readouterr().err.splitlines()
    assert [int(line.split()[1]) for line in lines] == [5, 10, 20, 40, 80, 160, 320, 640]


def test_a_stage_that_is_done_or_has_not_begun_says_nothing(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    with progress.show_progress() as told:
        clock[0] = 60.0
        told("measuring")(0, 3)
        told("planning")(1, 1)
    assert capsys.readouterr().err == ""
