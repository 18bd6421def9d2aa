"""What a planner made of a pool. In: loads and routes. Out: Outcome, the same for every planner.

Bytes are of one attention layer's forward. A planner that works on tokens instead of tiles hands in
query ranges; they are counted by the same exchange tables as our own plans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape
from megatron_libra.plan.exchange import kv_route, query_route, traffic_rows
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.rounds import GroupTable, RangeTable
from megatron_libra.plan.sequences import SamplePool
from megatron_libra.plan.tiles import causal_pairs

__all__ = ["Int64", "Outcome", "QueryRanges", "kv_row_bytes", "query_row_bytes"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Loads and bytes of W workers."""

    loads: Int64
    """(W,) causal query-key pairs; the unit (of one head, of a shard) is the planner's."""
    query_bytes: Int64
    """(W, W) bytes of Q, source row, destination column; O goes back the other way."""
    kv_bytes: Int64
    """(W, W) bytes of K and V."""
    fullest: float = 1.0
    """Tokens of the longest packed sequence over seq_length; above 1 where a rule repacks."""

    @property
    def max_over_mean(self) -> float:
        """Largest over mean load; 1 is balance."""
        total = int(self.loads.sum())
        return int(self.loads.max()) * len(self.loads) / total if total else 1.0

    @property
    def traffic_bytes(self) -> Int64:
        """(W, W) bytes of Q, K, V and O."""
        return self.query_bytes + self.query_bytes.T + self.kv_bytes

    @property
    def total_bytes(self) -> int:
        """Sent by all workers."""
        return int(self.traffic_bytes.sum())

    @property
    def worker_bytes(self) -> int:
        """Of the most loaded worker, the larger of sent and received."""
        moved = self.traffic_bytes
        return int(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def query_row_bytes(shape: AttentionShape) -> int:
    """Bytes of Q (or O) of one token, all heads."""
    return shape.query_heads * shape.head_dim * shape.bytes_per_element


def kv_row_bytes(shape: AttentionShape) -> int:
    """Bytes of K and V of one token, all heads."""
    return 2 * shape.kv_heads * shape.head_dim * shape.bytes_per_element


@dataclass(frozen=True, slots=True, eq=False)
class QueryRanges:
    """A placement by tokens: queries [start, stop) of a sample, all heads, on a worker."""

    worker: Int64
    sample: Int64
    """Row of the sample in SamplePool."""
    start: Int64
    stop: Int64

    def outcome(self, samples: SamplePool, layout: TokenLayout, shape: AttentionShape) -> Outcome:
        """Count a placement: queries come from their homes, and so does, once for each worker and
        sample, the prefix of K and V up to the last query there.
        """
        size = samples.num_slots * layout.context_parallel_size
        loads = np.zeros(size, np.int64)
        np.add.at(loads, self.worker, causal_pairs(self.start, self.stop))
        zero = np.zeros(len(self.worker), np.int64)
        ranges = RangeTable(self.worker, zero, self.sample, self.start, self.stop, zero)
        queries = traffic_rows(query_route(samples, layout, ranges), size)
        keys = traffic_rows(kv_route(samples, layout, self._groups()), size)
        return Outcome(loads, queries * query_row_bytes(shape), keys * kv_row_bytes(shape))

    def _groups(self) -> GroupTable:
        order = np.lexsort((-self.stop, self.sample, self.worker))
        worker, sample = self.worker[order], self.sample[order]
        first = np.ones(len(order), np.bool_)
        first[1:] = (worker[1:] != worker[:-1]) | (sample[1:] != sample[:-1])
        zero = np.zeros(int(first.sum()), np.int64)
        keys = self.stop[order][first]
        return GroupTable(worker[first], zero, sample[first], keys, zero)
