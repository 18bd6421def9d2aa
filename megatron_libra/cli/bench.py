"""The command `libra bench plans`. In: names of tables, sets. Out: tables, JSON, or a document.

libra bench plans                                              planners side by side, 256K preset
libra bench plans --lengths docs.json                          the same on your own documents
libra bench plans --table all --write docs/results/planning.md     everything, into the document
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table as RichTable

from megatron_libra.bench.catalog import TABLES, table_specs
from megatron_libra.bench.document import replace_table
from megatron_libra.bench.pools import FILE_JOB, BenchSet, file_set, preset_set
from megatron_libra.bench.table import Table, TableSpec, compute_table
from megatron_libra.cli.bench_size import check_job
from megatron_libra.cli.given_options import given_options, refuse_given
from megatron_libra.cli.options import MAX_PROCESSES
from megatron_libra.cli.output_files import require_writable
from megatron_libra.cli.pool_size import MAX_WORKERS
from megatron_libra.cli.progress import show_progress
from megatron_libra.cli.request import faults_of
from megatron_libra.config import MAX_INTEGER
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
SeqLength = Annotated[
    int,
    typer.Option(min=1, max=MAX_INTEGER, help="With --lengths: tokens of a packed sequence."),
]
ContextParallel = Annotated[
    int,
    typer.Option("--context-parallel-size", min=1, max=MAX_WORKERS, help="With --lengths: CP."),
]
PoolSize = Annotated[
    int, typer.Option(min=1, max=MAX_WORKERS, help="With --lengths: P, sequences of a pool.")
]
Processes = Annotated[
    int, typer.Option(min=1, max=MAX_PROCESSES, help="Processes; 1 gives the cleanest times.")
]
OF_FILES = ("distca_preset", "seq_length", "context_parallel_size", "pool_size")
"""Options that do nothing to a preset."""
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
    context: typer.Context,
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
    files = [_file(path) for path in lengths or []]
    if not files:
        why = "for the files of --lengths, and none is given"
        refuse_given(given_options(context), OF_FILES, why)
    job = TrainingJob(
        seq_length=seq_length,
        context_parallel_size=context_parallel_size,
        data_parallel_size=pool_size,
        global_batch_size=pool_size,
        shape=FILE_JOB.shape,
    )
    check_job(job)
    specs = table_specs(names, _sets(names, corpus or [], files, distca_preset, job))
    document = _read(write) if write else ""
    if write:
        require_writable(write, inputs=files)
        document = _replaced(write, document, {spec.name: "" for spec in specs})
    tables = _compute(specs, processes)
    if write:
        texts = {found.spec.name: found.markdown() for found in tables}
        write.write_text(_replaced(write, document, texts), encoding="utf-8")
    if as_json:
        typer.echo(json.dumps([found.answer() for found in tables], allow_nan=False))
    else:
        _show(tables)


def _sets(
    names: list[str], corpora: list[str], files: list[Path], is_upsampled: bool, job: TrainingJob
) -> list[BenchSet]:
    """What was asked for; by default the 256K preset, and both presets for all tables."""
    if not corpora and not files:
        corpora = list(CORPORA) if "all" in names else ["longtail-256k"]
    for name in corpora:
        if name not in CORPORA and Path(name).is_file():
            raise ValueError(f"--corpus ({name}) is a file, not a preset; try --lengths {name}.")
    chosen = [file_set(path, is_upsampled=is_upsampled, job=job) for path in files]
    return [*map(preset_set, corpora), *chosen]


def _file(path: Path) -> Path:
    """A file of lengths that is there."""
    if str(path) in CORPORA and not path.exists():
        raise ValueError(f"--lengths ({path}) is a preset, not a file; try --corpus {path}.")
    return require_file(path)


def _read(path: Path) -> str:
    """The text of the document."""
    try:
        return require_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ValueError(
            f"--write {path} is not UTF-8 (byte {error.start} is 0x{byte:02x}); give a Markdown "
            "file, or save it as UTF-8 text."
        ) from None


def _replaced(path: Path, document: str, tables: dict[str, str]) -> str:
    """The document with these bodies, by name; ValueError names it if one has no place."""
    with faults_of(path):
        for name, body in tables.items():
            document = replace_table(document, name, body)
    return document


def _compute(specs: list[TableSpec], num_processes: int) -> list[Table]:
    total, numbers = sum(len(spec.rows) for spec in specs), itertools.count(1)
    with TaskPool(num_processes) as pool, show_progress() as told:
        step = told("planning")

        def done(*of_its_table: int) -> None:
            step(next(numbers), total)

        step(0, total)  # the bar is there from the start
        return [compute_table(spec, pool, done=done) for spec in specs]


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
