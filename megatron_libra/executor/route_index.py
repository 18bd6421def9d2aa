"""Expand one worker's route from ranges to row numbers. In: WorkerRoute. Out: RouteIndex (numpy).

Around an exchange rows stand in *travel order*: rows of the other workers by ascending peer, then
the local rows, which never travel. Example, worker 0 of 2 with tokens 0..3 and one head shard,
computing its own tokens 2, 3 and token 5 of the peer:

    home rows      0 1 2 3      sent:     to worker 1: 0 1      local: 2 3        travel 0 1 | 2 3
    compute rows   2 3 5        arrived:  from worker 1: row 2  local: rows 0 1   travel 2 | 0 1
    arrange        1 2 0        compute row i is the arrived row at travel position arrange[i]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.worker_plan import WorkerRoute

__all__ = ["NOWHERE", "RouteIndex", "contributions_at_home", "index_route", "positions_at_home"]

Int32 = NDArray[np.int32]
NOWHERE = -1
"""The position of a home row that was not sent: a token of the padding tail."""


@dataclass(frozen=True, slots=True, eq=False)
class RouteIndex:
    """Row numbers of one route, for all head chunks; a home row is token * shards + shard."""

    sent_rows: Int32
    """Home rows in travel order: to the other workers, then local."""
    depart: Int32
    """Compute rows in travel order: from the other workers, then local."""
    arrange: Int32
    """Travel position of every compute row; the inverse of depart."""


def index_route(route: WorkerRoute, *, worker: int, num_shards: int) -> RouteIndex:
    """Expand a route. num_shards: H for the query route, K for the kv route."""
    local_sent, local_arrived = route.send_peer == worker, route.recv_peer == worker
    sent = _expand(route.send_token, route.send_count, num_shards, route.send_shard)
    arrived = _expand(route.recv_row, route.recv_count)
    stays = np.repeat(local_sent, route.send_count)
    stayed = np.repeat(local_arrived, route.recv_count)
    # the order of local rows is free: with compute order, a worker that computes only its own
    # tokens rearranges nothing
    by_row = np.argsort(arrived[stayed], kind="stable")
    depart = np.concatenate([arrived[~stayed], arrived[stayed][by_row]])
    position = np.arange(len(depart), dtype=np.int32)
    arrange = np.empty_like(depart)
    arrange[depart] = position
    return RouteIndex(
        sent_rows=np.concatenate([sent[~stays], sent[stays][by_row]]),
        depart=depart,
        arrange=arrange,
    )


def positions_at_home(sent_rows: Int32, num_home_rows: int) -> Int32:
    """(num_home_rows,) travel position of each home row's only returned row, or NOWHERE."""
    position = np.full(num_home_rows, NOWHERE, np.int32)
    position[sent_rows] = np.arange(len(sent_rows), dtype=np.int32)
    return position


def contributions_at_home(sent_rows: Int32) -> tuple[list[Int32], Int32]:
    """How to sum several returned rows of one home row in a fixed order, by gathers alone.

    Home rows are ordered by falling number of contributions, so that the j-th contributions belong
    to the first of them.

    Args:
        sent_rows: home rows in travel order; a row is there once for each worker that got it.

    Returns:
        passes: passes[j][i] is the position in sent_rows of the j-th contribution to rows[i].
        rows: the home rows with contributions, by falling number of them, then ascending.
    """
    order = np.argsort(sent_rows, kind="stable").astype(np.int32)
    ascending = sent_rows[order]
    is_first = np.ones(len(ascending), np.bool_)
    is_first[1:] = ascending[1:] != ascending[:-1]
    first = np.flatnonzero(is_first)
    count = np.diff(first, append=len(ascending)).astype(np.int16)
    by_count = np.argsort(-count, kind="stable")
    first, count = first[by_count], count[by_count]
    passes = [order[first[count > j] + j] for j in range(int(count.max(initial=0)))]
    return passes, ascending[first]


def _expand(start: Int32, count: Int32, step: int = 1, offset: Int32 | None = None) -> Int32:
    """Concatenated ranges [start, start + count), times step, plus the range's offset."""
    first = start.astype(np.int64) - (np.cumsum(count) - count)
    base = first * step if offset is None else first * step + offset
    rows = np.arange(int(count.sum()), dtype=np.int32)
    return np.repeat(base.astype(np.int32), count) + (rows if step == 1 else rows * np.int32(step))
