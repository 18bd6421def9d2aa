"""What a plan makes each worker compute, send and hold. In: PoolPlan. Out: PoolWork.

All the simulator needs of a plan; small, so that a plan can be dropped once it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.exchange import RouteTable
from megatron_libra.plan.parts import pipeline_order
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.worker_plan import is_in_place
from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.timeline import PassTraffic

__all__ = ["Gathers", "PoolWork"]

Int64 = NDArray[np.int64]
Float = NDArray[np.float64]
Bool = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class Gathers:
    """Bytes read and written to order rows around the exchange, in one pass of S steps."""

    packed: Float
    """(S, W) before a chunk is sent."""
    copied: Float
    """(W,) before the local part, where it does not compute in the home tensors."""
    sorted: Float
    """(S, W) when a chunk has arrived, and before its results are sent."""
    gathered: Float
    """(W,) when all has come back."""


@dataclass(frozen=True, slots=True, eq=False)
class PoolWork:
    """One layer's forward on W workers. Bytes of exchanged parts are by part, NEAR and FAR."""

    head_dim: int
    chunks: int
    """M."""
    kv_pieces: int
    """U, chunks that bring new kv heads."""
    load_target: float
    """C, (1 + tau) times the mean pairs of a worker."""
    max_tile: int
    """Pairs of the heaviest tile."""
    pairs: Int64
    """(W,) causal query-key pairs of one query head of the tiles."""
    calls: CallTable
    """Varlen calls of all workers; those of exchanged parts once, each of M chunks makes them."""
    query_bytes: Int64
    """(2, W, W) bytes of Q that cross workers, source row, destination column; O goes back."""
    kv_bytes: Int64
    """(2, W, W) bytes of K and V."""
    own_query_bytes: Int64
    """(2, W) bytes of Q that stay on their worker."""
    own_kv_bytes: Int64
    """(2, W) the same of K and V."""
    copied_query_bytes: Int64
    """(W,) bytes of Q of the local part where it computes in copies; in place nothing is moved."""
    copied_kv_bytes: Int64
    """(W,) the same of K and V."""
    resident_kv_bytes: Int64
    """(W,) bytes of K and V held while the layer runs."""
    same_node: Bool
    """(W, W) whether two workers share a node."""

    @classmethod
    def of(cls, plan: PoolPlan, workers_per_node: int) -> PoolWork:
        """Count a plan; the pool's first worker is the first of a node."""
        size, heads = plan.num_workers, plan.heads
        element = plan.shape.head_dim * plan.shape.bytes_per_element
        sent = [part.sent_bytes(plan.shape, heads) for part in (plan.near, plan.far)]
        query, kv = (np.stack(parts) for parts in zip(*sent, strict=True))
        tokens = plan.seq_length // plan.context_parallel_size
        exchanged = plan.query_rows.sum(axis=1) // heads.head_split
        copied = _copied_tokens(plan.local.query, exchanged, tokens)
        node = np.arange(size) // workers_per_node
        total = int(plan.tiles.pairs.sum())
        return cls(
            head_dim=plan.shape.head_dim,
            chunks=heads.chunks,
            kv_pieces=heads.kv_pieces,
            load_target=(1 + plan.config.load_slack) * total / size,
            max_tile=int(plan.tiles.pairs.max(initial=0)),
            pairs=plan.loads,
            calls=CallTable.of_plan(plan),
            query_bytes=_without_diagonal(query),
            kv_bytes=_without_diagonal(kv),
            own_query_bytes=np.diagonal(query, axis1=1, axis2=2).copy(),
            own_kv_bytes=np.diagonal(kv, axis1=1, axis2=2).copy(),
            copied_query_bytes=copied * plan.shape.query_heads * element,
            copied_kv_bytes=copied * 2 * plan.shape.kv_heads * element,
            resident_kv_bytes=plan.peak_resident_kv_bytes,
            same_node=node[:, None] == node,
        )

    @property
    def num_workers(self) -> int:
        """W."""
        return len(self.pairs)

    @property
    def traffic_bytes(self) -> Int64:
        """(W, W) bytes of Q, K, V and O between workers; equals PoolPlan.traffic_bytes."""
        query, kv = self.query_bytes.sum(axis=0), self.kv_bytes.sum(axis=0)
        moved: Int64 = query + query.T + kv
        return moved

    @property
    def worker_bytes(self) -> Int64:
        """(W,) the larger of what a worker sends and receives."""
        moved = self.traffic_bytes
        return np.maximum(moved.sum(axis=1), moved.sum(axis=0))

    @property
    def inter_node_bytes(self) -> int:
        """Bytes that leave their node."""
        return int(self.traffic_bytes[~self.same_node].sum())

    @property
    def imbalance(self) -> float:
        """max / mean - 1 of the pairs."""
        total = int(self.pairs.sum())
        return int(self.pairs.max()) * len(self.pairs) / total - 1 if total else 0.0

    @property
    def tile_over_target(self) -> float:
        """The heaviest tile over C; near or above 1, no placer can balance."""
        return self.max_tile / self.load_target if self.load_target else 0.0

    def traffic(self, *, backward: bool, refetch: bool = False) -> PassTraffic:
        """Bytes of each step: Q, K and V go out and O comes back; in backward dO goes out and dQ,
        dK and dV come back, with refetch Q, O, K and V go out again.

        K and V travel with a part's first chunk that computes with them, dK and dV with its last.
        """
        part, brings, finishes = self._steps
        query, kv = self.query_bytes[part] / self.chunks, self.kv_bytes[part] / self.kv_pieces
        sends_kv = brings * float(refetch or not backward)
        tokens = query * (3 if backward and refetch else 1)
        dispatch = tokens + sends_kv[:, None, None] * kv
        back = query + (finishes * float(backward))[:, None, None] * kv
        return PassTraffic(dispatch, back.transpose(0, 2, 1))

    @property
    def order(self) -> tuple[tuple[int, int], ...]:
        """(S,) part and chunk of each step between the local halves."""
        return pipeline_order(self.chunks)

    @property
    def _steps(self) -> tuple[Int64, Bool, Bool]:
        """(S,) part of each step, and whether its chunk is the first, and the last, of its part
        that computes with a kv piece."""
        part, chunk = np.array(self.order, np.int64).T
        piece = np.arange(self.chunks) * self.kv_pieces // self.chunks
        first, last = np.diff(piece, prepend=-1) > 0, np.diff(piece, append=self.kv_pieces) > 0
        return part, first[chunk], last[chunk]

    def gathers(self, *, backward: bool, refetch: bool = False) -> Gathers:
        """Every row is read and written where it is packed, sorted and gathered.

        Copies of local rows are written over what was gathered in their place; Q, K and V are
        copied in forward, dO in backward, and with refetch Q, K, V and O again.
        """
        traffic = self.traffic(backward=backward, refetch=refetch)
        leaves, arrives = traffic.dispatch.sum(axis=2), traffic.dispatch.sum(axis=1)
        back = traffic.return_.sum(axis=2)
        own = self._own(backward=backward, refetch=refetch)
        own_back = self._own_back(backward=backward)
        home = traffic.return_.sum(axis=(0, 1)) + own_back.sum(axis=0)
        home = home + 2 * self.copied_query_bytes + float(backward) * self.copied_kv_bytes
        tokens = self.copied_query_bytes * (3 if backward and refetch else 1)
        copied = tokens + self.copied_kv_bytes * float(refetch or not backward)
        return Gathers(
            packed=2 * (leaves + own),
            copied=2 * copied,
            sorted=2 * (arrives + own + back + own_back),
            gathered=2 * home,
        )

    def _own(self, *, backward: bool, refetch: bool) -> Float:
        """(S, W) bytes of a step's dispatch that stay on their worker."""
        part, brings, _ = self._steps
        tokens = self.own_query_bytes[part] / self.chunks * (3 if backward and refetch else 1)
        kv = self.own_kv_bytes[part] / self.kv_pieces * float(refetch or not backward)
        own: Float = tokens + brings[:, None] * kv
        return own

    def _own_back(self, *, backward: bool) -> Float:
        """(S, W) bytes of a step's return that stay on their worker."""
        part, _, finishes = self._steps
        kv = self.own_kv_bytes[part] / self.kv_pieces * float(backward)
        own: Float = self.own_query_bytes[part] / self.chunks + finishes[:, None] * kv
        return own


def _copied_tokens(local: RouteTable, exchanged: Int64, num_tokens: int) -> Int64:
    """(W,) tokens of the local part where it is not computed in place.

    Args:
        local: where the tokens of the local part are.
        exchanged: (W,) tokens of each home in the other parts.
        num_tokens: of a home, padding included.
    """
    num_workers = len(exchanged)
    order = np.lexsort((local.token, local.destination))
    worker, count = local.destination[order], local.count[order].astype(np.int64)
    start = local.token[order].astype(np.int64)
    stop, is_first = start + count, np.diff(worker, prepend=-1) != 0
    before = np.where(is_first, 0, np.roll(stop, 1))
    last_stop = np.zeros(num_workers, np.int64)
    np.maximum.at(last_stop, worker, stop)
    num_gaps = np.bincount(worker[start > before], minlength=num_workers) + (last_stop < num_tokens)
    tokens = np.zeros(num_workers, np.int64)
    np.add.at(tokens, worker, count)
    copied: Int64 = np.where(is_in_place(tokens, tokens + exchanged, num_gaps), 0, tokens)
    return copied


def _without_diagonal(matrix: Int64) -> Int64:
    """(2, W, W) without what stays."""
    return matrix * ~np.eye(matrix.shape[-1], dtype=np.bool_)
