"""What `libra replay` shows. In: tables, summaries, errors. Out: rich tables on stdout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from textwrap import wrap
from typing import Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

from megatron_libra.bench.table import Cell, Column
from megatron_libra.replay.figures import FigureTable
from megatron_libra.replay.report import Summary
from megatron_libra.replay.sampling import ModelError
from megatron_libra.replay.throughput import ThroughputGrid

__all__ = [
    "show_errors",
    "show_figure",
    "show_losses",
    "show_notes",
    "show_throughput",
    "show_written",
]

LOSS_TITLES = {
    "inside": "worker over mean",
    "first": "first dispatch",
    "middle": "between chunks",
    "last": "last return",
    "slowed": "slowed",
}
LOSS_NOTE = (
    "mean ms = the sum of the columns behind it: computation if all pools and workers were alike; "
    "the straggler pool's over a mean pool; that of the worker that ends last over the mean of its "
    "pool; what this worker waits; what transfers slow it down. Below 0: it computes less than the "
    "mean and is last all the same, because it waits longer."
)


@dataclass(frozen=True, slots=True)
class _Row:
    """A row's key, the key for a narrow terminal, and its cells."""

    key: str
    short: str
    cells: Sequence[Cell]


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False)


def _text(column: Column, cell: Cell) -> str:
    """As the column prints it, without a sign of zero."""
    text = column.text(cell)
    return text[1:] if text.startswith("-") and not text.strip("-0.%") else text


def _show(
    title: str,
    key_title: str,
    columns: Sequence[Column],
    rows: Sequence[_Row],
    optional: Sequence[str] = (),
) -> None:
    """Print what fits the terminal: all columns, then short keys, then without optional columns,
    the first one first. Titles break between words, cells never."""
    console, left_out = _console(), list[str]()
    table = _table(title, key_title, columns, rows, left_out, is_short=False)
    for name in ("", *optional):
        if _width(console, table) <= console.width:
            break
        left_out += [name] if name else []
        table = _table(title, key_title, columns, rows, left_out, is_short=True)
    table.min_width = min(len(title), console.width)
    console.print(table)
    if left_out:
        console.print(f"Not shown, for a wider terminal: {'; '.join(left_out)}.")


def _width(console: Console, table: Table) -> int:
    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _table(
    title: str,
    key_title: str,
    columns: Sequence[Column],
    rows: Sequence[_Row],
    left_out: Sequence[str],
    is_short: bool,
) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD,
                  collapse_padding=True, pad_edge=False)  # fmt: skip
    table.add_column(key_title, no_wrap=True)
    shown = [n for n, column in enumerate(columns) if column.title not in left_out]
    texts = [[_text(columns[n], row.cells[n]) for n in shown] for row in rows]
    for place, n in enumerate(shown):
        title = columns[n].title
        width = max(map(len, (*title.split(), *(cells[place] for cells in texts))))
        table.add_column("\n".join(wrap(title, width)), justify="right", no_wrap=True)
    for row, cells in zip(rows, texts, strict=True):
        table.add_row(row.short if is_short else row.key, *cells)
    return table


def show_figure(table: FigureTable, note: str) -> None:
    """The figure's numbers, and what they are; times only if they are not all predicted."""
    short = table.short or tuple(key for key, _ in table.rows)
    rows = [_Row(key, name, cells) for (key, cells), name in zip(table.rows, short, strict=True)]
    columns = list(table.columns)
    if all(row.cells[0] == "predicted" for row in rows):
        columns, rows = columns[1:], [replace(row, cells=row.cells[1:]) for row in rows]
    _show(table.title, table.key_title, columns, rows, table.optional)
    _console().print(note)


def show_notes(notes: Sequence[str]) -> None:
    """What the numbers compare, if not like with like."""
    for note in notes:
        _console().print(f"{note}\n")


def show_losses(found: Sequence[Summary]) -> None:
    """Where the stragglers' time goes, milliseconds."""
    columns = [Column("mean ms", ".1f"), Column("all alike", ".1f"),
               Column("pool over mean", ".1f")]  # fmt: skip
    columns += [Column(title, ".1f") for title in LOSS_TITLES.values()]
    rows = [
        _Row(each.title, each.name, (each.mean_ms, each.perfect_ms, each.between_ms,
                                     *(each.losses_ms[name] for name in LOSS_TITLES)))
        for each in found
    ]  # fmt: skip
    _show("Where the straggler's time goes, ms", "method", columns, rows)
    _console().print(f"{LOSS_NOTE}\n")


def show_errors(
    found: Sequence[Summary], errors: dict[str, ModelError | None], measured: dict[str, Any]
) -> None:
    """The model against measured workers."""
    columns = (Column("workers", "d"), Column("median error", ".1%"), Column("worst error", ".1%"),
               Column("measured / predicted", ".3f"))  # fmt: skip
    rows = [
        _Row(each.title, each.name, (error.num_measured, error.median, error.worst, error.ratio))
        for each in found
        if (error := errors.get(each.name)) is not None
    ]
    title = f"Model against {measured['workers_measured']} measured workers ({measured['device']})"
    if rows:
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


def show_written(files: Mapping[Path | None, str]) -> None:
    """Name the files that were written, each with what is to be said of it."""
    for path, note in files.items():
        if path is not None:
            _console().print(f"Written: {path}{note}", soft_wrap=True)


def show_throughput(grid: ThroughputGrid) -> None:
    """Forward and backward, heads by block."""
    columns = [Column(str(block), ".0f") for block in grid.blocks]
    for name, values in (("Forward", grid.forward), ("Backward", grid.backward)):
        rows = [
            _Row(str(heads), str(heads), row.tolist())
            for heads, row in zip(grid.heads, values, strict=True)
        ]
        title = f"{name} TFLOP/s, {grid.num_keys} keys, {grid.label}"
        _show(title, "heads \\ B", columns, rows)
