"""The kernel calls of the local part. In: rounds over a worker's own rows. Out: LocalCalls.

A round is one call for all heads, unless that is too large for the kernel or its halves are divided
by heads (plan/parts.py). Example, 4 query heads on 2 kv heads, a round divided by heads:

    early    query heads 0 1    kv head 0    call 0
    late     query heads 2 3    kv head 1    call 1
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_libra.executor.kernels import BoundRound
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.worker_plan import halves_of

__all__ = ["LocalCall", "LocalCalls"]


@dataclass(frozen=True, slots=True)
class LocalCall:
    """One kernel call: a round and a range of heads."""

    number: int
    """Among all calls of the local part, in time order: its log-sum-exp."""
    bound_round: BoundRound
    query_heads: slice
    kv_heads: slice
    is_first: bool
    """No earlier call of the round had these kv heads."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalCalls:
    """Both halves."""

    early: tuple[LocalCall, ...]
    """Under the first dispatch."""
    late: tuple[LocalCall, ...]
    """Under the last return."""
    shares_kv: bool
    """Several calls of a round have the same kv heads, whose gradients are then summed."""

    @classmethod
    def of(
        cls,
        rounds: Sequence[BoundRound],
        num_early_rounds: int,
        late_kv_heads: int,
        heads: HeadPartition,
    ) -> LocalCalls:
        """See LocalPart; heads has all heads, in as many chunks as a call of the kernel needs."""
        (first, early), (last, late) = halves_of(
            rounds, num_early_rounds, late_kv_heads, heads.kv_heads
        )
        begin = _calls(first, heads, early, 0)
        end = _calls(last, heads, late, len(begin))
        return cls(begin, end, heads.chunks > heads.kv_pieces)

    def __len__(self) -> int:
        return len(self.early) + len(self.late)

    @property
    def num_query_rows(self) -> int:
        """Rows of all log-sum-exps, one for each query head: those of a gap in a call as well."""
        return sum(
            (call.bound_round.query_stop - call.bound_round.query_start)
            * (call.query_heads.stop - call.query_heads.start)
            for call in (*self.early, *self.late)
        )


def _calls(
    rounds: Sequence[BoundRound], heads: HeadPartition, kv_heads: range, number: int
) -> tuple[LocalCall, ...]:
    """The calls of some kv heads, numbered from a number on."""
    every = itertools.product(rounds, _pieces(heads, kv_heads))
    return tuple(LocalCall(n, each, *piece) for n, (each, piece) in enumerate(every, number))


def _pieces(heads: HeadPartition, kv_heads: range) -> Iterator[tuple[slice, slice, bool]]:
    """Query heads, kv heads and is_first of every chunk's share of some kv heads."""
    width, kv_width = heads.query_heads_per_chunk, heads.kv_heads_per_chunk
    ratio = heads.query_heads // heads.kv_heads
    for chunk in range(heads.chunks):
        piece = heads.kv_piece_of(chunk)
        start, stop = piece * kv_width, (piece + 1) * kv_width
        kv = slice(max(kv_heads.start, start), min(kv_heads.stop, stop))
        if kv.start >= kv.stop:
            continue
        queries = slice(chunk * width, (chunk + 1) * width)
        if heads.chunks <= heads.kv_pieces:  # whole kv heads, which the range may cut off
            queries = slice(kv.start * ratio, kv.stop * ratio)
        yield queries, kv, chunk == 0 or heads.kv_piece_of(chunk - 1) != piece
