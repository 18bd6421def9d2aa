"""Expand one worker's route from ranges to row numbers. In: WorkerRoute. Out: RouteIndex (numpy,
host).

Around an exchange rows stand in *travel order*: rows of the other workers by ascending peer, then
the local rows, which never travel. Example, worker 0 of 2, H = 1, M = 1, tokens 0..3, computing its
own tokens 2, 3 and the peer's token 5:

    home rows        0 1 2 3        sent:     to worker 1: 0 1     local: 2 3        travel order 0
    1 | 2 3 compute rows     2' 3' 5'       arrived:  from worker 1: row 2  local: rows 0 1   travel
    order 2 | 0 1 arrange          1 2 0          compute row i is row arrange[i] of the arrived
    rows
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.worker_plan import WorkerRoute

__all__ = ["RouteIndex", "index_route"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class RouteIndex:
    """Row numbers of one route, for one head chunk: a home row is token * shards + shard."""

    sent_rows: Int64
    """Home rows in travel order: to the other workers, then local."""
    depart: Int64
    """Compute rows in travel order: from the other workers, then local. The inverse of
    `arrange`."""
    arrange: Int64
    """Travel position of every compute row."""
    send_count: Int64
    """(W,) rows sent to each worker, 0 for the own."""
    receive_count: Int64
    """(W,) rows received from each worker, 0 for the own."""

    @property
    def is_in_order(self) -> bool:
        """True if rows arrive in compute order, so that nothing needs to be rearranged."""
        return bool((self.arrange == np.arange(len(self.arrange))).all())


def index_route(
    route: WorkerRoute, *, worker: int, num_workers: int, num_shards: int
) -> RouteIndex:
    """Expand a route. num_shards: H for the query route, K for the kv route."""
    sent = _expand(route.send_token, route.send_count) * num_shards
    sent += np.repeat(route.send_shard, route.send_count)
    sent_peer = np.repeat(route.send_peer, route.send_count)
    arrived = _expand(route.recv_row, route.recv_count)
    arrived_peer = np.repeat(route.recv_peer, route.recv_count)

    # the order of local rows is free: with compute order, a worker that computes only its own
    # tokens rearranges nothing
    local_compute = arrived[arrived_peer == worker]
    by_row = np.argsort(local_compute, kind="stable")
    sent_rows = np.concatenate([sent[sent_peer != worker], sent[sent_peer == worker][by_row]])
    depart = np.concatenate([arrived[arrived_peer != worker], local_compute[by_row]])
    arrange = np.empty_like(depart)
    arrange[depart] = np.arange(len(depart))
    return RouteIndex(
        sent_rows=sent_rows,
        depart=depart,
        arrange=arrange,
        send_count=_per_worker(sent_peer, worker, num_workers),
        receive_count=_per_worker(arrived_peer, worker, num_workers),
    )


def positions_at_home(sent_rows: Int64, num_home_rows: int, num_chunks: int) -> Int64:
    """For every (home row, chunk), where its only returned row stands; padding rows get the zero
    row behind all.

    Returned rows are chunk-major: chunk * num_sent + travel position; the zero row is num_chunks *
    num_sent.
    """
    num_sent = len(sent_rows)
    position = np.full((num_home_rows, num_chunks), num_chunks * num_sent, np.int64)
    position[sent_rows] = np.arange(num_sent)[:, None] + np.arange(num_chunks) * num_sent
    return position.ravel()


def contributions_at_home(sent_rows: Int64, num_home_rows: int) -> tuple[list[Int64], Int64]:
    """How to sum several returned rows of one home row in a fixed order, by gathers alone.

    Home rows are ranked by falling number of contributions, so that the j-th contributions belong
    to a prefix.

    Returns:
        passes: passes[j][i] is the travel position of the j-th contribution to the home row of rank
            i.
        rank: (num_home_rows,) rank of a home row; the number of ranks for rows without
            contributions.
    """
    order = np.argsort(sent_rows, kind="stable")
    count = np.bincount(sent_rows, minlength=num_home_rows)
    first = np.cumsum(count) - count
    by_count = np.argsort(-count, kind="stable")
    num_ranks = int((count > 0).sum())
    passes = []
    for contribution in range(int(count.max(initial=0))):
        rows = by_count[: int((count > contribution).sum())]
        passes.append(order[first[rows] + contribution])
    rank = np.full(num_home_rows, num_ranks, np.int64)
    rank[by_count[:num_ranks]] = np.arange(num_ranks)
    return passes, rank


def _expand(start: NDArray[np.int32], count: NDArray[np.int32]) -> Int64:
    """Concatenated ranges [start, start + count)."""
    counts = count.astype(np.int64)
    offset = start.astype(np.int64) - (np.cumsum(counts) - counts)
    return np.repeat(offset, counts) + np.arange(counts.sum())


def _per_worker(peer: NDArray[np.int32], worker: int, num_workers: int) -> Int64:
    count = np.bincount(peer, minlength=num_workers)
    count[worker] = 0
    return count
