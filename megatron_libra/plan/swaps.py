"""Even out bins of equal count by swaps. In: work, bins. Out: bins. Beyond Algorithm 1.

Greedy placement ends with what the last, light items could not even out; a few swaps between the
heaviest and the lightest bin do. Example, work 7 6 5 4, bins (7 4) and (6 5): nothing to gain;
bins (7 5) and (6 4): swapping 7 and 6 gives 11 and 11.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

__all__ = ["swap"]


def swap(work: Sequence[int], bins: Sequence[Sequence[int]]) -> list[list[int]]:
    """Swap an item of the heaviest bin with one of the lightest, the pair that brings the two
    closest together, until no swap lowers the heavier of the two.

    Ties: bin index, then position in the heavy and in the light bin. Every swap lowers the sum of
    squared loads, so it ends.
    """
    result = [list(items) for items in bins]
    values = np.array(work, np.int64 if sum(work) < 2**62 else object)
    load = [sum(work[i] for i in items) for items in result]
    while True:
        heavy = max(range(len(result)), key=lambda k: (load[k], -k))
        light = min(range(len(result)), key=lambda k: (load[k], k))
        gap = load[heavy] - load[light]
        moved = values[result[heavy]][:, None] - values[result[light]]
        helps = (moved > 0) & (moved < gap)
        if not helps.any():
            return result
        row, column = np.argwhere(helps)[np.abs(gap - 2 * moved[helps]).argmin()].tolist()
        difference = int(moved[row, column])
        ours, theirs = result[heavy][row], result[light][column]
        result[heavy][row], result[light][column] = theirs, ours
        load[heavy] -= difference
        load[light] += difference
