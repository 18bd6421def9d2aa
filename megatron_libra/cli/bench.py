"""The command `libra bench plans`. In: names of tables, sets. Out: tables, JSON, or a document.

libra bench plans                                              planners side by side, 256K preset
libra bench plans --lengths docs.json                          the same on your own documents
libra bench plans --table all --write docs/results/planning.md     everything, into the document
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from megatron_libra.bench.catalog import TABLES, table_specs
from megatron_libra.bench.document import replace_table
from megatron_libra.bench.pools import FILE_JOB, BenchSet, file_set, preset_set
from megatron_libra.bench.table import Table, TableSpec, compute_table
from megatron_libra.data.corpora import CORPORA
from megatron_libra.data.rows import require_file
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.processes import TaskPool

__all__ = ["bench"]

WIDE = 140
"""Columns of a terminal that has room for every table."""

bench = typer.Typer(
    name="bench",
    help="Measure: planners against each other and the paper.",
    invoke_without_command=True,
)

Tables = Annotated[
    list[str] | None,
    typer.Option("--table", metavar="NAME", help=f"{', '.join(TABLES)} or all; may be repeated."),
]
Corpora = Annotated[
    list[str] | None,
    typer.Option("--corpus", metavar="NAME", help=f"{', '.join(CORPORA)}; may be repeated."),
]
Lengths = Annotated[
    list[Path] | None,
    typer.Option(
        "--lengths", metavar="FILE", help="Document lengths, packed by cutting; may be repeated."
    ),
]
Upsampled = Annotated[
    bool,
    typer.Option(
        "--distca-preset",
        help="With --lengths: drop 10 % of the documents under 64K, take the others twice, all "
        "4 times as long.",
    ),
]
SeqLength = Annotated[int, typer.Option(min=1, help="With --lengths: tokens of a packed sequence.")]
ContextParallel = Annotated[
    int, typer.Option("--context-parallel-size", min=1, help="With --lengths: CP.")
]
PoolSize = Annotated[int, typer.Option(min=1, help="With --lengths: P, sequences of a pool.")]
Processes = Annotated[int, typer.Option(min=1, help="Processes; 1 gives the cleanest times.")]
Write = Annotated[
    Path | None,
    typer.Option(metavar="FILE.md", help="Replace the tables in a document that has their places."),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON list instead of tables.")]


@bench.callback()
def group(context: typer.Context) -> None:
    """Measure: planners against each other and the paper."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())
        raise typer.Exit


@bench.command()
def plans(
    table: Tables = None,
    corpus: Corpora = None,
    lengths: Lengths = None,
    distca_preset: Upsampled = False,
    seq_length: SeqLength = FILE_JOB.seq_length,
    context_parallel_size: ContextParallel = FILE_JOB.context_parallel_size,
    pool_size: PoolSize = FILE_JOB.global_batch_size,
    processes: Processes = 1,
    write: Write = None,
    as_json: AsJson = False,
) -> None:
    """Compare planners on the same metadata, and compute the paper's planning tables again."""
    names = table or ["planners"]
    job = TrainingJob(
        seq_length=seq_length,
        context_parallel_size=context_parallel_size,
        data_parallel_size=pool_size,
        global_batch_size=pool_size,
        shape=FILE_JOB.shape,
    )
    sets = _sets(names, corpus or [], lengths or [], distca_preset, job)
    document = require_file(write).read_text(encoding="ascii") if write else ""
    specs = table_specs(names, sets)
    for spec in specs:
        document = replace_table(document, spec.name, "") if write else document
    tables = _compute(specs, processes)
    for found in tables if write else []:
        document = replace_table(document, found.spec.name, found.markdown())
    if write:
        write.write_text(document, encoding="ascii")
    if as_json:
        typer.echo(json.dumps([found.answer() for found in tables], allow_nan=False))
    else:
        _show(tables)


def _sets(
    names: list[str], corpora: list[str], files: list[Path], is_upsampled: bool, job: TrainingJob
) -> list[BenchSet]:
    """What was asked for; by default the 256K preset, and both presets for all tables."""
    if is_upsampled and not files:
        raise ValueError("--distca-preset changes the documents of --lengths FILE; give one.")
    if not corpora and not files:
        corpora = list(CORPORA) if "all" in names else ["longtail-256k"]
    chosen = [file_set(require_file(path), is_upsampled=is_upsampled, job=job) for path in files]
    return [*map(preset_set, corpora), *chosen]


def _compute(specs: list[TableSpec], num_processes: int) -> list[Table]:
    tables = []
    with TaskPool(num_processes) as pool, _progress(specs) as step:
        for spec in specs:
            tables.append(compute_table(spec, pool, done=lambda finished, total: step()))
    return tables


@contextmanager
def _progress(specs: list[TableSpec]) -> Iterator[Callable[[], None]]:
    """A bar on stderr, a step for each row, so that stdout stays the answer."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        bar = progress.add_task("Planning", total=sum(len(spec.rows) for spec in specs))
        yield lambda: progress.advance(bar)


def _show(tables: list[Table]) -> None:
    """Tables on a wide terminal; else Markdown, which no width cuts off."""
    console = Console(highlight=False, markup=False, emoji=False)
    for found in tables:
        if not console.is_terminal or console.width < WIDE:
            typer.echo(f"## {found.spec.name}\n\n{found.markdown()}\n")
            continue
        shown = RichTable(title=found.spec.name, title_justify="left", box=box.SIMPLE_HEAD)
        for number, title in enumerate(found.titles):
            shown.add_column(title, justify="right" if number else "left", overflow="fold")
        for row in found.texts:
            shown.add_row(*row)
        console.print(shown)
