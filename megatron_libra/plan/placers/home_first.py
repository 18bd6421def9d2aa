"""Start every tile at its home, shed what exceeds the load target, pour it into lighter workers.

In: problem. Out: worker per tile. Beyond the paper: Algorithm 2 starts from nothing and so moves
tiles that were fine where they were. Here an overloaded worker sheds the tiles with the most pairs
per byte, the late blocks of its longest samples, until it is at C. What was shed is then poured,
KV group by KV group and latest block first, so that few workers fetch the same keys: while a group
is larger than any room, the largest room takes as much of it as fits; what remains goes whole into
the smallest room that holds it. Coarse tiles that fit nowhere are levelled in the end (level.py);
where even that stays above C, Algorithm 2 is tried too and the smaller largest load wins.

Example, two workers, tau = 0, one sample on worker 0 in blocks of 3, 7, 11 and 15 pairs, worker 1
with two blocks of 3: C = 21. Worker 0 sheds its last block (15) and worker 1 takes it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers import paper
from megatron_libra.plan.placers.level import level
from megatron_libra.plan.placers.problem import PlacementProblem
from megatron_libra.plan.tiles import causal_pairs

__all__ = ["place"]

Int64 = NDArray[np.int64]


def place(problem: PlacementProblem) -> Int64:
    """(T,) the worker of each tile."""
    worker, pairs = problem.tile_home, problem.tile_pairs
    load = np.zeros(problem.num_workers, np.int64)
    np.add.at(load, worker, pairs)
    if not len(pairs) or load.max() <= problem.load_target:
        return worker
    main = _main_fragments(problem)
    shed = _shed(problem, main, load)
    np.subtract.at(load, worker[shed.tile], pairs[shed.tile])
    _pour(problem, shed, worker, load)
    level(problem, worker, load)
    if load.max() <= problem.load_target:
        return worker
    other = paper.place(problem)
    other_load = np.zeros_like(load)
    np.add.at(other_load, other, pairs)
    return other if other_load.max() < load.max() else worker


@dataclass(frozen=True, slots=True, eq=False)
class _Shed:
    """Tiles that leave their homes, by KV group and latest block first."""

    tile: Int64
    group_start: Int64
    """(G + 1,) tiles of group g are group_start[g] : group_start[g + 1]."""


def _main_fragments(problem: PlacementProblem) -> Int64:
    """(N,) the fragment with the most pairs of each block; its sample names the KV group."""
    blocks = problem.blocks
    pairs = causal_pairs(blocks.fragment_start, blocks.fragment_stop)
    block = np.repeat(np.arange(blocks.num_blocks), np.diff(blocks.first_fragment))
    order = np.lexsort((pairs, block))
    return order[blocks.first_fragment[1:] - 1]


def _shed(problem: PlacementProblem, main: Int64, load: Int64) -> _Shed:
    """What overloaded workers give away until they are at C, most pairs per byte first."""
    blocks, head_split = problem.blocks, problem.heads.head_split
    keys = np.add.reduceat(blocks.fragment_stop, blocks.first_fragment[:-1])
    keys -= blocks.fragment_stop[main]  # the main sample's keys are shared by its other tiles
    price = blocks.pairs / (problem.query_bytes + keys * problem.kv_token_bytes)
    giver = np.flatnonzero(load[blocks.home] > problem.load_target)
    giver = giver[np.lexsort((-price[giver], blocks.home[giver]))]
    tile = (giver[:, None] * head_split + np.arange(head_split)).ravel()
    home, pairs = problem.tile_home[tile], problem.tile_pairs[tile]
    first = np.flatnonzero(np.diff(home, prepend=-1))
    total = np.cumsum(pairs) - pairs
    before = total - np.repeat(total[first], np.diff(first, append=len(home)))
    return _by_group(problem, main, tile[before < load[home] - problem.load_target])


def _by_group(problem: PlacementProblem, main: Int64, tile: Int64) -> _Shed:
    heads, blocks = problem.heads, problem.blocks
    block, shard = np.divmod(tile, heads.head_split)
    kv_shard = shard * heads.kv_shards // heads.head_split
    group = blocks.fragment_sample[main[block]] * heads.kv_shards + kv_shard
    order = np.lexsort((tile, -blocks.fragment_stop[main[block]], group))
    start = np.flatnonzero(np.diff(group[order], prepend=-1))
    return _Shed(tile[order], np.append(start, len(tile)))


def _pour(problem: PlacementProblem, shed: _Shed, worker: Int64, load: Int64) -> None:
    """Give every shed tile a worker with room below C; heaviest group first, then group order."""
    pairs = problem.tile_pairs[shed.tile]
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(pairs)])
    size = np.diff(total[shed.group_start])
    for group in np.argsort(-size, kind="stable").tolist():
        tile, stop = int(shed.group_start[group]), int(shed.group_start[group + 1])
        while tile < stop:
            receiver = _receiver(problem.load_target - load, int(total[stop] - total[tile]))
            room = problem.load_target - load[receiver]
            fits = int(np.searchsorted(total, total[tile] + room, side="right")) - 1
            cut = min(
                max(fits, tile + 1), stop
            )  # a tile that fits nowhere goes to the largest room
            worker[shed.tile[tile:cut]] = receiver
            load[receiver] += total[cut] - total[tile]
            tile = cut


def _receiver(room: NDArray[np.floating], pairs: int) -> int:
    """The smallest room that holds the pairs, else the largest room; ties by worker id."""
    holds = room >= pairs
    return int(np.where(holds, room, np.inf).argmin() if holds.any() else room.argmax())
