"""What `libra replay` shows. In: tables, summaries, errors. Out: rich tables on stdout."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_libra.bench.table import Cell, Column
from megatron_libra.replay.figures import FigureTable
from megatron_libra.replay.report import Summary
from megatron_libra.replay.sampling import ModelError
from megatron_libra.replay.throughput import ThroughputGrid

__all__ = ["show_errors", "show_figure", "show_losses", "show_notes", "show_throughput"]

LOSS_TITLES = {
    "inside": "slowest worker computes more",
    "first": "first dispatch",
    "middle": "between chunks",
    "last": "last return",
    "slowed": "slowed by transfers",
}


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def _show(
    title: str,
    key_title: str,
    columns: Sequence[Column],
    rows: Iterable[tuple[str, Sequence[Cell]]],
) -> None:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  collapse_padding=True, pad_edge=False)  # fmt: skip
    table.add_column(key_title, overflow="fold")
    for column in columns:
        table.add_column(column.title, justify="right", overflow="fold")
    for key, cells in rows:
        texts = [column.text(cell) for column, cell in zip(columns, cells, strict=True)]
        table.add_row(key, *texts)
    _console().print(table)


def show_figure(table: FigureTable, note: str) -> None:
    """The figure's numbers, and what they are."""
    _show(table.title, table.key_title, table.columns, table.rows)
    _console().print(note)


def show_notes(notes: Sequence[str]) -> None:
    """What the numbers compare, if not like with like."""
    for note in notes:
        _console().print(f"{note}\n")


def show_losses(found: Sequence[Summary]) -> None:
    """Where the stragglers' time goes, milliseconds."""
    columns = [Column("mean ms", ".1f"), Column("all alike", ".1f"),
               Column("heavier pool", ".1f")]  # fmt: skip
    columns += [Column(title, ".1f") for title in LOSS_TITLES.values()]
    rows = [
        (each.title, (each.mean_ms, each.perfect_ms, each.between_ms,
                      *(each.losses_ms[name] for name in LOSS_TITLES)))
        for each in found
    ]  # fmt: skip
    _show("Where the straggler's time goes, ms", "method", columns, rows)


def show_errors(
    found: Sequence[Summary], errors: dict[str, ModelError | None], measured: dict[str, Any]
) -> None:
    """The model against measured workers."""
    columns = (Column("workers", "d"), Column("median error", ".1%"), Column("worst error", ".1%"),
               Column("measured / predicted", ".3f"))  # fmt: skip
    rows = [
        (each.title, (error.num_measured, error.median, error.worst, error.ratio))
        for each in found
        if (error := errors.get(each.name)) is not None
    ]
    title = f"Model against {measured['workers_measured']} measured workers ({measured['device']})"
    _show(title, "method", columns, rows)
    _console().print(
        f"{measured['workers_measured']} of {measured['workers_wanted']} wanted workers were "
        f"measured in {measured['seconds']:.1f} s, {measured['workers_refused']} could not be run"
        + (
            f", the first because: {measured['first_refusal']}"
            if measured["first_refusal"]
            else "."
        )
    )


def show_throughput(grid: ThroughputGrid) -> None:
    """Forward and backward, heads by block."""
    columns = [Column(str(block), ".0f") for block in grid.blocks]
    for name, values in (("Forward", grid.forward), ("Backward", grid.backward)):
        rows = [(str(heads), row.tolist()) for heads, row in zip(grid.heads, values, strict=True)]
        title = f"{name} TFLOP/s, {grid.num_keys} keys, {grid.label}"
        _show(title, "heads \\ B", columns, rows)
