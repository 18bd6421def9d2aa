"""The packed sequences of a corpus in sampler order. In: a file or a preset. Out: Corpus.

With pack `auto`, a file of document lengths is cut as Megatron cuts it, lists of several lengths
are packed sequences already, and the lines of a chat .jsonl are folded as Megatron folds them; a
packer packs whatever lengths there are, `none` takes every row as it is. Megatron shuffles
documents before it cuts them and sequences before it trains on them, so what is packed here is
shuffled both times, unless the file's order is to be kept. Packed sequences of a file keep it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_libra.data.conversations import fold_conversations
from megatron_libra.data.corpora import CORPORA, packed_corpus
from megatron_libra.data.files import read_lengths
from megatron_libra.data.packing import PACKERS
from megatron_libra.data.rows import Int64, LengthRows

__all__ = ["PACKINGS", "PRESET_STEPS", "Corpus", "CorpusRequest", "LengthHistogram", "load_corpus"]

PACKINGS = ("auto", "none", *PACKERS)
PRESET_STEPS = 16
"""Optimizer steps of a preset corpus where nothing is said."""
PACK_WINDOW = 20_000
"""Documents that best-fit packs together; processes share the corpus in multiples of it."""
Map = Callable[
    [Callable[[tuple[Int64, int]], LengthRows], list[tuple[Int64, int]]], Iterable[LengthRows]
]


@dataclass(frozen=True, slots=True, kw_only=True)
class CorpusRequest:
    """Which corpus, and how it becomes packed sequences."""

    source: str
    """A file of lengths, or the name of a preset."""
    pack: str = "auto"
    """auto, none, cut, greedy or best_fit."""
    column: str | None = None
    """Column of a Parquet file."""
    shuffle: bool = True
    """Shuffle documents before packing and packed documents after it."""
    seed: int = 0
    """Of the shuffles and of a preset's lengths."""
    num_sequences: int | None = None
    """Packed sequences of a preset (default 16 global batches)."""


@dataclass(frozen=True, slots=True, eq=False)
class LengthHistogram:
    """Samples by length, in bins of equal ratio."""

    edges: Int64
    """(bins + 1,) in tokens; a bin holds lengths of [edge, next edge)."""
    samples: Int64
    tokens: Int64
    work: NDArray[np.float64]
    """Sums of squared lengths."""

    @classmethod
    def of(cls, lengths: Int64, seq_length: int) -> LengthHistogram:
        """Count lengths of 1 to seq_length."""
        edges = np.unique(np.geomspace(1, seq_length + 1, 49).round().astype(np.int64))
        count = edges.size - 1
        bins = np.searchsorted(edges, lengths[lengths > 0], side="right") - 1
        weight = lengths[lengths > 0].astype(np.float64)
        return cls(
            edges,
            np.bincount(bins, minlength=count),
            np.bincount(bins, weight, minlength=count).astype(np.int64),
            np.bincount(bins, weight**2, minlength=count),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Corpus:
    """Packed sequences, in the order in which a sampler without VRSP would take them."""

    name: str
    rows: LengthRows
    """A row for each packed sequence: its sample lengths."""
    packing: str
    """How the rows came about, in words."""

    def num_windows(self, global_batch_size: int) -> int:
        """Whole optimizer steps; ValueError if there is none."""
        count = len(self.rows) // global_batch_size
        if not count:
            raise ValueError(
                f"{self.name} has {len(self.rows)} packed sequences, fewer than "
                f"global_batch_size ({global_batch_size}); give a longer corpus or a smaller batch."
            )
        return count

    def window(self, index: int, global_batch_size: int) -> LengthRows:
        """The packed sequences of one optimizer step."""
        return self.rows.take(np.arange(index * global_batch_size, (index + 1) * global_batch_size))


def load_corpus(
    request: CorpusRequest,
    *,
    seq_length: int,
    global_batch_size: int,
    context_parallel_size: int,
    map_parts: Map = map,
) -> Corpus:
    """Read and pack a corpus.

    Args:
        request: the file or preset and how to pack it.
        seq_length: L, tokens of a packed sequence.
        global_batch_size: GBS; sets the size of a preset.
        context_parallel_size: CP; a chat's conversations are padded for it.
        map_parts: a parallel map for best-fit, which packs every 20,000 documents on their own.

    Raises:
        ValueError: the source is unknown, damaged or empty, or a sample is longer than L.
    """
    if request.pack not in PACKINGS:
        raise ValueError(f"pack ({request.pack!r}) must be one of {', '.join(PACKINGS)}.")
    if request.source in CORPORA:
        return _preset(request, seq_length, global_batch_size)
    path = Path(request.source)
    if not path.suffix and not path.exists():
        raise ValueError(
            f"{request.source!r} is neither a file nor a preset ({', '.join(CORPORA)}); give the "
            "path of a file of lengths or one of these names."
        )
    rows = read_lengths(path, column=request.column)
    if not rows.flat.any():
        raise ValueError(f"{path} holds no sample with tokens; give lengths of at least 1.")
    is_chat = path.suffix == ".jsonl"
    are_documents = int(np.diff(rows.offsets).max()) <= 1 and not is_chat
    if request.pack in PACKERS or (request.pack == "auto" and are_documents):
        return _packed(path, rows.flat, request, seq_length, map_parts)
    if request.pack == "auto" and is_chat:
        return Corpus(path.name, _folded(rows, seq_length, context_parallel_size), "chat lines")
    _check_longest(path, rows, seq_length)
    return Corpus(path.name, rows, "packed sequences as they are in the file")


def _preset(request: CorpusRequest, seq_length: int, global_batch_size: int) -> Corpus:
    if request.pack != "auto":
        raise ValueError(
            f"pack ({request.pack!r}) is for files; {request.source} is packed by best-fit; leave "
            "it out."
        )
    expected = CORPORA[request.source].seq_length
    if seq_length != expected:
        raise ValueError(
            f"seq_length ({seq_length}) must be {expected} for {request.source}, whose documents "
            f"fill a whole sequence; leave it out."
        )
    count = request.num_sequences or PRESET_STEPS * global_batch_size
    rows = packed_corpus(request.source, num_sequences=count, seed=request.seed)
    return Corpus(request.source, rows, f"synthetic, best-fit, seed {request.seed}")


def _folded(rows: LengthRows, seq_length: int, context_parallel_size: int) -> LengthRows:
    return LengthRows.from_rows(
        [
            fold_conversations(
                row, seq_length=seq_length, context_parallel_size=context_parallel_size
            )
            for row in rows
            if row
        ]
    )


def _check_longest(path: Path, rows: LengthRows, seq_length: int) -> None:
    longest = int(rows.row_sums().max())
    if longest > seq_length:
        raise ValueError(
            f"{path}: the longest packed sequence has {longest} tokens, seq_length is "
            f"{seq_length}; try {longest} or more."
        )


def _packed(
    path: Path, documents: Int64, request: CorpusRequest, seq_length: int, map_parts: Map
) -> Corpus:
    packer = "cut" if request.pack == "auto" else request.pack
    at = int(documents.argmax())
    if packer != "cut" and documents[at] > seq_length:
        raise ValueError(
            f"{path}: document {at} has {documents[at]} tokens, more than seq_length "
            f"({seq_length}), and {packer} cuts none; raise seq_length or pack with cut."
        )
    rng = np.random.default_rng(request.seed)
    if request.shuffle:
        documents = rng.permutation(documents)
    if packer == "best_fit":
        parts = [
            (documents[at : at + PACK_WINDOW], seq_length)
            for at in range(0, documents.size, PACK_WINDOW)
        ]
        rows = LengthRows.concatenate(list(map_parts(pack_part, parts)))
    else:
        rows = PACKERS[packer](documents, seq_length).rows
    if request.shuffle:
        rows = rows.take(rng.permutation(len(rows)))
    order = f"shuffled with seed {request.seed}" if request.shuffle else "in the file's order"
    return Corpus(path.name, rows, f"documents packed by {packer}, {order}")


def pack_part(part: tuple[Int64, int]) -> LengthRows:
    """Best-fit of one part of the documents; a module function, so that a process can run it."""
    documents, seq_length = part
    return PACKERS["best_fit"](documents, seq_length).rows
