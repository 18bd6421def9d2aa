"""What travels between workers (section 4.3.3).

In: ranges and groups of each worker, homes. Out: two routes.

The query route carries Q (and dO) forward and O (and dQ) backward; the kv route K and V forward, dK
and dV backward. A row of a route is one token of one head shard. KV is fetched once for each
(sample, kv shard) and destination, in fragments from every worker that holds some of it. A transfer
whose source is its destination is a local copy. Example, CP = 2 contiguous, one sample of 8 tokens,
worker 0 computes queries [2, 4), worker 1 the rest, H = 1:

    query   1 <- 0: tokens 0, 1        0 <- 0: tokens 2, 3        1 <- 1: tokens 4..7
    kv      0 <- 0: tokens 0..3        1 <- 0: tokens 0..3        1 <- 1: tokens 4..7
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.rounds import GroupTable, RangeTable
from megatron_libra.plan.sequences import SamplePool

__all__ = ["RouteTable", "kv_route", "query_route", "route_rows", "traffic_rows"]

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class RouteTable:
    """Transfers of one route, by (destination, destination row); rows of a destination have no
    gaps.
    """

    source: Int32
    destination: Int32
    token: Int32
    """First local token at the source."""
    count: Int32
    """Tokens (= rows) of the transfer."""
    shard: Int32
    """Head shard (query route) or kv shard (kv route)."""
    row: Int32
    """First row in the destination's buffer."""


def query_route(samples: SamplePool, layout: TokenLayout, ranges: RangeTable) -> RouteTable:
    """Queries of every range, from their homes."""
    offset = samples.start[ranges.sample]
    return _route(
        layout,
        slot=samples.slot[ranges.sample],
        start=offset + ranges.start,
        stop=offset + ranges.stop,
        destination=ranges.worker,
        shard=ranges.head_shard,
        row=ranges.row,
    )


def kv_route(samples: SamplePool, layout: TokenLayout, groups: GroupTable) -> RouteTable:
    """Keys and values of every KV group, from their homes."""
    offset = samples.start[groups.sample]
    return _route(
        layout,
        slot=samples.slot[groups.sample],
        start=offset,
        stop=offset + groups.num_keys,
        destination=groups.worker,
        shard=groups.kv_shard,
        row=groups.row,
    )


def traffic_rows(route: RouteTable, num_workers: int) -> Int64:
    """(W, W) rows that cross workers, source row and destination column."""
    matrix = route_rows(route, num_workers)
    np.fill_diagonal(matrix, 0)
    return matrix


def route_rows(route: RouteTable, num_workers: int) -> Int64:
    """(W, W) rows from source to destination; the diagonal are those that stay."""
    pair = route.source.astype(np.int64) * num_workers + route.destination
    rows = np.zeros(num_workers * num_workers, np.int64)
    np.add.at(rows, pair, route.count)
    return rows.reshape(num_workers, num_workers)


def _route(
    layout: TokenLayout,
    *,
    slot: Int64,
    start: Int64,
    stop: Int64,
    destination: Int64,
    shard: Int64,
    row: Int64,
) -> RouteTable:
    """Cut position ranges at home pieces, then join neighbours contiguous at both ends."""
    first = start // layout.piece_tokens
    pieces = (stop - 1) // layout.piece_tokens - first + 1
    owner = np.repeat(np.arange(len(start)), pieces)
    piece = first[owner] + np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    low = np.maximum(start[owner], piece * layout.piece_tokens)
    high = np.minimum(stop[owner], (piece + 1) * layout.piece_tokens)
    return _join(
        source=slot[owner] * layout.context_parallel_size + layout.piece_rank[piece],
        destination=destination[owner],
        token=layout.piece_local_start[piece] + low - piece * layout.piece_tokens,
        count=high - low,
        shard=shard[owner],
        row=row[owner] + low - start[owner],
    )


def _join(
    *, source: Int64, destination: Int64, token: Int64, count: Int64, shard: Int64, row: Int64
) -> RouteTable:
    joins = np.zeros(len(source), np.bool_)
    joins[1:] = (
        (source[1:] == source[:-1])
        & (destination[1:] == destination[:-1])
        & (shard[1:] == shard[:-1])
        & (token[1:] == token[:-1] + count[:-1])
        & (row[1:] == row[:-1] + count[:-1])
    )
    first = np.flatnonzero(~joins)
    total = np.add.reduceat(count, first) if len(first) else count
    return RouteTable(
        *(
            column.astype(np.int32)
            for column in (
                source[first],
                destination[first],
                token[first],
                total,
                shard[first],
                row[first],
            )
        )
    )
