"""Whole sequences x CP head shards inside each CP group (Ulysses).

In: problem. Out: Placement, without cuts. A baseline.

Needs head_split = CP (plan_pool sees to it): worker slot * CP + h computes shard h of its slot's
sequence.
"""

from __future__ import annotations

import numpy as np

from megatron_libra.plan.placers.problem import Placement, PlacementProblem

__all__ = ["place"]


def place(problem: PlacementProblem) -> Placement:
    """A worker for each tile."""
    size = problem.heads.head_split
    shard = np.tile(np.arange(size), problem.blocks.num_blocks)
    return Placement(np.repeat(problem.blocks.slot, size) * size + shard)
