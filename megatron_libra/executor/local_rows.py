"""Where the local part computes: in the home tensors themselves, or in copies of its rows.

In: the ranges of a worker's local part. Out: LocalRows, and varlen calls over them.

In place, queries, keys and results are used where the home has them, and tokens between the ranges
become entries without keys and entries without queries, which a kernel skips. That is free of
copies, so it is chosen where most of the home's rows are local. Where most are exchanged, the home
gathers its rows from a mailbox, and the few local ones are copied. Example, ranges of 3 and 2
tokens at tokens 1 and 5 of 8, all early:

    token       0 1 2 3 4 5 6 7
    in place      a a a - b b        cu_queries 0 3 4 4 6    cu_keys 0 3 3 4 6    rows 1 .. 6
    copies        a a a b b          cu_queries 0 3 5        cu_keys 0 3 5        rows 0 .. 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.plan.worker_plan import LocalPart, Round

__all__ = ["LocalRows", "rounds_in_place"]

Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class LocalRows:
    """Tokens of the local part in tensors of this worker."""

    index: torch.Tensor | None
    """(tokens,) int64 in compute order; None: computed in place."""

    def take(self, home: torch.Tensor) -> torch.Tensor:
        """What the calls read: the home tensor itself, or its local rows in compute order."""
        return home if self.index is None else home.index_select(0, self.index)

    def results(self, like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        """A new tensor for what the calls write: like the home tensor, or its local rows."""
        num_rows = len(like) if self.index is None else len(self.index)
        return like.new_empty(num_rows, *like.shape[1:], dtype=dtype)

    def put(self, home: torch.Tensor, results: torch.Tensor) -> None:
        """Write results to the local rows of a home tensor. Not in place."""
        assert self.index is not None
        if len(self.index):
            home.index_copy_(0, self.index, results)


def rounds_in_place(local: LocalPart, tokens: Int32) -> tuple[Round, ...]:
    """The rounds of a local part over home tokens.

    Args:
        tokens: the local tokens in compute order.
    """
    rounds = []
    for each in local.rounds:
        counts = np.diff(each.cu_queries)
        starts = tokens[each.query_start + each.cu_queries[:-1]]
        rounds.append(_over_tokens(starts, counts))
    return tuple(rounds)


def _over_tokens(starts: Int32, counts: Int32) -> Round:
    """One call over the ranges [start, start + count), which do not overlap."""
    order = np.argsort(starts, kind="stable")
    starts, counts = starts[order].astype(np.int64), counts[order].astype(np.int64)
    first, last = int(starts[0]), int(starts[-1] + counts[-1])
    gaps = starts - np.concatenate([starts[:1], (starts + counts)[:-1]])
    # before each range: the gap's queries without keys, its keys without queries
    queries = np.stack([gaps, np.zeros_like(gaps), counts], axis=1).ravel()
    keys = np.stack([np.zeros_like(gaps), gaps, counts], axis=1).ravel()
    kept = queries + keys > 0
    return Round(
        query_start=first,
        query_stop=last,
        key_start=first,
        key_stop=last,
        cu_queries=_boundaries(queries[kept]),
        cu_keys=_boundaries(keys[kept]),
        max_queries=int(queries.max()),
        max_keys=int(keys.max()),
    )


def _boundaries(counts: Sequence[int] | NDArray[np.int64]) -> Int32:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
