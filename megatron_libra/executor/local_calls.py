"""The kernel calls of the local part. In: rounds over a worker's own rows. Out: LocalCalls.

A round is one call for all heads, unless that is too large for the kernel or its halves are divided
by heads (plan/parts.py). Example, 4 query heads on 2 kv heads, a round divided by heads:

    early    query heads 0 1    kv head 0    call 0
    late     query heads 2 3    kv head 1    call 1
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_libra.executor.kernels import BoundRound
from megatron_libra.plan.heads import HeadPartition

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
        cut = heads.kv_heads - late_kv_heads
        early, late = _slices(heads, 0, cut), _slices(heads, cut, heads.kv_heads)
        late_rounds = rounds if late_kv_heads else rounds[num_early_rounds:]
        if not late_kv_heads:
            late = early
        first = _calls(rounds[:num_early_rounds], early, 0)
        return cls(first, _calls(late_rounds, late, len(first)), heads.chunks > heads.kv_pieces)

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
    rounds: Sequence[BoundRound], pieces: Sequence[tuple[slice, slice, bool]], number: int
) -> tuple[LocalCall, ...]:
    every = [(each, *piece) for each in rounds for piece in pieces]
    return tuple(LocalCall(number + index, *call) for index, call in enumerate(every))


def _slices(heads: HeadPartition, start: int, stop: int) -> list[tuple[slice, slice, bool]]:
    """Query heads, kv heads [start, stop) and is_first of every chunk's share of these kv heads."""
    return [
        (queries, kv, is_first)
        for queries, kv, is_first in _chunks(heads, start, stop)
        if kv.start < kv.stop
    ]


def _chunks(heads: HeadPartition, start: int, stop: int) -> Iterator[tuple[slice, slice, bool]]:
    width, kv_width = heads.query_heads_per_chunk, heads.kv_heads_per_chunk
    ratio = heads.query_heads // heads.kv_heads
    for chunk in range(heads.chunks):
        first_query, piece = chunk * width, heads.kv_piece_of(chunk)
        kv = slice(max(start, piece * kv_width), min(stop, (piece + 1) * kv_width))
        is_first = chunk == 0 or heads.kv_piece_of(chunk - 1) != piece
        queries = slice(first_query, first_query + width)
        if heads.chunks <= heads.kv_pieces:  # whole kv heads, which the range may cut off
            queries = slice(kv.start * ratio, kv.stop * ratio)
        yield queries, kv, is_first
