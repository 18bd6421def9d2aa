"""What a plan makes each worker compute, send and hold. In: PoolPlan. Out: PoolWork.

All the simulator needs of a plan; small, so that a plan can be dropped once it is counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.exchange import traffic_rows
from megatron_libra.plan.pool_plan import PoolPlan

__all__ = ["PoolWork"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class PoolWork:
    """One layer's forward on W workers."""

    head_dim: int
    chunks: int
    """M."""
    kv_pieces: int
    """U, chunks that bring new kv heads."""
    heads_per_shard: int
    """Query heads of a shard, h_q / H."""
    heads_per_call: int
    """Query heads of one varlen call, h_q / (H M)."""
    load_target: float
    """C, (1 + tau) times the mean pairs of a worker."""
    max_tile: int
    """Pairs of the heaviest tile."""
    pairs: Int64
    """(W,) causal query-key pairs of one query head of the tiles."""
    query_rows: Int64
    """(W,) tokens x shards that a worker computes."""
    rounds: Int64
    """(W,) varlen calls for each chunk."""
    query_bytes: Int64
    """(W, W) bytes of Q that cross workers, source row, destination column; O goes back."""
    kv_bytes: Int64
    """(W, W) bytes of K and V."""
    resident_kv_bytes: Int64
    """(W,) bytes of K and V held while the layer runs."""
    same_node: NDArray[np.bool_]
    """(W, W) whether two workers share a node."""

    @classmethod
    def of(cls, plan: PoolPlan, workers_per_node: int) -> PoolWork:
        """Count a plan; the pool's first worker is the first of a node."""
        size, heads = plan.num_workers, plan.heads
        element = plan.shape.head_dim * plan.shape.bytes_per_element
        rows = np.bincount(plan.query.destination, plan.query.count, minlength=size)
        node = np.arange(size) // workers_per_node
        total = int(plan.tiles.pairs.sum())
        return cls(
            head_dim=plan.shape.head_dim,
            chunks=heads.chunks,
            kv_pieces=heads.kv_pieces,
            heads_per_shard=heads.query_heads_per_shard,
            heads_per_call=heads.query_heads_per_chunk,
            load_target=(1 + plan.config.load_slack) * total / size,
            max_tile=int(plan.tiles.pairs.max(initial=0)),
            pairs=plan.loads,
            query_rows=rows.astype(np.int64),
            rounds=plan.num_rounds,
            query_bytes=traffic_rows(plan.query, size) * (heads.query_heads_per_shard * element),
            kv_bytes=traffic_rows(plan.kv, size) * (2 * heads.kv_heads_per_shard * element),
            resident_kv_bytes=plan.peak_resident_kv_bytes,
            same_node=node[:, None] == node,
        )

    @property
    def traffic_bytes(self) -> Int64:
        """(W, W) bytes of Q, K, V and O between workers; equals PoolPlan.traffic_bytes."""
        return self.query_bytes + self.query_bytes.T + self.kv_bytes

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
