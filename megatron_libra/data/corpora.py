"""Synthetic long-tailed corpora. In: a preset and a seed. Out: packed sequences.

The presets have the published statistics of the paper's two production sets (Fig. 2, Table 1): a
lognormal body with median 644 whose widest documents fill a whole sequence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megatron_libra.data.packing import pack_best_fit
from megatron_libra.data.rows import Int64, LengthRows

__all__ = ["CORPORA", "LongTail", "packed_corpus"]

WINDOW = 20_000
"""Documents that are generated and packed together."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LongTail:
    """Document lengths: lognormal(ln median, sigma) rounded down, clipped to [1, seq_length]."""

    seq_length: int
    """L, tokens of a packed sequence and of the longest document."""
    sigma: float
    """Standard deviation of the logarithm."""
    median: int = 644
    """Tokens of the median document."""

    def document_lengths(self, num_documents: int, rng: np.random.Generator) -> Int64:
        """(num_documents,) lengths in tokens."""
        drawn = rng.lognormal(np.log(self.median), self.sigma, num_documents)
        return np.clip(drawn, 1, self.seq_length).astype(np.int64)


CORPORA = {
    "longtail-256k": LongTail(seq_length=262_144, sigma=1.78),
    "longtail-1m": LongTail(seq_length=1_048_576, sigma=2.34),
}
"""The presets by name."""


def packed_corpus(name: str, *, num_sequences: int, seed: int) -> LengthRows:
    """Packed sequences of a preset, shuffled; the same for the same arguments.

    Documents are packed by best-fit decreasing in windows of 20,000 without a cut, so a row may be
    shorter than seq_length.

    Args:
        name: a key of CORPORA.
        num_sequences: rows to return.
        seed: of numpy's default_rng.

    Raises:
        ValueError: an unknown name, or no row is asked for.
    """
    if name not in CORPORA:
        raise ValueError(f"corpus {name!r} must be one of {', '.join(CORPORA)}.")
    if num_sequences < 1:
        raise ValueError(f"num_sequences ({num_sequences}) must be at least 1; try 128.")
    corpus = CORPORA[name]
    rng = np.random.default_rng(seed)
    parts: list[LengthRows] = []
    while sum(map(len, parts)) < num_sequences:
        lengths = corpus.document_lengths(WINDOW, rng)
        parts.append(pack_best_fit(lengths, corpus.seq_length, window=WINDOW).rows)
    rows = LengthRows.concatenate(parts)
    return rows.take(rng.permutation(len(rows))[:num_sequences])
