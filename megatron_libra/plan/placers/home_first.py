"""Start every tile at its home, shed what exceeds the load target, pour it into lighter workers.

In: problem. Out: Placement, with cuts where a tile is divided. Beyond the paper: Algorithm 2 starts
from nothing and so moves tiles that were fine where they were. Here only strays start elsewhere:
the few last queries of a sample in a home piece of their own, for which this home would fetch all
keys of the sample, start where the block before them does. An overloaded worker sheds the tiles
with the most pairs per byte (shed.py), mostly late blocks of its longest samples, until it is at C.
What was shed is then poured, KV group by KV group and latest block first, so that few workers fetch
the same keys: while a group is larger than any room, the largest room takes as many tiles of it as
fit, or as many last queries of one; what remains goes whole into the smallest room that holds it.
So loads end at C, or if tau is 0 above it by at most about half a query for each receiver, for a
single query elsewhere would cost a tile of the kernel; and what leaves a sample are its last
queries: those before them are computed in place. Where single queries are coarse (packed sequences
of some hundred tokens), Algorithm 2 is tried too and the smaller largest load wins.

Example, two workers, tau = 0, one sample on worker 0 in blocks of 3, 7, 11 and 15 pairs (2 queries
each), worker 1 with two blocks of 3: C = 21. Worker 0 sheds its last block (15) and worker 1 takes
it. Were C 24, worker 0 would shed only the last query of that block, with 8 pairs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers import paper
from megatron_libra.plan.placers.problem import Placement, PlacementProblem
from megatron_libra.plan.placers.shed import Shed, last_queries, main_fragments, shed_tiles
from megatron_libra.plan.tiles import edges

__all__ = ["place"]

Int64 = NDArray[np.int64]
LEFT_OVER = 0.01
"""Of C: by so much a load may exceed it for want of rooms for single queries."""


def place(problem: PlacementProblem) -> Placement:
    """A worker for each tile; few tiles are divided."""
    load = problem.loads(problem.tile_home)
    if load.max() <= problem.load_target:
        return Placement(problem.tile_home)
    started = _with_strays_moved(problem)
    load = started.loads(started.tile_home)
    shed = shed_tiles(started, load)
    np.subtract.at(load, started.tile_home[shed.tile], shed.pairs)
    pieces = _pour(started, shed, load)
    if load.max() > (1 + LEFT_OVER) * problem.load_target:
        other = paper.place(problem)
        if problem.loads(other.worker).max() < load.max():
            return other
    return _placed(started, pieces)


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


@dataclass(slots=True)
class _Pieces:
    """Last queries of tiles, and who computes them. Those of one tile follow each other, the last
    queries first; queries before all pieces stay where the tile starts."""

    tile: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    """First query of its block; a piece ends where the one before it of the same tile starts."""
    worker: list[int] = field(default_factory=list)

    def add(self, tiles: Int64, starts: Int64, worker: int) -> None:
        """Some pieces of one worker."""
        self.tile += tiles.tolist()
        self.start += starts.tolist()
        self.worker += [worker] * len(tiles)


def _pour(problem: PlacementProblem, shed: Shed, load: Int64) -> _Pieces:
    """Give everything that was shed a worker with room below C, raising load (W,); heaviest group
    first, then group order."""
    pieces, pairs = _Pieces(), shed.pairs.copy()
    stop: list[int | None] = [None] * len(pairs)
    size = np.add.reduceat(pairs, shed.group_start[:-1])
    for group in np.argsort(-size, kind="stable").tolist():
        row, end = shed.group_start[group : group + 2].tolist()
        while row < end:
            total = np.cumsum(pairs[row:end])
            receiver = _receiver(problem.load_target - load, int(total[-1]))
            room = problem.load_target - load[receiver]
            fits = int(np.searchsorted(total, room, side="right"))
            if fits:
                rows = slice(row, row + fits)
                pieces.add(shed.tile[rows], shed.start[rows], receiver)
                load[receiver] += total[fits - 1]
                row += fits
                continue
            block = int(shed.tile[row]) // problem.heads.head_split
            start, taken = last_queries(problem, block, stop=stop[row], at_most=float(room))
            if not taken:  # no room for one query: what is left stays at home
                np.add.at(load, problem.tile_home[shed.tile[row:end]], pairs[row:end])
                break
            pieces.add(shed.tile[row : row + 1], np.array([start]), receiver)
            load[receiver] += taken
            pairs[row] -= taken
            stop[row] = start
    return pieces


def _receiver(room: NDArray[np.floating], pairs: int) -> int:
    """The smallest room that holds the pairs, else the largest room; ties by worker id."""
    holds = room >= pairs
    return int(np.where(holds, room, np.inf).argmin() if holds.any() else room.argmax())


def _placed(problem: PlacementProblem, pieces: _Pieces) -> Placement:
    """The workers of all tiles, blocks cut where a piece starts."""
    tile, start, worker = (
        np.array(column, np.int64) for column in (pieces.tile, pieces.start, pieces.worker)
    )
    blocks, heads = problem.blocks, problem.heads.head_split
    if not len(tile):
        return Placement(problem.tile_home)
    cuts = (blocks.first_token[tile // heads] + start)[start > 0]
    old, first = edges(blocks.first_token, cuts)
    offset = first - blocks.first_token[old]
    tiles = (old[:, None] * heads + np.arange(heads)).ravel()
    # the piece that a tile's first query is in is the last one that starts at or before it
    span = int(blocks.num_tokens.max())
    order = np.argsort(tile * span + start)
    key = (tile * span + start)[order]
    found = np.searchsorted(key, tiles * span + np.repeat(offset, heads), side="right") - 1
    piece = order[found]
    is_moved = (found >= 0) & (tile[piece] == tiles)
    return Placement(np.where(is_moved, worker[piece], problem.tile_home[tiles]), cuts)
