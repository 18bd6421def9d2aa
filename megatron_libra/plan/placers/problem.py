"""What a placer decides on: tiles, homes, bytes.

In: blocks, samples, heads. Out: PlacementProblem, Placement, ResidentKV.

Bytes follow Eq. 8, with one refinement: tokens that the destination holds anyway are neither
charged nor sent (V_g counts the remote part).
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import SamplePool
from megatron_libra.plan.tiles import BlockTable

__all__ = ["Placement", "PlacementProblem", "ResidentKV", "fetch_stops"]

Int64 = NDArray[np.int64]


def fetch_stops(samples: SamplePool, blocks: BlockTable, kv_fetch: str) -> Int64:
    """(F,) keys [0, stop) that a worker fetches to compute a fragment."""
    if kv_fetch == "group":
        return samples.length[blocks.fragment_sample]
    return blocks.fragment_stop


@dataclass(frozen=True, slots=True, eq=False)
class Placement:
    """What a placer decides."""

    worker: Int64
    """(T,) of the tiles of the blocks as they are cut."""
    cuts: Int64 = field(default_factory=lambda: np.zeros(0, np.int64))
    """Tokens before which blocks are cut beforehand, in the numbers of BlockTable.cut."""


@dataclass(frozen=True, slots=True, eq=False)
class PlacementProblem:
    """Tiles of one pool with their costs; tile = block * head_split + head_shard."""

    num_workers: int
    load_slack: float
    heads: HeadPartition
    num_samples: int
    blocks: BlockTable
    """Their pairs count `token_pairs` for each query token besides its own."""
    token_pairs: int
    query_bytes: Int64
    """(N,) bytes of Q plus O of one tile of a block: Q dispatch and output return."""
    kv_token_bytes: int
    """Bytes of K plus V of one token of one kv shard."""
    remote_keys: Int64
    """(F, W) keys that a worker lacks of the prefix (or sample) that a fragment attends to."""

    @classmethod
    def of(
        cls,
        samples: SamplePool,
        blocks: BlockTable,
        layout: TokenLayout,
        shape: AttentionShape,
        config: LibraConfig,
    ) -> PlacementProblem:
        """Costs of placing the blocks' tiles; config must be the effective one (H, M of the
        placer).
        """
        heads = HeadPartition.of(shape, config.head_split, config.most_chunks)
        if config.token_pairs:
            weighed = blocks.pairs + config.token_pairs * blocks.num_tokens
            blocks = replace(blocks, pairs=weighed)
        token_bytes = shape.head_dim * shape.bytes_per_element
        return cls(
            num_workers=samples.num_slots * layout.context_parallel_size,
            load_slack=config.load_slack,
            heads=heads,
            num_samples=len(samples.length),
            blocks=blocks,
            token_pairs=config.token_pairs,
            query_bytes=2 * heads.query_heads_per_shard * token_bytes * blocks.num_tokens,
            kv_token_bytes=2 * heads.kv_heads_per_shard * token_bytes,
            remote_keys=_remote_keys(samples, blocks, layout, config.kv_fetch),
        )

    @property
    def tile_pairs(self) -> Int64:
        """(T,) pairs of one query head of each tile."""
        return np.repeat(self.blocks.pairs, self.heads.head_split)

    @property
    def tile_home(self) -> Int64:
        """(T,) the worker that holds a tile's queries."""
        return np.repeat(self.blocks.home, self.heads.head_split)

    def loads(self, worker: Int64) -> Int64:
        """(W,) pairs of each worker, given the worker of every tile."""
        load = np.zeros(self.num_workers, np.int64)
        np.add.at(load, worker, self.tile_pairs)
        return load

    def query_pairs(self, block: int) -> Int64:
        """(tokens,) pairs of every query of a block, `token_pairs` included."""
        table = self.blocks
        fragments = range(*table.first_fragment[block : block + 2].tolist())
        ranges = [(table.fragment_start[f], table.fragment_stop[f]) for f in fragments]
        keys = np.concatenate([np.arange(start, stop) for start, stop in ranges])
        pairs: Int64 = keys + 1 + self.token_pairs
        return pairs

    @property
    def load_target(self) -> float:
        """C = (1 + tau) * mean load, in pairs (Algorithm 2, line 3)."""
        total = int(self.blocks.pairs.sum()) * self.heads.head_split
        return (1 + self.load_slack) * total / self.num_workers


def _remote_keys(
    samples: SamplePool, blocks: BlockTable, layout: TokenLayout, kv_fetch: str
) -> Int64:
    """(F, W) keys [0, fetch stop) of each fragment's sample that are not at home on each worker."""
    stop = fetch_stops(samples, blocks, kv_fetch)
    size = layout.context_parallel_size
    start = samples.start[blocks.fragment_sample]
    slot = samples.slot[blocks.fragment_sample]
    remote = np.repeat(stop[:, None], samples.num_slots * size, axis=1)
    columns = slot[:, None] * size + np.arange(size)
    np.put_along_axis(
        remote, columns, stop[:, None] - layout.local_tokens(start, start + stop), axis=1
    )
    return remote


class ResidentKV:
    """Keys already fetched to each worker while a placer runs (the sets C_r of Algorithm 2)."""

    def __init__(self, problem: PlacementProblem) -> None:
        self._problem = problem
        shape = (problem.heads.kv_shards, problem.num_samples, problem.num_workers)
        self._keys = np.zeros(shape, np.int64)

    def _where(self, tile: int) -> tuple[slice, int, slice]:
        block, shard = divmod(tile, self._problem.heads.head_split)
        table = self._problem.blocks
        first, last = table.first_fragment[block], table.first_fragment[block + 1]
        sample = table.fragment_sample[first]
        return (
            slice(first, last),
            self._problem.heads.kv_shard_of(shard),
            slice(sample, sample + last - first),
        )

    def added_keys(self, tile: int) -> Int64:
        """(W,) remote keys that placing a tile on each worker would add."""
        fragments, kv_shard, samples = self._where(tile)
        growth = self._problem.remote_keys[fragments] - self._keys[kv_shard, samples]
        keys: Int64 = np.maximum(growth, 0, out=growth).sum(axis=0)
        return keys

    def place(self, tile: int, worker: int) -> None:
        """Note that a worker holds the keys of a tile."""
        fragments, kv_shard, samples = self._where(tile)
        held = self._keys[kv_shard, samples, worker]
        np.maximum(held, self._problem.remote_keys[fragments, worker], out=held)
