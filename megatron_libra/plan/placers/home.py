"""Every tile at its home: context parallelism that gathers K/V.

In: problem. Out: Placement, without cuts. A baseline.
"""

from __future__ import annotations

from megatron_libra.plan.placers.problem import Placement, PlacementProblem

__all__ = ["place"]


def place(problem: PlacementProblem) -> Placement:
    """The home of each tile."""
    return Placement(problem.tile_home)
