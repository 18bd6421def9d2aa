"""Varlen attention calls as numbers. In: a plan's entries. Out: CallTable, which cost models read.

A call is one round of one worker, for one head chunk of an exchanged part, or for all heads of
local work, or those of one half. It has a row of entries; an entry is some queries against the keys
that end with them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.parts import EARLY, FAR, LATE, NEAR
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.rounds import EntryTable

__all__ = ["PARTS", "CallTable", "part_weights"]

Int64 = NDArray[np.int64]
PARTS = ("near", "far", "early", "late")
"""Names by index: NEAR and FAR, of which calls are those of one chunk, EARLY and LATE."""


def part_weights(chunks: int) -> NDArray[np.float64]:
    """(4,) how often a layer's pass makes the calls of each part."""
    return np.array([chunks, chunks, 1, 1], np.float64)


@dataclass(frozen=True, eq=False)
class CallTable:
    """C calls of E entries."""

    num_queries: Int64
    """(E,) queries of an entry; 0 is a filler."""
    num_keys: Int64
    """(E,) keys of an entry."""
    first: Int64
    """(C,) the first entry of a call; every call has one at least."""
    query_heads: Int64
    """(C,)"""
    kv_heads: Int64
    """(C,)"""
    worker: Int64
    """(C,)"""
    part: Int64
    """(C,) NEAR, FAR, EARLY or LATE."""

    def __len__(self) -> int:
        return len(self.first)

    @cached_property
    def call(self) -> Int64:
        """(E,) the call of an entry."""
        counts = np.diff(self.first, append=len(self.num_queries))
        return np.repeat(np.arange(len(self.first)), counts)

    def sum(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(C,) sums of (E,) values."""
        if not len(self.first):
            return np.zeros(0)
        return np.add.reduceat(values, self.first)

    def max(self, values: NDArray[np.float64]) -> NDArray[np.float64]:
        """(C,) maxima of (E,) values."""
        if not len(self.first):
            return np.zeros(0)
        return np.maximum.reduceat(values, self.first)

    @classmethod
    def of_plan(cls, plan: PoolPlan) -> CallTable:
        """The calls of all workers; those of exchanged parts once, not once for each chunk."""
        heads, local = plan.heads, plan.local.entries
        chunk = heads.query_heads_per_chunk, heads.kv_heads_per_chunk
        late = local.round >= plan.local.early_rounds[local.worker]
        late_heads = plan.local.late_kv_heads[local.worker]
        twice = late_heads > 0
        again = EntryTable(
            local.worker[twice], local.round[twice], local.num_queries[twice], local.num_keys[twice]
        )
        ratio = heads.query_heads // heads.kv_heads
        first, second = heads.kv_heads - late_heads, late_heads[twice]
        return cls._joined(
            (plan.near.entries, NEAR, *chunk),
            (plan.far.entries, FAR, *chunk),
            (local, np.where(late, LATE, EARLY), ratio * first, first),
            (again, LATE, ratio * second, second),
        )

    @classmethod
    def _joined(
        cls, *tables: tuple[EntryTable, Int64 | int, Int64 | int, Int64 | int]
    ) -> CallTable:
        """Tables of entries, with the part, query heads and kv heads of each or of all."""
        columns, offset = [], 0
        for entries, *of_entries in tables:
            key = entries.worker * (int(entries.round.max(initial=0)) + 1) + entries.round
            first = np.flatnonzero(np.diff(key, prepend=-1))
            part, *heads = (np.broadcast_to(x, len(key))[first] for x in of_entries)
            columns.append((
                entries.num_queries, entries.num_keys, first + offset, *heads,
                entries.worker[first], part,
            ))  # fmt: skip
            offset += len(key)
        return cls(*(np.concatenate(each) for each in zip(*columns, strict=True)))

    @classmethod
    def of_calls(
        cls,
        entries: list[tuple[Int64, Int64]],
        query_heads: list[int],
        kv_heads: list[int],
    ) -> CallTable:
        """Calls by hand or of a worker: (queries, keys) of their entries; all of worker 0."""
        sizes = np.array([len(queries) for queries, _ in entries], np.int64)
        empty = np.zeros(0, np.int64)
        return cls(
            num_queries=np.concatenate([empty, *(q for q, _ in entries)]).astype(np.int64),
            num_keys=np.concatenate([empty, *(k for _, k in entries)]).astype(np.int64),
            first=np.cumsum(sizes) - sizes,
            query_heads=np.array(query_heads, np.int64),
            kv_heads=np.array(kv_heads, np.int64),
            worker=np.zeros(len(entries), np.int64),
            part=np.full(len(entries), NEAR),
        )
