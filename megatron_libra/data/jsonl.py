"""Count the tokens of every line of a jsonl. In: the file, a tokenizer's name. Out: LengthRows.

The file is cut into byte ranges; a line belongs to the range that holds its first byte. So many
processes count without a first pass over the file, and the rows come out in file order.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path

from megatron_libra.data.counters import LineCounter, load_counter
from megatron_libra.data.json_faults import json_fault
from megatron_libra.data.rows import LengthRows, as_lengths
from megatron_libra.orphans import end_with_parent

__all__ = ["count_jsonl"]

RANGE_BYTES = 16 * 2**20
"""Bytes that one task counts."""
_counter: LineCounter | None = None  # in a counting process: a tokenizer loads once, not per task


def count_jsonl(
    path: Path,
    *,
    tokenizer: str,
    chat_template: str | None = None,
    num_workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> LengthRows:
    """One row for each line that is not blank: the tokens of its conversations.

    Args:
        path: the jsonl.
        tokenizer: as load_counter.
        chat_template: as load_counter.
        num_workers: processes that tokenize.
        progress: called with the bytes counted since its last call.

    Raises:
        ValueError: a line cannot be read or counted (its number is named), there is no line, or the
            tokenizer is missing.
    """
    counter = load_counter(tokenizer, chat_template=chat_template)  # its errors come first
    size = path.stat().st_size
    ranges = list(pairwise([*range(0, size, RANGE_BYTES), size]))
    if num_workers == 1:
        counted: Iterator[LengthRows] = (
            count_range(path, counter, start, stop) for start, stop in ranges
        )
    else:
        load = partial(load_counter, tokenizer, chat_template=chat_template)
        counted = _in_processes(path, ranges, num_workers, load)
    parts = []
    for (start, stop), part in zip(ranges, counted, strict=True):
        parts.append(part)
        if progress:
            progress(stop - start)
    rows = LengthRows.concatenate(parts)
    if not len(rows):
        raise ValueError(f"{path} has no lines; give a jsonl with one JSON object a line.")
    return rows


def count_range(path: Path, counter: LineCounter, start: int, stop: int) -> LengthRows:
    """Rows of the lines whose first byte lies in [start, stop)."""
    rows: list[list[int]] = []
    for first_byte, line in lines_of_range(path, start, stop):
        if not line.strip():
            continue
        try:
            rows.append(_count(counter, line))
        except Exception as error:  # a user's counter may raise anything
            number = 1 + _newlines_before(path, first_byte)
            reason = str(error) if isinstance(error, ValueError) else _raised(error)
            raise ValueError(f"{path}, line {number}: {reason}") from error
    return LengthRows.from_rows(rows)


def lines_of_range(path: Path, start: int, stop: int) -> Iterator[tuple[int, bytes]]:
    """(first byte, line) of the lines that begin in [start, stop)."""
    with path.open("rb") as stream:
        if start:
            stream.seek(start - 1)
            stream.readline()
        while (first_byte := stream.tell()) < stop:
            yield first_byte, stream.readline()


def _raised(error: Exception) -> str:
    return f"the counter raised {error!r}; it takes a parsed line and returns its tokens."


def _count(counter: LineCounter, line: bytes) -> list[int]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{json_fault(error)}; write one JSON object a line.") from None
    counted = counter(record)
    counts = [counted] if isinstance(counted, int) else list(counted)
    as_lengths(counts, "tokens")
    if not counts:
        raise ValueError("has no conversation; a line is one packed sequence; remove the line.")
    return counts


def _newlines_before(path: Path, first_byte: int) -> int:
    with path.open("rb") as stream:
        return stream.read(first_byte).count(b"\n")


def _in_processes(
    path: Path, ranges: list[tuple[int, int]], num_workers: int, load: Callable[[], LineCounter]
) -> Iterator[LengthRows]:
    """count_range of every range, in order; spawned, because threads may run in this process."""
    with ProcessPoolExecutor(num_workers, get_context("spawn"), _load, (load,)) as pool:
        yield from pool.map(partial(_count_loaded, path), *zip(*ranges, strict=True))


def _load(load: Callable[[], LineCounter]) -> None:
    global _counter
    end_with_parent()
    _counter = load()


def _count_loaded(path: Path, start: int, stop: int) -> LengthRows:
    assert _counter is not None
    return count_range(path, _counter, start, stop)
