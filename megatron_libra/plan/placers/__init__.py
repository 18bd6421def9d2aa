"""Placers: one file a policy, each `place(problem) -> worker of every tile`.

In: name. Out: the function.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.placers import home, home_first, paper, ulysses
from megatron_libra.plan.placers.problem import PlacementProblem

__all__ = ["PLACERS", "PlacementProblem", "Placer"]

Placer = Callable[[PlacementProblem], NDArray[np.int64]]

PLACERS: dict[str, Placer] = {
    "home_first": home_first.place,
    "paper": paper.place,
    "ulysses": ulysses.place,
    "home": home.place,
}
