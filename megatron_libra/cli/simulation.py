"""What `libra simulate` shows. In: stages, a Simulation. Out: bars on stderr, a table on stdout."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from megatron_libra.simulator.report import COLUMNS, columns_of, headings, model_sentence
from megatron_libra.simulator.run_file import NOTHING
from megatron_libra.simulator.simulation import Simulation

__all__ = ["show_progress", "show_simulation"]

NARROW = ("P", "B", "H", "scope", "pools", "GB worker", "tile/C", "step ms", "step")
"""Columns for a terminal below WIDE columns."""
WIDE = 150
QUIET_S = 5.0
"""Seconds after which a stage says in a log, where there are no bars, how far it is; once."""
TEXTS = ("scope", "placer")


@contextmanager
def show_progress() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar for each stage on stderr, so that stdout stays the answer; in a log, a line for each
    long stage.
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
    """For logs: a line for each stage that takes longer than QUIET_S."""
    last = time.monotonic()
    begun: dict[str, float] = {}
    said = set()

    def update(stage: str, finished: int, total: int) -> None:
        nonlocal last
        seconds = time.monotonic() - begun.setdefault(stage, last)  # since the stage before it
        last = begun[stage] + seconds
        if stage not in said and seconds >= QUIET_S and 0 < finished < total:
            said.add(stage)
            left = seconds / finished * (total - finished)
            console.print(f"{stage}: {finished} of {total}, about {left:.0f} s more")

    return update


def show_simulation(simulation: Simulation) -> None:
    """Print the finalists, and below them the recommendation with its reasons."""
    console = Console(highlight=False, markup=False, emoji=False)
    shown = NARROW if console.width < WIDE else tuple(COLUMNS)
    table = Table(
        title=f"{simulation.corpus_name}: {simulation.sequences.sequences:,} packed sequences, "
        f"{simulation.packing}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    heading = headings(simulation)
    for name in shown:
        table.add_column(
            heading[name], justify="left" if name in TEXTS else "right", overflow="fold"
        )
    best = simulation.recommendation.result
    named = list(simulation.references.items()) + [("", each) for each in simulation.finalists]
    for name, result in named:
        cells = dict(zip(COLUMNS, columns_of(result, simulation), strict=True))
        mark = name or ("*" if result.candidate == best.candidate else "")
        style = "bold" if mark == "*" and best.is_faster else None
        table.add_row(mark, *(cells[name] for name in shown), style=style)
    console.print(table)
    c = best.candidate
    if not best.is_faster:
        console.print(f"{NOTHING} The best choice is slower than {simulation.reference_name}.")
    title = "Recommended (*)" if best.is_faster else "Best of those tried (*)"
    console.print(
        f"{title}: P = {c.pool_size}, B = {c.block_size}, H = {c.head_split}, "
        f"M = {c.chunks}, scope {c.scope}, placer {c.placer}"
    )
    for reason in simulation.recommendation.reasons:
        console.print(f"- {reason}")
    console.print(f"\n{simulation.sampling.sentence}")
    console.print(model_sentence(simulation))
