"""Packed sequences of SFT-style jsonl. In: tokens of a line's conversations. Out: sample lengths.

The rule of Megatron's SFTDataset: a line is one packed sequence; each conversation is padded to a
multiple of 2 * CP, what exceeds seq_length is cut, and padding at the end joins the last one.
Example, seq_length 16 and CP 2: conversations 3 5 become 4 12; 3 5 9 become 4 8 4.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from megatron_libra.data.rows import LengthRows

__all__ = ["ConversationLengths", "fold_conversations"]


def fold_conversations(
    counts: Sequence[int], *, seq_length: int, context_parallel_size: int = 1
) -> tuple[int, ...]:
    """Sample lengths of one packed sequence; they sum to seq_length.

    Args:
        counts: tokens of each conversation, at least one.
        seq_length: L, tokens of a packed sequence.
        context_parallel_size: CP; above 1, conversations are padded to a multiple of 2 * CP.
    """
    multiple = 2 * context_parallel_size if context_parallel_size > 1 else 1
    stops = np.cumsum(-(-np.asarray(counts, np.int64) // multiple) * multiple)
    stops = stops[: np.searchsorted(stops, seq_length) + 1]
    stops[-1] = seq_length  # cut here, or padded up to here
    return tuple(length for length in np.diff(stops, prepend=0).tolist() if length)


class ConversationLengths:
    """LengthTable of an SFTDataset: sample i is the line `line_index[i % len(line_index)]`."""

    def __init__(
        self,
        rows: LengthRows,
        *,
        line_index: ArrayLike,
        num_samples: int,
        seq_length: int,
        context_parallel_size: int = 1,
    ) -> None:
        self._rows = rows
        self._line_index = np.asarray(line_index, np.int64)
        self._num_samples = num_samples
        self._seq_length = seq_length
        self._context_parallel_size = context_parallel_size

    def __len__(self) -> int:
        return self._num_samples

    def lengths(self, sample_index: int) -> tuple[int, ...]:
        """As LengthTable; IndexError outside [0, len)."""
        if not 0 <= sample_index < self._num_samples:
            raise IndexError(f"sample {sample_index} is outside [0, {self._num_samples}).")
        line = int(self._line_index[sample_index % self._line_index.size])
        return fold_conversations(
            self._rows.lengths(line),
            seq_length=self._seq_length,
            context_parallel_size=self._context_parallel_size,
        )
