"""Choose the tiles that overloaded workers give away. In: problem, home loads. Out: Shed.

A worker above C gives away what brings most pairs per byte, its price, until it is at C: the late
blocks of its longest samples, of all heads, which have most pairs per query. Of the last tile only
as many of its last queries leave as are needed. A worker that keeps the early part of a run of
neighbouring blocks for all heads still fetches the keys before it for all heads. So blocks of a run
whose prices are within CLOSE of each other form a tier, which is given head by head: what stays of
it is a few whole heads, and the keys of these alone are fetched. Neighbouring blocks of short
samples all have their mean price and are given from the last one on, so that whole samples leave
and what stays is one range: a worker whose own queries have many gaps must copy them.

Example: a sample of 8 blocks on four workers, zigzag. The home of blocks 0 and 7 gives the first
heads of block 7 (all heads, before it would touch block 0), the home of 3 and 4 those of block 4.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers.problem import PlacementProblem
from megatron_libra.plan.tiles import causal_pairs

__all__ = ["Shed", "last_queries", "main_fragments", "shed_tiles"]

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
Bool = NDArray[np.bool_]
CLOSE = 1.7
"""Ratio of prices below which blocks of a run are one tier; 1.3 to 2.5 differ by 2 % of bytes."""
SHORT_SAMPLE = 4
"""Blocks of a sample up to which it leaves as a whole."""
NUM_TIERS = 128
"""CLOSE ** NUM_TIERS is beyond any ratio of pairs."""


@dataclass(frozen=True, slots=True, eq=False)
class Shed:
    """Tiles that leave their homes, by KV group and latest block first."""

    tile: Int64
    start: Int64
    """First query that leaves, of its block: 0 but for the last tile of a giver."""
    pairs: Int64
    """Of the queries that leave."""
    group_start: Int64
    """(G + 1,) tiles of group g are group_start[g] : group_start[g + 1]."""


def shed_tiles(problem: PlacementProblem, load: Int64) -> Shed:
    """What workers above C give away; load (W,) is that of the homes."""
    main = main_fragments(problem)
    giver = np.flatnonzero(load[problem.blocks.home] > problem.load_target)
    tile = _in_order(problem, main, giver)
    home, pairs = problem.tile_home[tile], problem.tile_pairs[tile]
    first = np.flatnonzero(np.diff(home, prepend=-1))
    total = np.cumsum(pairs) - pairs
    before = total - np.repeat(total[first], np.diff(first, append=len(home)))
    needed = load[home] - problem.load_target - before
    leaves = needed > 0
    tile, pairs, needed = tile[leaves], pairs[leaves], needed[leaves]
    start = np.zeros(len(tile), np.int64)
    for row in np.flatnonzero(pairs > needed).tolist():
        block = int(tile[row]) // problem.heads.head_split
        start[row], pairs[row] = last_queries(problem, block, at_least=float(needed[row]))
    return _by_group(problem, main, tile, start, pairs)


def last_queries(
    problem: PlacementProblem,
    block: int,
    *,
    stop: int | None = None,
    at_least: float | None = None,
    at_most: float = 0.0,
) -> tuple[int, int]:
    """(start, pairs) of queries [start, stop) of a block: the fewest with at_least so many pairs,
    else the most with at_most so many, perhaps none. stop: by default the block's end."""
    behind = np.cumsum(problem.query_pairs(block)[:stop][::-1])
    if at_least is None:
        count = int(np.searchsorted(behind, at_most, side="right"))
    else:
        count = min(int(np.searchsorted(behind, at_least)) + 1, len(behind))
    return len(behind) - count, int(behind[count - 1]) if count else 0


def main_fragments(problem: PlacementProblem) -> Int64:
    """(N,) the fragment with the most pairs of each block; its sample names the KV group."""
    blocks = problem.blocks
    pairs = causal_pairs(blocks.fragment_start, blocks.fragment_stop)
    block = np.repeat(np.arange(blocks.num_blocks), np.diff(blocks.first_fragment))
    order = np.lexsort((pairs, block))
    return order[blocks.first_fragment[1:] - 1]


def _in_order(problem: PlacementProblem, main: Int64, block: Int64) -> Int64:
    """Tiles of the blocks by home, in the order in which they would be given away."""
    head_split = problem.heads.head_split
    price, run, tier = (column[block] for column in _prices(problem, main))
    row = np.repeat(np.arange(len(block)), head_split)
    shard = np.tile(np.arange(head_split), len(block))
    home = problem.blocks.home[block]
    order = np.lexsort((-price[row], shard, run[row], -tier[row], home[row]))
    return (block[row] * head_split + shard)[order]


def _prices(problem: PlacementProblem, main: Int64) -> tuple[Float64, Int64, Float64]:
    """(N,) columns: pairs per byte of a block; its run, neighbours of one sample at one home; its
    tier, the run's highest price divided by CLOSE until it is below CLOSE times the block's. A
    block of short samples is a run of its own, in falling order of blocks.
    """
    blocks = problem.blocks
    keys = np.add.reduceat(blocks.fragment_stop, blocks.first_fragment[:-1])
    keys -= blocks.fragment_stop[main]  # the main sample's keys are shared by its other tiles
    cost = problem.query_bytes + keys * problem.kv_token_bytes
    run = np.cumsum(_differs(blocks.home, blocks.fragment_sample[main])) - 1
    is_short = _short(problem, main, run)
    stretch = np.cumsum(_differs(blocks.home, is_short, np.where(is_short, 0, run))) - 1
    total = np.bincount(stretch, blocks.pairs)[stretch], np.bincount(stretch, cost)[stretch]
    price = np.where(is_short, total[0] / total[1], blocks.pairs / cost)
    highest = np.maximum.reduceat(price, np.flatnonzero(np.diff(run, prepend=-1)))[run]
    # products and quotients alone round the same on every host, logarithms do not
    steps = np.cumprod(np.full(NUM_TIERS, CLOSE)) / CLOSE
    tier = highest / steps[np.searchsorted(steps, highest / price, side="right") - 1]
    falling = -1 - np.arange(blocks.num_blocks)
    return price, np.where(is_short, falling, run), np.where(is_short, price, tier)


def _short(problem: PlacementProblem, main: Int64, run: Int64) -> Bool:
    """(N,) whether a block lies in the first SHORT_SAMPLE blocks of its sample, with not more of it
    at its home."""
    blocks = problem.blocks
    most = SHORT_SAMPLE * int(blocks.num_tokens.max(initial=0))
    found: Bool = (blocks.fragment_stop[main] <= most) & (np.bincount(run)[run] <= SHORT_SAMPLE + 1)
    return found


def _differs(*columns: NDArray[np.generic]) -> Bool:
    """(N,) whether a row differs from the one before it in any column."""
    found = np.ones(len(columns[0]), np.bool_)
    found[1:] = np.any([column[1:] != column[:-1] for column in columns], axis=0)
    return found


def _by_group(
    problem: PlacementProblem, main: Int64, tile: Int64, start: Int64, pairs: Int64
) -> Shed:
    heads, blocks = problem.heads, problem.blocks
    block, shard = np.divmod(tile, heads.head_split)
    kv_shard = heads.kv_shard_of(shard)
    group = blocks.fragment_sample[main[block]] * heads.kv_shards + kv_shard
    order = np.lexsort((tile, -blocks.fragment_stop[main[block]], group))
    group_start = np.flatnonzero(np.diff(group[order], prepend=-1))
    return Shed(tile[order], start[order], pairs[order], np.append(group_start, len(tile)))
