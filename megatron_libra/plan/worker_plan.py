"""One worker's part of a pool plan.

In: the routes and entries of a pool. Out: WorkerPlan.

A worker computes two exchanged parts, near and far, and a local part (see `parts`). Both lists of a
route contain the rows that stay (peer == worker); they never enter a collective. The i-th range
that a sends to b is the i-th that b receives from a.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape
from megatron_libra.plan.exchange import RouteTable
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.rounds import EntryTable

__all__ = [
    "MOST_GAPS",
    "ExchangedPart",
    "LocalPart",
    "Round",
    "WorkerPlan",
    "WorkerRoute",
    "cut_rounds",
    "halves_of",
    "is_in_place",
]

Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
MOST_GAPS = 32
"""Of a local part that is computed in place; each gap is filled by a gather of its own."""


def is_in_place(num_local: Int64 | int, num_computed: Int64 | int, num_gaps: Int64 | int) -> Bool:
    """Whether workers compute their local part in the home tensors themselves, which copies nothing
    but keeps them for backward, padding included: where it has most of the tokens, in few ranges.
    A worker without tokens keeps nothing.

    Args:
        num_local: (W,) or one, tokens of the local part.
        num_computed: tokens of the home that somebody computes: all but padding.
        num_gaps: ranges of home tokens between and around the local ones.
    """
    is_most = np.logical_and(2 * num_local >= num_computed, num_computed > 0)
    found: Bool = np.logical_and(is_most, num_gaps <= MOST_GAPS)
    return found


@dataclass(frozen=True, slots=True, eq=False)
class WorkerRoute:
    """One worker's side of a route, as ranges."""

    send_peer: Int32
    send_token: Int32
    """First local token of a range."""
    send_count: Int32
    send_shard: Int32
    recv_peer: Int32
    recv_row: Int32
    """First row of this worker's compute buffer."""
    recv_count: Int32

    @classmethod
    def of(cls, route: RouteTable, worker: int) -> WorkerRoute:
        """What a worker sends and receives: ascending peer, then the destination's row order."""
        sent = np.flatnonzero(route.source == worker)
        received = np.flatnonzero(route.destination == worker)
        sent = sent[np.argsort(route.destination[sent], kind="stable")]
        received = received[np.argsort(route.source[received], kind="stable")]
        return cls(
            send_peer=route.destination[sent],
            send_token=route.token[sent],
            send_count=route.count[sent],
            send_shard=route.shard[sent],
            recv_peer=route.source[received],
            recv_row=route.row[received],
            recv_count=route.count[received],
        )

    @property
    def num_rows(self) -> int:
        """Rows of the compute buffer."""
        return int(self.recv_count.sum())


@dataclass(frozen=True, slots=True, eq=False)
class Round:
    """One varlen call, causal and bottom-right aligned, whose empty entries are fillers: one for
    each head chunk of the exchanged part, one for all heads of the local part, or two."""

    query_start: int
    query_stop: int
    """Query rows [query_start, query_stop) of the compute buffer."""
    key_start: int
    key_stop: int
    """Keys are rows [key_start, key_stop) of the resident buffer."""
    cu_queries: Int32
    """(n + 1,) entry boundaries, relative to query_start."""
    cu_keys: Int32
    """(n + 1,) entry boundaries, relative to key_start."""
    max_queries: int
    max_keys: int


@dataclass(frozen=True, slots=True, eq=False)
class ExchangedPart:
    """Work on rows that come from other workers, with what stays; in M head chunks."""

    query: WorkerRoute
    kv: WorkerRoute
    query_rows: Int64
    """(W, W) rows of the query route from source to destination, the same on every worker."""
    kv_rows: Int64
    """(W, W) rows of the kv route."""
    rounds: tuple[Round, ...]


@dataclass(frozen=True, slots=True, eq=False)
class LocalPart:
    """Work whose queries and keys are all at home, never exchanged. A row is a token, all heads; an
    entry of a round is the start of a sample, as many queries as keys, each sample in one round."""

    query: WorkerRoute
    kv: WorkerRoute
    rounds: tuple[Round, ...]
    num_early_rounds: int
    """The first rounds are computed under the first dispatch, the others under the last return."""
    late_kv_heads: int
    """If above 0, all rounds are early ones, and each is two calls: the last so many kv heads with
    their query heads are computed under the last return, the others under the first dispatch."""

    def halves(self, kv_heads: int) -> Halves[Round]:
        """Early and late work, see halves_of."""
        return halves_of(self.rounds, self.num_early_rounds, self.late_kv_heads, kv_heads)


type Halves[R] = tuple[tuple[Sequence[R], range], tuple[Sequence[R], range]]


def halves_of[R](
    rounds: Sequence[R], num_early_rounds: int, late_kv_heads: int, kv_heads: int
) -> Halves[R]:
    """Early and late work of a local part: rounds, and their kv heads of all kv_heads. The other
    arguments are those of LocalPart."""
    if late_kv_heads:
        cut = kv_heads - late_kv_heads
        return (rounds, range(cut)), (rounds, range(cut, kv_heads))
    stop, every = num_early_rounds, range(kv_heads)
    return (rounds[:stop], every), (rounds[stop:], every)


@dataclass(frozen=True, slots=True, eq=False)
class WorkerPlan:
    """Everything one worker needs to bind a plan to its tensors."""

    worker: int
    num_workers: int
    num_local_tokens: int
    """L / CP."""
    shape: AttentionShape
    heads: HeadPartition
    digest: str
    """Digest of the pool plan this is a part of."""
    near: ExchangedPart
    """Tiles of the worker's own slot."""
    far: ExchangedPart
    """Tiles of other slots."""
    local: LocalPart

    @property
    def exchanged(self) -> tuple[ExchangedPart, ExchangedPart]:
        """The near and the far part."""
        return self.near, self.far

    @property
    def num_query_rows(self) -> int:
        """Rows of the compute query buffers of the exchanged parts, one chunk."""
        return sum(part.query.num_rows for part in self.exchanged)

    @property
    def num_kv_rows(self) -> int:
        """Rows of the resident K and V buffers of the exchanged parts, one kv piece."""
        return sum(part.kv.num_rows for part in self.exchanged)


def cut_rounds(
    entries: EntryTable, worker: int, *, early_rounds: int = 0, early_keys: int = 0
) -> tuple[Round, ...]:
    """The varlen calls of a worker; those behind the early ones read keys from early_keys on."""
    first, last = np.searchsorted(entries.worker, [worker, worker + 1])
    rounds: list[Round] = []
    query_start = 0
    for number in range(int(entries.round[last - 1]) + 1 if last > first else 0):
        begin, end = first + np.searchsorted(entries.round[first:last], [number, number + 1])
        queries, keys = entries.num_queries[begin:end], entries.num_keys[begin:end]
        cu_queries, cu_keys = _boundaries(queries), _boundaries(keys)
        key_start = 0 if number < early_rounds else early_keys
        rounds.append(
            Round(
                query_start=query_start,
                query_stop=query_start + int(cu_queries[-1]),
                key_start=key_start,
                key_stop=key_start + int(cu_keys[-1]),
                cu_queries=cu_queries,
                cu_keys=cu_keys,
                max_queries=int(queries.max()),
                max_keys=int(keys.max()),
            )
        )
        query_start += int(cu_queries[-1])
    return tuple(rounds)


def _boundaries(counts: NDArray[np.int64]) -> Int32:
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(counts)]).astype(np.int32)
