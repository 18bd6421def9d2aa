"""Start every tile at its home, shed what exceeds the load target, pour it into lighter workers.

In: problem. Out: worker per tile. Beyond the paper: Algorithm 2 starts from nothing and so moves
tiles that were fine where they were. Here only strays start elsewhere: the few last queries of a
sample in a home piece of their own, for which this home would fetch all keys of the sample, start
where the block before them does. An overloaded worker sheds the tiles with the most pairs
per byte (shed.py), mostly late blocks of its longest samples, until it is at C. What was shed is
then poured, KV group by KV group and latest block first, so that few workers fetch the same keys:
while a group is larger than any room, the largest room takes as much of it as fits; what remains
goes whole into the smallest room that holds it. Coarse tiles that fit nowhere are levelled in the
end (level.py); where even that stays above C, Algorithm 2 is tried too and the smaller largest load
wins.

Example, two workers, tau = 0, one sample on worker 0 in blocks of 3, 7, 11 and 15 pairs, worker 1
with two blocks of 3: C = 21. Worker 0 sheds its last block (15) and worker 1 takes it.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers import paper
from megatron_libra.plan.placers.level import level
from megatron_libra.plan.placers.problem import PlacementProblem
from megatron_libra.plan.placers.shed import Shed, main_fragments, shed_tiles

__all__ = ["place"]

Int64 = NDArray[np.int64]


def place(problem: PlacementProblem) -> Int64:
    """(T,) the worker of each tile."""
    worker = problem.tile_home
    if problem.loads(worker).max() <= problem.load_target:
        return worker
    started = _with_strays_moved(problem)
    worker = started.tile_home
    load = problem.loads(worker)
    shed = shed_tiles(started, load)
    np.subtract.at(load, worker[shed.tile], problem.tile_pairs[shed.tile])
    _pour(problem, shed, worker, load)
    level(problem, worker, load)
    if load.max() <= problem.load_target:
        return worker
    other = paper.place(problem)
    return other if problem.loads(other).max() < load.max() else worker


def _with_strays_moved(problem: PlacementProblem) -> PlacementProblem:
    """The problem with another home of strays: blocks of one sample's last queries, the only ones
    of it in their home piece and shorter than half of the longest block. It tells where tiles
    start, not where their queries are."""
    blocks = problem.blocks
    continues = np.diff(blocks.fragment_sample[main_fragments(problem)]) == 0
    is_stray = np.diff(blocks.first_fragment) == 1
    is_stray &= 2 * blocks.num_tokens < blocks.num_tokens.max()
    is_stray[1:] &= continues & (np.diff(blocks.home) != 0)
    is_stray[:-1] &= ~continues
    is_stray[0] = False
    stray = np.flatnonzero(is_stray)
    home = blocks.home.copy()
    home[stray] = blocks.home[stray - 1]
    return replace(problem, blocks=replace(blocks, home=home))


def _pour(problem: PlacementProblem, shed: Shed, worker: Int64, load: Int64) -> None:
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
            # a tile that fits nowhere goes to the largest room all the same
            cut = min(max(fits, tile + 1), stop)
            worker[shed.tile[tile:cut]] = receiver
            load[receiver] += total[cut] - total[tile]
            tile = cut


def _receiver(room: NDArray[np.floating], pairs: int) -> int:
    """The smallest room that holds the pairs, else the largest room; ties by worker id."""
    holds = room >= pairs
    return int(np.where(holds, room, np.inf).argmin() if holds.any() else room.argmax())
