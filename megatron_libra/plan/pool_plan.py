"""Plan one sequence pool: sequences -> blocks -> placement -> rows -> exchange (section 4.3).

Out: PoolPlan.

A PoolPlan holds ranges, never per-token indices, so that it can be broadcast; equality is equality
of digests.
"""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape, LibraConfig, positive_integer
from megatron_libra.plan.chunks import best_chunks
from megatron_libra.plan.heads import HeadPartition, fit_chunks
from megatron_libra.plan.layout import TokenLayout, round_up
from megatron_libra.plan.part_tables import ExchangeTables, LocalTables
from megatron_libra.plan.placers import PLACERS, PlacementProblem
from megatron_libra.plan.rounds import order_rows
from megatron_libra.plan.sequences import check_lengths, read_rows, read_samples
from megatron_libra.plan.tiles import TileTable, cut_blocks
from megatron_libra.plan.worker_plan import WorkerPlan

__all__ = ["PoolPlan", "plan_pool"]

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class PoolPlan:
    """What every worker of one pool sends, receives and computes; the same on every host."""

    sequences: tuple[tuple[int, ...], ...]
    """Sample lengths of the P packed sequences, by slot."""
    seq_length: int
    context_parallel_size: int
    shape: AttentionShape
    config: LibraConfig
    """The effective choices (placer ulysses sets head_split to CP)."""
    tiles: TileTable
    near: ExchangeTables
    """Tiles on workers of their own slot."""
    far: ExchangeTables
    """Tiles on workers of other slots."""
    local: LocalTables

    @property
    def num_workers(self) -> int:
        """W = P * CP."""
        return len(self.sequences) * self.context_parallel_size

    @property
    def heads(self) -> HeadPartition:
        """How the heads are cut."""
        return HeadPartition.of(self.shape, self.config.head_split, self.config.most_chunks)

    @cached_property
    def loads(self) -> Int64:
        """(W,) pairs of each worker's tiles."""
        return self._load_of(self.tiles.worker)

    @cached_property
    def home_loads(self) -> Int64:
        """(W,) pairs of each worker if every tile stayed at home."""
        return self._load_of(self.tiles.home)

    @property
    def imbalance(self) -> float:
        """max / mean - 1 of the loads; 0 for an empty pool."""
        return _imbalance(self.loads)

    @property
    def home_imbalance(self) -> float:
        """max / mean - 1 of the home loads."""
        return _imbalance(self.home_loads)

    @property
    def max_tile_over_mean(self) -> float:
        """The heaviest tile over the mean load; well above tau, no placer can balance."""
        total = int(self.tiles.pairs.sum())
        return int(self.tiles.pairs.max()) * self.num_workers / total if total else 0.0

    @cached_property
    def query_rows(self) -> Int64:
        """(W, W) rows (token x head shard) of Q to where they are computed; the diagonal stays."""
        return self.near.query_rows + self.far.query_rows

    @cached_property
    def kv_rows(self) -> Int64:
        """(W, W) rows (token x kv shard) of K and V; the diagonal stays."""
        return self.near.kv_rows + self.far.kv_rows

    @cached_property
    def traffic_bytes(self) -> Int64:
        """(W, W) bytes of one layer's forward, row source, column destination."""
        moved = np.zeros((self.num_workers, self.num_workers), np.int64)
        for part in (self.near, self.far):
            queries, keys = part.sent_bytes(self.shape, self.heads)
            moved += queries + queries.T + keys
        np.fill_diagonal(moved, 0)
        return moved

    @cached_property
    def num_rounds(self) -> Int64:
        """(W,) varlen calls of each worker: of one head chunk, and of the local part."""
        rounds = np.zeros((3, self.num_workers), np.int64)
        calls = (self.near.entries, self.far.entries, self.local.entries)
        for row, entries in zip(rounds, calls, strict=True):
            np.maximum.at(row, entries.worker, entries.round + 1)
        rounds[-1] *= np.where(self.local.late_kv_heads, 2, 1)
        return rounds.sum(axis=0)

    @cached_property
    def peak_resident_kv_bytes(self) -> Int64:
        """(W,) bytes of the K and V that are resident on each worker, its own included."""
        heads = np.zeros(self.num_workers, np.int64)
        for route, heads_of_row in (
            (self.near.kv, self.heads.kv_heads_per_shard),
            (self.far.kv, self.heads.kv_heads_per_shard),
            (self.local.kv, self.shape.kv_heads),
        ):
            np.add.at(heads, route.destination, route.count.astype(np.int64) * heads_of_row)
        return heads * (2 * self.shape.head_dim * self.shape.bytes_per_element)

    @cached_property
    def digest(self) -> str:
        """sha256 of everything that the plan says, as hex."""
        sha = hashlib.sha256(repr(self._header()).encode())
        parts = (self.near, self.far, self.local)
        tables = [table for part in parts for table in (part.query, part.kv, part.entries)]
        columns = [
            getattr(table, name) for table in (self.tiles, *tables) for name in table.__slots__
        ]
        for column in (*columns, self.local.early_rounds, self.local.late_kv_heads):
            sha.update(np.ascontiguousarray(column, "<i8").tobytes())
        return sha.hexdigest()

    def worker_plan(self, worker: int) -> WorkerPlan:
        """The part of one worker in [0, W)."""
        if not 0 <= worker < self.num_workers:
            raise ValueError(
                f"worker ({worker}) must be in [0, {self.num_workers}); "
                "it is slot * CP + cp_rank, not the global rank."
            )
        return WorkerPlan(
            worker=worker,
            num_workers=self.num_workers,
            num_local_tokens=self.seq_length // self.context_parallel_size,
            shape=self.shape,
            heads=self.heads,
            digest=self.digest,
            near=self.near.part_of(worker),
            far=self.far.part_of(worker),
            local=self.local.part_of(worker),
        )

    def to_bytes(self) -> bytes:
        """The plan for a broadcast; only for workers of the same job, it is a pickle."""
        return zlib.compress(pickle.dumps(self), level=1)

    @staticmethod
    def from_bytes(data: bytes) -> PoolPlan:
        """The plan that to_bytes wrote."""
        plan = pickle.loads(zlib.decompress(data))
        assert isinstance(plan, PoolPlan)
        return plan

    def __getstate__(self) -> dict[str, object]:
        return {name: self.__dict__[name] for name in self.__dataclass_fields__}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, PoolPlan) and self.digest == other.digest

    def __hash__(self) -> int:
        return int(self.digest[:15], 16)

    def _load_of(self, owner: Int32) -> Int64:
        load = np.zeros(self.num_workers, np.int64)
        np.add.at(load, owner, self.tiles.pairs)
        return load

    def _header(self) -> tuple[object, ...]:
        c = self.config
        choices = (
            c.block_size,
            c.head_split,
            c.chunks,
            c.load_slack,
            c.placer,
            c.kv_fetch,
            c.layout,
        )
        return (self.sequences, self.seq_length, self.context_parallel_size, self.shape, choices)


def plan_pool(
    sequences: Iterable[Iterable[int]],
    *,
    context_parallel_size: int,
    shape: AttentionShape,
    config: LibraConfig,
    seq_length: int | None = None,
) -> PoolPlan:
    """Plan one pool; a pure function, so that every host gets the same plan.

    Args:
        sequences: P lists of sample lengths in tokens, by slot.
        context_parallel_size: CP; worker = slot * CP + cp_rank.
        shape: heads of the attention layer (of one tensor-parallel rank).
        config: P, B, H, M, tau, placer, kv_fetch and layout are used.
        seq_length: L; by default the longest sequence, rounded up to what the layout needs.

    Raises:
        ValueError: a length, L, P, H or M breaks a rule; the message names it.
    """
    sequences = read_rows(sequences)
    context_parallel_size = positive_integer("context_parallel_size", context_parallel_size)
    if len(sequences) != config.pool_size:
        raise ValueError(
            f"sequences has {len(sequences)} entries; pool_size ({config.pool_size}) is the number "
            f"of packed sequences of a pool; try pool_size={max(len(sequences), 1)}."
        )
    config = _effective(config, context_parallel_size, shape)
    layout = _layout(sequences, config, context_parallel_size, seq_length)
    samples = read_samples(sequences, layout.seq_length)
    # Algorithm 2 shall see the paper's blocks
    around = config.placer == "home_first"
    blocks = cut_blocks(samples, layout, config.block_size, around_long_samples=around)
    problem = PlacementProblem.of(samples, blocks, layout, shape, config)
    placement = PLACERS[config.placer](problem)
    blocks, worker = blocks.cut(placement.cuts), placement.worker
    compute = order_rows(samples, blocks, layout, problem.heads, worker, config.kv_fetch)
    near = ExchangeTables.of(samples, layout, compute.near)
    far = ExchangeTables.of(samples, layout, compute.far)
    local = LocalTables.of(samples, layout, compute)
    if config.chunks is None:
        config = replace(config, chunks=best_chunks(config, shape, near, far, local))
    return PoolPlan(
        sequences=samples.lengths,
        seq_length=layout.seq_length,
        context_parallel_size=context_parallel_size,
        shape=shape,
        config=config,
        tiles=TileTable.of(blocks, config.head_split, worker),
        near=near,
        far=far,
        local=local,
    )


def _effective(
    config: LibraConfig, context_parallel_size: int, shape: AttentionShape
) -> LibraConfig:
    """The choices that hold: placer ulysses cuts CP head shards."""
    if config.placer != "ulysses":
        config.check_shape(shape)
        return config
    if shape.query_heads % context_parallel_size:
        raise ValueError(
            f"context_parallel_size ({context_parallel_size}) must divide query_heads "
            f"({shape.query_heads}) for placer ulysses; try placer home."
        )
    chunks = config.chunks and fit_chunks(shape, context_parallel_size, config.chunks)
    config = replace(config, head_split=context_parallel_size, chunks=chunks)
    config.check_shape(shape)
    return config


def _layout(
    sequences: Sequence[Sequence[int]],
    config: LibraConfig,
    context_parallel_size: int,
    seq_length: int | None,
) -> TokenLayout:
    if seq_length is None:
        longest = max(int(check_lengths(row, slot).sum()) for slot, row in enumerate(sequences))
        pieces = TokenLayout(
            config.layout, 2 * context_parallel_size, context_parallel_size
        ).num_pieces
        seq_length = round_up(max(longest, 1), pieces)
    length = positive_integer("seq_length", seq_length)
    return TokenLayout(config.layout, length, context_parallel_size)


def _imbalance(loads: Int64) -> float:
    total = int(loads.sum())
    return int(loads.max()) * len(loads) / total - 1 if total else 0.0
