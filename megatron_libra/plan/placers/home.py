"""Every tile at its home: context parallelism that gathers K/V.

In: problem. Out: worker per tile. A baseline.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers.problem import PlacementProblem

__all__ = ["place"]


def place(problem: PlacementProblem) -> NDArray[np.int64]:
    """(T,) the home of each tile."""
    return problem.tile_home
