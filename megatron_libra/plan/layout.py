"""Which worker holds which token (the homes).

In: L, CP, the kind. Out: maps between positions and homes.

Two kinds, drawn for L = 8 and CP = 2 (the digit is the CP rank that holds the token):

    contiguous   0 0 0 0 1 1 1 1      rank c holds the c-th of CP pieces
    zigzag       0 0 1 1 1 1 0 0      rank c holds pieces c and 2CP-1-c of 2CP, in this order
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import Layout

__all__ = ["TokenLayout", "round_up"]

Int64 = NDArray[np.int64]


def round_up(number: int, multiple: int) -> int:
    """The smallest multiple that is not below number."""
    return -(-number // multiple) * multiple


@dataclass(frozen=True)
class TokenLayout:
    """Homes of the tokens of one packed sequence.

    Raises:
        ValueError: seq_length is not a multiple of the number of pieces.
    """

    kind: Layout
    seq_length: int
    context_parallel_size: int

    def __post_init__(self) -> None:
        if self.context_parallel_size < 1:
            raise ValueError(
                f"context_parallel_size ({self.context_parallel_size}) must be at least 1; try 1."
            )
        if self.seq_length < 1 or self.seq_length % self.num_pieces:
            rule = "2 * context_parallel_size" if self.kind == "zigzag" else "context_parallel_size"
            raise ValueError(
                f"seq_length ({self.seq_length}) must be a multiple of {rule} ({self.num_pieces}) "
                f"for layout {self.kind}; try {round_up(max(self.seq_length, 1), self.num_pieces)}."
            )

    @property
    def num_pieces(self) -> int:
        """Pieces of equal length that a packed sequence is cut into."""
        return self.context_parallel_size * (2 if self.kind == "zigzag" else 1)

    @property
    def piece_tokens(self) -> int:
        """Tokens of one piece."""
        return self.seq_length // self.num_pieces

    @property
    def num_local_tokens(self) -> int:
        """L / CP, tokens that one CP rank holds."""
        return self.seq_length // self.context_parallel_size

    @cached_property
    def piece_rank(self) -> Int64:
        """(pieces,) the CP rank that holds a piece."""
        pieces = np.arange(self.num_pieces)
        return np.minimum(pieces, 2 * self.context_parallel_size - 1 - pieces)

    @cached_property
    def piece_local_start(self) -> Int64:
        """(pieces,) where a piece starts among its rank's tokens."""
        second = np.arange(self.num_pieces) >= self.context_parallel_size
        return second * np.int64(self.piece_tokens)

    def positions(self, cp_rank: int) -> Int64:
        """(L / CP,) positions of a CP rank's tokens, in local order."""
        pieces = np.flatnonzero(self.piece_rank == cp_rank)
        return (pieces[:, None] * self.piece_tokens + np.arange(self.piece_tokens)).ravel()

    def local_tokens(self, start: Int64, stop: Int64) -> Int64:
        """(n, CP) tokens of each range [start, stop) that each CP rank holds."""
        first = np.arange(self.num_pieces) * self.piece_tokens
        low = np.maximum(start[:, None], first)
        high = np.minimum(stop[:, None], first + self.piece_tokens)
        held: Int64 = np.maximum(high - low, 0)
        size = self.context_parallel_size
        return held[:, :size] + held[:, : size - 1 : -1] if self.kind == "zigzag" else held
