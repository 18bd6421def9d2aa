"""The parts of a layer for all workers: what is computed and what moves for it.

In: ranges and groups of a part, homes. Out: tables as they are broadcast, and one worker's share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape
from megatron_libra.plan.exchange import RouteTable, kv_route, query_route, route_rows
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.rounds import ComputePlan, EntryTable, PartTables
from megatron_libra.plan.sequences import SamplePool
from megatron_libra.plan.worker_plan import ExchangedPart, LocalPart, WorkerRoute, cut_rounds

__all__ = ["ExchangeTables", "LocalTables"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class ExchangeTables:
    """The near or the far part of all workers."""

    query: RouteTable
    kv: RouteTable
    entries: EntryTable
    num_workers: int

    @classmethod
    def of(cls, samples: SamplePool, layout: TokenLayout, part: PartTables) -> ExchangeTables:
        """The routes that bring a part's rows to where they are computed."""
        return cls(
            query=query_route(samples, layout, part.ranges),
            kv=kv_route(samples, layout, part.groups),
            entries=part.entries,
            num_workers=samples.num_slots * layout.context_parallel_size,
        )

    @cached_property
    def query_rows(self) -> Int64:
        """(W, W) rows (token x head shard) of the query route; the diagonal stays."""
        return route_rows(self.query, self.num_workers)

    @cached_property
    def kv_rows(self) -> Int64:
        """(W, W) rows (token x kv shard) of the kv route; the diagonal stays."""
        return route_rows(self.kv, self.num_workers)

    def sent_bytes(self, shape: AttentionShape, heads: HeadPartition) -> tuple[Int64, Int64]:
        """(W, W) bytes of Q, and of K and V, from source to destination; the diagonal stays."""
        element = shape.head_dim * shape.bytes_per_element
        return (
            self.query_rows * (heads.query_heads_per_shard * element),
            self.kv_rows * (2 * heads.kv_heads_per_shard * element),
        )

    def part_of(self, worker: int) -> ExchangedPart:
        """One worker's part."""
        return ExchangedPart(
            query=WorkerRoute.of(self.query, worker),
            kv=WorkerRoute.of(self.kv, worker),
            query_rows=self.query_rows,
            kv_rows=self.kv_rows,
            rounds=cut_rounds(self.entries, worker),
        )

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}


@dataclass(frozen=True, slots=True, eq=False)
class LocalTables:
    """The local part of all workers: what they compute of their own tokens alone."""

    query: RouteTable
    kv: RouteTable
    entries: EntryTable
    early_rounds: Int64
    """(W,) rounds that are computed before the chunks; the later ones behind them."""
    early_keys: Int64
    """(W,) resident rows of the early rounds, before those of the late ones."""
    late_kv_heads: Int64
    """(W,) kv heads that are computed behind the chunks, in all rounds; 0 where rounds are."""

    @classmethod
    def of(cls, samples: SamplePool, layout: TokenLayout, compute: ComputePlan) -> LocalTables:
        """Which tokens of its own a worker reads; both routes stay on the worker."""
        return cls(
            query=query_route(samples, layout, compute.local.ranges),
            kv=kv_route(samples, layout, compute.local.groups),
            entries=compute.local.entries,
            early_rounds=compute.early_rounds,
            early_keys=compute.early_keys,
            late_kv_heads=compute.late_kv_heads,
        )

    def part_of(self, worker: int) -> LocalPart:
        """One worker's local part."""
        early = int(self.early_rounds[worker])
        return LocalPart(
            query=WorkerRoute.of(self.query, worker),
            kv=WorkerRoute.of(self.kv, worker),
            rounds=cut_rounds(
                self.entries, worker, early_rounds=early, early_keys=int(self.early_keys[worker])
            ),
            num_early_rounds=early,
            late_kv_heads=int(self.late_kv_heads[worker]),
        )
