"""Placers: one file a policy, each `place(problem) -> Placement`.

In: name. Out: the function.
"""

from __future__ import annotations

from collections.abc import Callable

from megatron_libra.plan.placers import home, home_first, paper, ulysses
from megatron_libra.plan.placers.problem import Placement, PlacementProblem

__all__ = ["PLACERS", "Placement", "PlacementProblem", "Placer"]

Placer = Callable[[PlacementProblem], Placement]

PLACERS: dict[str, Placer] = {
    "home_first": home_first.place,
    "paper": paper.place,
    "ulysses": ulysses.place,
    "home": home.place,
}
