"""Choose the tiles that overloaded workers give away. In: problem, home loads. Out: Shed.

A worker above C gives away what brings most pairs per byte until it is at C. Its blocks of one
sample form a part. What a part costs depends on where its keys are:

    late first     the part's keys are mostly here: give its latest blocks, all heads. They have
                   the most pairs per query, and the keys cost this worker nothing.
    head by head   its keys are mostly fetched from others: give whole kv heads of the part. Every
                   head that is gone need not be fetched; giving late blocks would still leave the
                   keys before the part to be fetched for all heads.

Example: a sample of 8 blocks on four workers, zigzag; the home of blocks 0 and 7 gives block 7
late first (block 0 has no keys elsewhere), the home of 3 and 4 gives both head by head.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers.problem import PlacementProblem
from megatron_libra.plan.tiles import causal_pairs

__all__ = ["Shed", "shed_tiles"]

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Shed:
    """Tiles that leave their homes, by KV group and latest block first."""

    tile: Int64
    group_start: Int64
    """(G + 1,) tiles of group g are group_start[g] : group_start[g + 1]."""


def shed_tiles(problem: PlacementProblem, load: Int64) -> Shed:
    """What workers above C give away; load (W,) is that of the homes."""
    main = _main_fragments(problem)
    giver = np.flatnonzero(load[problem.blocks.home] > problem.load_target)
    tile = _in_order(problem, main, giver)
    home, pairs = problem.tile_home[tile], problem.tile_pairs[tile]
    first = np.flatnonzero(np.diff(home, prepend=-1))
    total = np.cumsum(pairs) - pairs
    before = total - np.repeat(total[first], np.diff(first, append=len(home)))
    return _by_group(problem, main, tile[before < load[home] - problem.load_target])


def _main_fragments(problem: PlacementProblem) -> Int64:
    """(N,) the fragment with the most pairs of each block; its sample names the KV group."""
    blocks = problem.blocks
    pairs = causal_pairs(blocks.fragment_start, blocks.fragment_stop)
    block = np.repeat(np.arange(blocks.num_blocks), np.diff(blocks.first_fragment))
    order = np.lexsort((pairs, block))
    return order[blocks.first_fragment[1:] - 1]


def _in_order(problem: PlacementProblem, main: Int64, block: Int64) -> Int64:
    """Tiles of the blocks by home, in the order in which they would be given away."""
    heads, blocks = problem.heads, problem.blocks
    keys = np.add.reduceat(blocks.fragment_stop, blocks.first_fragment[:-1])
    keys -= blocks.fragment_stop[main]  # the main sample's keys are shared by its other tiles
    tile_bytes = (problem.query_bytes + keys * problem.kv_token_bytes)[block]
    pairs = blocks.pairs[block]
    _, first, part = np.unique(
        blocks.home[block] * problem.num_samples + blocks.fragment_sample[main[block]],
        return_index=True,
        return_inverse=True,
    )
    by_head = _gives_heads(problem, main, block, first, part)[part]
    part_price = np.bincount(part, pairs) / np.bincount(part, tile_bytes)
    price = np.where(by_head, part_price[part], pairs / tile_bytes)

    shard = np.tile(np.arange(heads.head_split), len(block))
    kv_shard = shard * heads.kv_shards // heads.head_split
    row = np.repeat(np.arange(len(block)), heads.head_split)
    late, by_head = -block[row], by_head[row]
    order = np.lexsort(
        (
            shard,
            np.where(by_head, late, shard),
            np.where(by_head, kv_shard, late),
            part[row],
            -price[row],
            blocks.home[block][row],
        )
    )
    return (block[row] * heads.head_split + shard)[order]


def _gives_heads(
    problem: PlacementProblem, main: Int64, block: Int64, first: Int64, part: Int64
) -> NDArray[np.bool_]:
    """(parts,) whether giving half of a part head by head saves more keys than it costs queries.

    Args:
        first, part: a part's first block (row of `block`), and every block's part.
    """
    heads, blocks = problem.heads, problem.blocks
    fragment = main[block[first]]
    start = blocks.fragment_start[fragment].astype(np.float64)
    stop = np.zeros(len(first))
    np.maximum.at(stop, part, blocks.fragment_stop[main[block]])
    fetched = problem.remote_keys[fragment, blocks.home[block[first]]]
    saved_bytes = 0.5 * fetched * problem.kv_token_bytes * heads.kv_shards
    # queries [half, stop) have half of the pairs of queries [start, stop)
    half = np.sqrt((start**2 + stop**2) / 2)
    late_share = (stop - half) / (stop - start)
    query_bytes = np.bincount(part, problem.query_bytes[block]) * heads.head_split
    wins: NDArray[np.bool_] = saved_bytes > (0.5 - late_share) * query_bytes
    return wins


def _by_group(problem: PlacementProblem, main: Int64, tile: Int64) -> Shed:
    heads, blocks = problem.heads, problem.blocks
    block, shard = np.divmod(tile, heads.head_split)
    kv_shard = shard * heads.kv_shards // heads.head_split
    group = blocks.fragment_sample[main[block]] * heads.kv_shards + kv_shard
    order = np.lexsort((tile, -blocks.fragment_stop[main[block]], group))
    start = np.flatnonzero(np.diff(group[order], prepend=-1))
    return Shed(tile[order], np.append(start, len(tile)))
