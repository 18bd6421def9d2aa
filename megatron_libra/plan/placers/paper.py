"""Communication-aware SH-Tile placement, to the letter (Algorithm 2, Eq. 8).

In: problem. Out: Placement, without cuts.

Order: heaviest tile first, then tile id. Ties: added bytes, load, worker id. The reference mode.
Example, two workers, tau = 0, tiles of pairs 5, 3, 2, all at home on worker 0: C = 5. Tile 5 stays
(no bytes); tile 3 does not fit below C on worker 0 and goes to worker 1; so does tile 2. Loads 5
and 5.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers.problem import Placement, PlacementProblem, ResidentKV

__all__ = ["place"]

Int64 = NDArray[np.int64]


def place(problem: PlacementProblem) -> Placement:
    """A worker for each tile."""
    pairs, home, target = problem.tile_pairs, problem.tile_home, problem.load_target
    worker = np.empty(len(pairs), np.int64)
    load = np.zeros(problem.num_workers, np.int64)
    resident = ResidentKV(problem)
    for tile in np.argsort(-pairs, kind="stable").tolist():
        added_bytes = resident.added_keys(tile) * problem.kv_token_bytes
        query_bytes = problem.query_bytes[tile // problem.heads.head_split]
        added_bytes += query_bytes
        added_bytes[home[tile]] -= query_bytes
        feasible = load + pairs[tile] <= target
        keys = (added_bytes, load) if feasible.any() else (load, added_bytes)
        candidates = np.flatnonzero(feasible) if feasible.any() else np.arange(len(load))
        best = _first_smallest(candidates, keys)
        worker[tile] = best
        load[best] += pairs[tile]
        resident.place(tile, best)
    return Placement(worker)


def _first_smallest(candidates: Int64, keys: tuple[Int64, Int64]) -> int:
    """The candidate with the smallest (key 0, key 1, id)."""
    for key in keys:
        values = key[candidates]
        candidates = candidates[values == values.min()]
        if len(candidates) == 1:
            break
    return int(candidates[0])
