"""How far a long command is. In: stages, and what of them is done. Out: bars or lines on stderr."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

__all__ = ["show_progress"]

QUIET_S = 5.0
"""Seconds after which a stage says in a log, where there are no bars, how far it is. It says so
again after twice that time, and so on: the first estimate is a poor one."""


@contextmanager
def show_progress() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar for each stage on stderr, so that stdout stays the answer; in a log, a few lines for
    each long stage.
    """
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks: dict[str, TaskID] = {}
        logged = _log_lines(console)

        def told(stage: str) -> Callable[[int, int], None]:
            def update(finished: int, total: int) -> None:
                if not console.is_terminal:
                    logged(stage, finished, total)
                    return
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                bars.update(tasks[stage], completed=finished, total=total)

            return update

        yield told


def _log_lines(console: Console) -> Callable[[str, int, int], None]:
    """For logs: lines for each stage that takes longer than QUIET_S."""
    last = time.monotonic()
    begun: dict[str, float] = {}
    next_s: dict[str, float] = {}

    def update(stage: str, finished: int, total: int) -> None:
        nonlocal last
        seconds = time.monotonic() - begun.setdefault(stage, last)  # since the stage before it
        last = begun[stage] + seconds
        if seconds >= next_s.get(stage, QUIET_S) and 0 < finished < total:
            next_s[stage] = 2 * seconds
            left = seconds / finished * (total - finished)
            console.print(f"{stage}: {finished} of {total}, about {left:.0f} s more")

    return update
