"""A table whose every cell is computed. In: TableSpec. Out: Table, Markdown.

A row is a function of this package and its arguments, so that rows can run in several processes and
a test can run some of them again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_libra.simulator.processes import TaskPool

__all__ = [
    "Cell",
    "Column",
    "RowTask",
    "Table",
    "TableSpec",
    "compute_table",
    "markdown_table",
    "row_text",
]

Cell = float | int | str | None


@dataclass(frozen=True, slots=True)
class Column:
    """A column behind the first one, which holds the rows' keys."""

    title: str
    form: str = ""
    """Format of its numbers, such as .3f."""
    is_timing: bool = False
    """Depends on the machine, so that it cannot be compared."""

    def text(self, cell: Cell) -> str:
        """The cell as it is printed; None is blank."""
        if cell is None or isinstance(cell, str):
            return cell or ""
        return format(cell, self.form)


@dataclass(frozen=True, slots=True)
class RowTask:
    """One row: a module's function that returns the cells, and its arguments."""

    key: str
    function: Callable[..., tuple[Cell, ...]]
    arguments: tuple[Any, ...]


@dataclass(frozen=True, slots=True)
class TableSpec:
    """A table before it is computed."""

    name: str
    """Of its place in the document."""
    command: str
    """The command that computes it."""
    key_title: str
    columns: tuple[Column, ...]
    rows: tuple[RowTask, ...]


@dataclass(frozen=True, slots=True)
class Table:
    """A computed table, or some rows of it."""

    spec: TableSpec
    keys: tuple[str, ...]
    cells: tuple[tuple[Cell, ...], ...]

    @property
    def texts(self) -> list[list[str]]:
        """Rows as printed, the key first."""
        return [row_text(self.spec, *row) for row in zip(self.keys, self.cells, strict=True)]

    @property
    def titles(self) -> list[str]:
        """Column titles as printed."""
        return [self.spec.key_title, *(column.title for column in self.spec.columns)]

    def markdown(self) -> str:
        """The command and the table."""
        return f"`{self.spec.command}`\n\n{markdown_table(self.titles, self.texts)}"

    def answer(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "name": self.spec.name,
            "command": self.spec.command,
            "columns": self.titles,
            "rows": [[key, *row] for key, row in zip(self.keys, self.cells, strict=True)],
        }


def markdown_table(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Lines of a table; its first column holds keys, the others numbers."""
    lines = [titles, ["---", *("---:" for _ in titles[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def row_text(spec: TableSpec, key: str, cells: tuple[Cell, ...]) -> list[str]:
    """A row as printed."""
    texts = [column.text(cell) for column, cell in zip(spec.columns, cells, strict=True)]
    return [key, *texts]


def compute_table(
    spec: TableSpec,
    processes: TaskPool,
    *,
    keys: Collection[str] | None = None,
    done: Callable[[int, int], None] = lambda finished, total: None,
) -> Table:
    """Compute the rows, or those with the given keys, in order; done(finished, total) after each.

    Raises:
        ValueError: a key is of no row.
    """
    missing = set(keys or ()) - {row.key for row in spec.rows}
    if missing:
        known = ", ".join(row.key for row in spec.rows)
        raise ValueError(f"{spec.name} has no row {sorted(missing)}; it has {known}.")
    rows = [row for row in spec.rows if keys is None or row.key in keys]
    cells = processes.run(_run_row, rows, done)
    return Table(spec, tuple(row.key for row in rows), tuple(cells))


def _run_row(row: RowTask) -> tuple[Cell, ...]:
    return row.function(*row.arguments)
