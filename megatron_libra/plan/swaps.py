"""Even out bins of equal count by swaps. In: work, bins. Out: bins. Beyond Algorithm 1.

Greedy placement ends with what the last, light items could not even out; a few swaps between the
heaviest and the lightest bin do. Example, work 7 6 5 4, bins (7 4) and (6 5): nothing to gain;
bins (7 5) and (6 4): swapping 7 and 6 gives 11 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["exact_array", "swap"]


def swap(work: Sequence[int], bins: Sequence[Sequence[int]]) -> list[list[int]]:
    """Swap an item of the heaviest bin with one of the lightest, the pair that brings the two
    closest together, until no swap lowers the heavier of the two.

    Ties: bin index, then position in the heavy bin, then the lighter partner. Every swap lowers the
    sum of squared loads, so it ends.
    """
    result = [np.array(items, np.int64) for items in bins]
    values = exact_array(work)
    load = [values[items].sum() for items in result]
    while True:
        heavy = max(range(len(result)), key=lambda k: (load[k], -k))
        light = min(range(len(result)), key=lambda k: (load[k], k))
        pair = _best_pair(values[result[heavy]], values[result[light]], load[heavy] - load[light])
        if pair is None:
            return [items.tolist() for items in result]
        ours, theirs = result[heavy][pair[0]], result[light][pair[1]]
        result[heavy][pair[0]], result[light][pair[1]] = theirs, ours
        load[heavy] -= values[ours] - values[theirs]
        load[light] += values[ours] - values[theirs]


def exact_array(work: Sequence[int]) -> NDArray[Any]:
    """The work as an array whose sums are exact: int64, or Python's integers beyond it."""
    return np.array(work, np.int64 if 2 * sum(work) < 2**63 else object)


def _best_pair(ours: NDArray[Any], theirs: NDArray[Any], gap: int) -> tuple[int, int] | None:
    """Positions of the items whose difference is nearest to half the gap; None if none helps."""
    order = np.argsort(theirs, kind="stable")
    above = np.searchsorted(2 * theirs[order], 2 * ours - gap)
    near = np.clip(np.stack([above - 1, above], axis=1), 0, len(theirs) - 1)
    moved = ours[:, None] - theirs[order][near]
    helps = (moved > 0) & (moved < gap)
    if not helps.any():
        return None
    row, column = divmod(int(np.where(helps, np.abs(gap - 2 * moved), gap).argmin()), 2)
    return row, int(order[near[row, column]])
