"""The command `libra lengths`. In: lengths, a preset, or a jsonl to count. Out: a table or JSON.

libra lengths corpus.idx --seq-length 131072            distribution and attention skew
libra lengths longtail-256k                             the same of a preset of libra simulate
libra lengths chat.jsonl --tokenizer Qwen/Qwen3-8B      counts once, writes the sidecar
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from megatron_libra.cli.corpus_name import check_corpus_name
from megatron_libra.cli.given_options import given_options, refuse_given
from megatron_libra.cli.output_files import require_writable
from megatron_libra.config import MAX_INTEGER
from megatron_libra.data.conversations import fold_conversations
from megatron_libra.data.files import read_lengths
from megatron_libra.data.packing import PACKERS
from megatron_libra.data.rows import LengthRows, require_file
from megatron_libra.data.sidecar import build_sidecar, load_sidecar, sidecar_path
from megatron_libra.data.summary import (
    LengthSummary,
    SkewSummary,
    summarize_lengths,
    summarize_skew,
)
from megatron_libra.simulator.corpus import CorpusRequest, load_corpus
from megatron_libra.simulator.job import PRESET_JOBS

__all__ = ["lengths"]

OF_COUNTING = ("chat_template", "output", "workers")
OF_FILES = ("tokenizer", *OF_COUNTING, "column", "pack")
"""Options that do nothing to a preset."""

FilePath = Annotated[
    Path,
    typer.Argument(
        metavar="FILE",
        help="Lengths (.json .npy .npz .parquet .idx), SFT lines (.jsonl), or a preset: "
        f"{', '.join(PRESET_JOBS)}.",
    ),
]
Tokenizer = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Count a .jsonl and write its sidecar: a Hugging Face name or folder, byte, or "
        "MODULE:FUNCTION, which takes a parsed line and returns tokens.",
    ),
]
Template = Annotated[
    Path | None, typer.Option(help="Jinja file instead of the tokenizer's own chat template.")
]
Output = Annotated[
    Path | None,
    typer.Option("--output", "-o", help="Sidecar to write; default: beside the .jsonl."),
]
Workers = Annotated[int, typer.Option(min=1, help="Processes that tokenize.")]
Column = Annotated[str | None, typer.Option(help="Column of a .parquet.")]
SeqLength = Annotated[
    int | None,
    typer.Option(
        min=1, max=MAX_INTEGER, help="Tokens of a packed sequence: also show attention skew."
    ),
]
Packer = Annotated[
    str, typer.Option("--pack", help=f"How documents are packed: {', '.join(PACKERS)}.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")]


def lengths(
    context: typer.Context,
    file: FilePath,
    tokenizer: Tokenizer = None,
    chat_template: Template = None,
    output: Output = None,
    workers: Workers = 1,
    column: Column = None,
    seq_length: SeqLength = None,
    pack: Packer = "cut",
    as_json: AsJson = False,
) -> None:
    """Show the sample lengths and attention skew of a data set; count a .jsonl once."""
    if pack not in PACKERS:
        raise ValueError(f"--pack ({pack!r}) must be one of {', '.join(PACKERS)}.")
    sidecar, given = None, given_options(context)
    if not file.suffix and not file.exists():
        check_corpus_name(str(file))
        refuse_given(given, OF_FILES, f"not with a preset ({file})")
        rows = _rows_of_preset(file, seq_length)
        seq_length = PRESET_JOBS[str(file)].seq_length
    elif tokenizer is not None:
        _refuse_pack(given, file)
        sidecar = _count(file, tokenizer, chat_template, output, workers)
        rows = load_sidecar(sidecar)
    else:
        _refuse_pack(given, file)
        refuse_given(given, OF_COUNTING, "for counting, which --tokenizer NAME asks for")
        rows = read_lengths(file, column=column)
        if _are_packed(rows):
            why = f"for documents, and {file} holds packed sequences already"
            refuse_given(given, ("pack",), why)
    if not rows.flat.any():
        raise ValueError(f"{file} has no sample with tokens; give lengths of at least 1.")
    skew = None
    if seq_length is not None:
        packed = _sequences(rows, seq_length, pack, is_chat=_is_chat(file))
        skew = summarize_skew(packed, seq_length)
    summary = summarize_lengths(rows.flat)
    if as_json:
        typer.echo(json.dumps(_answer(summary, skew, sidecar), allow_nan=False))
    else:
        _show(file, summary, skew, sidecar)


def _refuse_pack(given: dict[str, str], file: Path) -> None:
    """ValueError if --pack is given and nothing is packed, as far as options and names tell."""
    if "seq_length" not in given:
        refuse_given(given, ("pack",), "for --seq-length TOKENS, without which nothing is packed")
    if _is_chat(file):
        why = "for documents, and the lines of a .jsonl are packed sequences already"
        refuse_given(given, ("pack",), why)


def _is_chat(file: Path) -> bool:
    return file.suffix.lower() == ".jsonl"


def _are_packed(rows: LengthRows) -> bool:
    """Whether a row has several lengths: lists of lists, not documents."""
    return bool((np.diff(rows.offsets) > 1).any())


def _rows_of_preset(file: Path, seq_length: int | None) -> LengthRows:
    """The packed sequences that libra simulate takes of a preset."""
    job = PRESET_JOBS[str(file)]
    corpus = load_corpus(
        CorpusRequest(source=str(file)),
        seq_length=seq_length or job.seq_length,
        global_batch_size=job.global_batch_size,
        context_parallel_size=job.context_parallel_size,
    )
    return corpus.rows


def _count(
    file: Path, tokenizer: str, chat_template: Path | None, output: Path | None, workers: int
) -> Path:
    if not _is_chat(file):
        raise ValueError(f"--tokenizer counts the lines of a .jsonl, not of {file}; leave it out.")
    template = _read_template(chat_template) if chat_template else None
    require_file(file)
    require_writable(output or sidecar_path(file), inputs=[file, chat_template])
    with _progress(f"Counting {file.name}", file.stat().st_size) as advance:
        return build_sidecar(
            file,
            tokenizer=tokenizer,
            chat_template=template,
            output=output,
            num_workers=workers,
            progress=advance,
        )


def _read_template(path: Path) -> str:
    try:
        return require_file(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: is not UTF-8 ({error}); give a Jinja file.") from None


@contextmanager
def _progress(title: str, total: int) -> Iterator[Callable[[int], None]]:
    """A bar on stderr, so that stdout stays the answer."""
    console = Console(stderr=True)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda step: progress.advance(task, step)


def _sequences(rows: LengthRows, seq_length: int, packer: str, *, is_chat: bool) -> LengthRows:
    """Lines of chats as Megatron folds them, lists of lists as they are, documents packed."""
    if is_chat:
        return LengthRows.from_rows(
            [fold_conversations(row, seq_length=seq_length) for row in rows]
        )
    if _are_packed(rows):
        if rows.row_sums().max() > seq_length:
            longest = int(rows.row_sums().max())
            raise ValueError(
                f"--seq-length ({seq_length}) must be at least the longest packed sequence "
                f"({longest} tokens); try --seq-length {longest}."
            )
        return rows
    return PACKERS[packer](rows.flat, seq_length).rows


def _answer(
    summary: LengthSummary, skew: SkewSummary | None, sidecar: Path | None
) -> dict[str, Any]:
    answer: dict[str, Any] = {"lengths": asdict(summary)}
    if skew:
        answer["skew"] = asdict(skew)
    if sidecar:
        answer["sidecar"] = str(sidecar)
    return answer


def _show(
    file: Path, summary: LengthSummary, skew: SkewSummary | None, sidecar: Path | None
) -> None:
    facts = {
        "samples": f"{summary.samples:,}",
        "tokens": f"{summary.tokens:,}",
        "length": f"mean {summary.mean:,.0f}, median {summary.median:,.0f}, p90 "
        f"{summary.p90:,.0f}, p99 {summary.p99:,.0f}, max {summary.max:,}",
        "half of the work": f"in samples of at least {summary.half_work_length:,} tokens",
    }
    if skew:
        facts["packed sequences"] = (
            f"{skew.sequences:,}, {skew.mean_samples:,.1f} samples each, {skew.fill:.1%} full"
        )
        facts["attention skew"] = (
            f"the heaviest does {1 + skew.imbalance:.2f} times the mean work, p99 "
            f"{skew.p99_over_median:.2f} times the median"
        )
    if sidecar:
        facts["written"] = str(sidecar)
    table = Table(title=file.name, title_justify="left", box=box.SIMPLE, show_header=False)
    table.add_column(style="bold", overflow="fold")
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(name, value)
    Console(highlight=False, markup=False, emoji=False).print(table)
