"""Pack documents into sequences of at most seq_length tokens. In: document lengths. Out: Packing.

    cut        concatenate in order, cut every seq_length tokens, as Megatron's GPTDataset does
    greedy     in order, a document that does not fit begins the next sequence; nothing is cut
    best_fit   longest first, into the fullest sequence that still has room; nothing is cut

Example, seq_length 8: documents 5 4 3 2 become 5 3 | 1 3 2 by cut, 5 | 4 3 | 2 by greedy and
5 3 | 4 2 by best_fit. Empty documents are left out.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from megatron_libra.data.rows import Int64, LengthRows, as_lengths, offsets_of

__all__ = ["PACKERS", "Packing", "pack_best_fit", "pack_cut", "pack_greedy"]


@dataclass(frozen=True, slots=True, eq=False)
class Packing:
    """Packed sequences, and which documents they hold."""

    rows: LengthRows
    """A row for each packed sequence: its sample lengths in token order."""
    documents: Int64
    """(N,) document of each length in `rows.flat`; a document that was cut appears again."""


def pack_cut(lengths: ArrayLike, seq_length: int) -> Packing:
    """Concatenate documents in order and cut every seq_length tokens; the last row may be short.

    Args:
        lengths: document lengths in tokens.
        seq_length: L, tokens of a packed sequence.

    Raises:
        ValueError: a length is no integer of at least 0, or seq_length is below 1.
    """
    documents, tokens = _checked(lengths, seq_length)
    # The parts lie between the ends of documents and the ends of sequences, both in token order.
    document_stops = np.cumsum(tokens)
    sequence_stops = np.arange(seq_length, tokens.sum(), seq_length)
    # Two rising runs: a stable sort merges them in linear time, which union1d does not.
    stops = np.sort(np.concatenate([document_stops, sequence_stops]), kind="stable")
    stops = stops[np.diff(stops, prepend=0) > 0]
    starts = offsets_of(np.diff(stops, prepend=0))[:-1]
    row_counts = np.bincount(starts // seq_length)
    return Packing(
        rows=LengthRows(stops - starts, offsets_of(row_counts)),
        documents=documents[np.searchsorted(document_stops, starts, side="right")],
    )


def pack_greedy(lengths: ArrayLike, seq_length: int) -> Packing:
    """Fill sequences in document order; what does not fit begins the next one.

    Args:
        lengths: document lengths in tokens, each at most seq_length.
        seq_length: L, tokens of a packed sequence.

    Raises:
        ValueError: a length is no integer, negative or above seq_length, or seq_length is below 1.
    """
    documents, tokens = _checked(lengths, seq_length, uncut=True)
    sums = offsets_of(tokens)
    offsets = [0]
    while offsets[-1] < documents.size:
        limit = sums[offsets[-1]] + seq_length
        offsets.append(int(np.searchsorted(sums, limit, side="right")) - 1)
    return Packing(LengthRows(tokens, np.array(offsets, np.int64)), documents)


def pack_best_fit(lengths: ArrayLike, seq_length: int, *, window: int = 20_000) -> Packing:
    """Best-fit decreasing inside each window of documents; no sequence spans two windows.

    In a sequence documents stand in their original order. Ties: document, sequence.

    Args:
        lengths: document lengths in tokens, each at most seq_length.
        seq_length: L, tokens of a packed sequence.
        window: documents that are sorted and packed together.

    Raises:
        ValueError: a length is no integer, negative or above seq_length, or seq_length or window is
            below 1.
    """
    documents, tokens = _checked(lengths, seq_length, uncut=True)
    if window < 1:
        raise ValueError(f"window ({window}) must be at least 1 document; try 20000.")
    sequence = np.empty(tokens.size, np.int64)
    num_sequences = 0
    for start in range(0, tokens.size, window):
        chosen, used = _best_fit(tokens[start : start + window], seq_length)
        sequence[start : start + window] = chosen + num_sequences
        num_sequences += used
    order = np.argsort(sequence, kind="stable")
    rows = LengthRows(tokens[order], offsets_of(np.bincount(sequence, minlength=num_sequences)))
    return Packing(rows, documents[order])


def _best_fit(tokens: Int64, seq_length: int) -> tuple[Int64, int]:
    """(sequence of each document, number of sequences) of one window."""
    sequence = np.empty(tokens.size, np.int64)
    # Sorted by (room, sequence), a pair as the one integer room * stride + sequence.
    stride = tokens.size + 1
    rooms: list[int] = []
    num_sequences = 0
    order = np.argsort(-tokens, kind="stable")
    for document, length in zip(order.tolist(), tokens[order].tolist(), strict=True):
        at = bisect_left(rooms, length * stride)
        if at < len(rooms):
            room, chosen = divmod(rooms.pop(at), stride)
        else:
            room, chosen = seq_length, num_sequences
            num_sequences += 1
        sequence[document] = chosen
        insort(rooms, (room - length) * stride + chosen)
    return sequence, num_sequences


def _checked(lengths: ArrayLike, seq_length: int, *, uncut: bool = False) -> tuple[Int64, Int64]:
    """(documents, their tokens) of all that are not empty."""
    if seq_length < 1:
        raise ValueError(f"seq_length ({seq_length}) must be at least 1 token; try 4096.")
    tokens = as_lengths(lengths)
    if uncut and tokens.max(initial=0) > seq_length:
        at = int(np.argmax(tokens > seq_length))
        raise ValueError(
            f"lengths[{at}] ({tokens[at]}) must be at most seq_length ({seq_length}) to be packed "
            "without a cut; raise seq_length or pack with cut."
        )
    documents = np.flatnonzero(tokens)
    return documents, tokens[documents]


PACKERS: dict[str, Callable[[ArrayLike, int], Packing]] = {
    "cut": pack_cut,
    "greedy": pack_greedy,
    "best_fit": pack_best_fit,
}
"""The packers by name."""
