"""Level loads by single moves and swaps. In: problem, workers, loads. Out: both changed in place.

For tiles that are coarse against the mean load. The most loaded worker above C moves a tile to, or
swaps one with, one of the least loaded workers, whichever lowers the larger of the two loads most;
until all are at C or nothing helps. Every step lowers the sum of squared loads, so it ends.
Example, C = 10, loads 12 (tiles 7 and 5) and 8 (tiles 5 and 3): swapping 7 and 5 gives 10 and 10.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers.problem import PlacementProblem

__all__ = ["level"]

Int64 = NDArray[np.int64]
RECEIVERS = 8
"""Least loaded workers that a step looks at."""


def level(problem: PlacementProblem, worker: Int64, load: Int64) -> None:
    """Lower the largest loads towards C, changing worker (T,) and load (W,) in place."""
    pairs = problem.tile_pairs
    stuck = np.zeros(len(load), np.bool_)
    while True:
        giver = int(np.where(stuck, -1, load).argmax())
        if stuck[giver] or load[giver] <= problem.load_target:
            return
        trade = _best_trade(pairs, worker, load, giver)
        if trade is None:
            stuck[giver] = True
            continue
        given, taken, receiver = trade
        worker[given] = receiver
        worker[taken] = giver
        moved = pairs[given].sum() - pairs[taken].sum()
        load[giver] -= moved
        load[receiver] += moved
        stuck[receiver] = False


def _best_trade(
    pairs: Int64, worker: Int64, load: Int64, giver: int
) -> tuple[list[int], list[int], int] | None:
    """(tiles given, tiles taken back, receiver) with the smallest larger load, if it is smaller."""
    ours = np.flatnonzero((worker == giver) & (pairs > 0))
    lowest = int(load[giver])
    best = None
    for receiver in np.argsort(load, kind="stable")[:RECEIVERS].tolist():
        theirs = np.flatnonzero((worker == receiver) & (pairs > 0))
        back = np.concatenate([np.zeros(1, np.int64), pairs[theirs]])  # 0: a move, nothing back
        shed = pairs[ours, None] - back
        larger = np.maximum(load[giver] - shed, load[receiver] + shed)
        if larger.size and larger.min() < lowest:
            lowest = int(larger.min())
            row, column = divmod(int(larger.argmin()), len(back))
            best = [int(ours[row])], theirs[column - 1 : column].tolist()[:column], receiver
    return best
