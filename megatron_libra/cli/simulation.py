"""What `libra simulate` shows. In: stages, a Simulation. Out: bars on stderr, a table on stdout."""

from __future__ import annotations

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

from megatron_libra.simulator.report import COLUMNS, columns_of, model_sentence
from megatron_libra.simulator.simulation import Simulation

__all__ = ["show_progress", "show_simulation"]

NARROW = ("P", "B", "H", "scope", "pools", "GB worker", "tile/C", "step ms", "step")
"""Columns for a terminal below WIDE columns."""
WIDE = 150
TEXTS = ("scope", "placer")


@contextmanager
def show_progress() -> Iterator[Callable[[str], Callable[[int, int], None]]]:
    """A bar for each stage on stderr, so that stdout stays the answer."""
    columns = (TextColumn("{task.description:10}"), BarColumn(), MofNCompleteColumn(),
               TimeRemainingColumn())  # fmt: skip
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bars:
        tasks: dict[str, TaskID] = {}

        def told(stage: str) -> Callable[[int, int], None]:
            def update(finished: int, total: int) -> None:
                if stage not in tasks:
                    tasks[stage] = bars.add_task(stage, total=total)
                bars.update(tasks[stage], completed=finished, total=total)

            return update

        yield told


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
    for name in shown:
        table.add_column(name, justify="left" if name in TEXTS else "right", overflow="fold")
    best = simulation.recommendation.result
    named = list(simulation.references.items()) + [("", each) for each in simulation.finalists]
    for name, result in named:
        cells = dict(zip(COLUMNS, columns_of(result, simulation), strict=True))
        mark = name or ("*" if result.candidate == best.candidate else "")
        style = "bold" if mark == "*" else None
        table.add_row(mark, *(cells[name] for name in shown), style=style)
    console.print(table)
    c = best.candidate
    console.print(
        f"Recommended (*): P = {c.pool_size}, B = {c.block_size}, H = {c.head_split}, "
        f"M = {c.chunks}, scope {c.scope}, placer {c.placer}"
    )
    for reason in simulation.recommendation.reasons:
        console.print(f"- {reason}")
    console.print(f"\n{simulation.sampling.sentence}")
    console.print(model_sentence(simulation))
