"""Where the local part computes: in the home tensors themselves, or in copies of its rows.

In: the ranges of a worker's local part. Out: LocalRows, and varlen calls over them.

In place, queries, keys and results are used where the home has them; what is exchanged leaves gaps.
A call skips a small gap as an entry without keys and one without queries, and ends at a large one:
a kernel's tile costs about as much as a short sample even where it has nothing to compute. That is
free of copies, so it is chosen where most of the home's samples are local, in few ranges. Elsewhere
the home gathers all of its rows from a mailbox, and the few local ones are copied. Example, ranges
of 3 and 2 tokens at tokens 1 and 5 of 8, all early:

    token       0 1 2 3 4 5 6 7
    in place      a a a - b b        cu_queries 0 3 4 4 6    cu_keys 0 3 3 4 6    rows 1 .. 6
    copies        a a a b b          cu_queries 0 3 5        cu_keys 0 3 5        rows 0 .. 4
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.plan.worker_plan import LocalPart, Round

__all__ = ["LocalRows", "TokenRanges"]

Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """Tokens of the local part in tensors of this worker."""

    index: torch.Tensor | None
    """(tokens,) int64 in compute order; None: computed in place."""

    def take(self, home: torch.Tensor) -> torch.Tensor:
        """What the calls read: the home tensor itself, or its local rows in compute order. A
        kernel wants the elements of a row side by side (the gradient of a sum has none so)."""
        if self.index is not None:
            return home.index_select(0, self.index)
        return home if home.stride(-1) == 1 else home.contiguous()

    def results(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor for what the calls write: like the home tensor, or its local rows."""
        num_rows = len(like) if self.index is None else len(self.index)
        return like.new_empty(num_rows, *like.shape[1:], dtype=dtype)

    def put(self, home: torch.Tensor, results: torch.Tensor) -> None:
        """Write results to the local rows of a home tensor. Not in place."""
        assert self.index is not None
        if len(self.index):
            home.index_copy_(0, self.index, results)


@dataclass(frozen=True, slots=True, eq=False)
class TokenRanges:
    """The local part as ranges of home tokens, ascending."""

    start: Int64
    stop: Int64
    is_early: Bool

    @classmethod
    def of(cls, local: LocalPart, tokens: Int32) -> TokenRanges:
        """tokens: the local tokens in compute order."""
        starts, counts, early = [], [], []
        for number, each in enumerate(local.rounds):
            counts.append(np.diff(each.cu_queries).astype(np.int64))
            starts.append(tokens[each.query_start + each.cu_queries[:-1]].astype(np.int64))
            early.append(np.full(len(counts[-1]), number < local.num_early_rounds))
        start, count, is_early = (
            np.concatenate(x) if x else np.zeros(0, np.int64) for x in (starts, counts, early)
        )
        order = np.argsort(start, kind="stable")
        return cls(start[order], (start + count)[order], is_early[order].astype(np.bool_))

    def gaps(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Token ranges in [0, num_tokens) that are not local, ascending."""
        starts = np.append(self.start, num_tokens)
        stops = np.concatenate([np.zeros(1, np.int64), self.stop])
        return tuple((int(a), int(b)) for a, b in zip(stops, starts, strict=True) if a < b)

    def rounds(self, largest_gap: int) -> tuple[tuple[Round, ...], int]:
        """Calls over home tokens that skip gaps of up to largest_gap tokens, the early ones first;
        and how many are early."""
        gap = self.start[1:] - self.stop[:-1]
        ends = (gap > largest_gap) | (self.is_early[1:] != self.is_early[:-1])
        early, late = [], []
        for piece in np.split(np.arange(len(self.start)), np.flatnonzero(ends) + 1):
            if len(piece):
                made = _over_tokens(self.start[piece], self.stop[piece])
                (early if self.is_early[piece[0]] else late).append(made)
        return (*early, *late), len(early)


def _over_tokens(starts: Int64, stops: Int64) -> Round:
    """One call over ascending ranges [start, stop)."""
    counts = stops - starts
    gaps = starts - np.concatenate([starts[:1], stops[:-1]])
    # before each range: the gap's queries without keys, its keys without queries
    queries = np.stack([gaps, np.zeros_like(gaps), counts], axis=1).ravel()
    keys = np.stack([np.zeros_like(gaps), gaps, counts], axis=1).ravel()
    kept = queries + keys > 0
    return Round(
        query_start=int(starts[0]),
        query_stop=int(stops[-1]),
        key_start=int(starts[0]),
        key_stop=int(stops[-1]),
        cu_queries=_boundaries(queries[kept]),
        cu_keys=_boundaries(keys[kept]),
        max_queries=int(queries.max()),
        max_keys=int(keys.max()),
    )


def _boundaries(counts: Int64) -> Int32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
