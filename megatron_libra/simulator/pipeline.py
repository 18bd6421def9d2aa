"""How long a 1F1B pipeline takes for unequal microbatches. In: times by microbatch. Out: seconds.

Stage s of p runs p - 1 - s forwards ahead, then one forward and one backward in turn, then the
backwards that are left. A forward waits for the stage before, a backward for the stage behind.
Transfers between stages are free. Example, p = 2, forwards 1 3, backwards 2 6:

    stage 0   F0 F1 F1 F1 B0 B0 -  -  -  -  -  -  -  B1 ... until 19
    stage 1   -  F0 B0 B0 F1 F1 F1 B1 B1 B1 B1 B1 B1
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

__all__ = ["one_forward_one_backward", "pipeline_seconds"]

Float = NDArray[np.float64]
Op = tuple[bool, int]
"""(is backward, microbatch)."""


def one_forward_one_backward(stage: int, num_stages: int, num_microbatches: int) -> list[Op]:
    """The order of work on one stage."""
    ahead = min(num_stages - 1 - stage, num_microbatches)
    forwards = [(False, microbatch) for microbatch in range(num_microbatches)]
    backwards = [(True, microbatch) for microbatch in range(num_microbatches)]
    ops = forwards[:ahead]
    for forward, backward in zip(forwards[ahead:], backwards, strict=False):
        ops += [forward, backward]
    return ops + backwards[num_microbatches - ahead :]


def pipeline_seconds(forward: Float, backward: Float, num_stages: int) -> Float:
    """(groups,) seconds of a step.

    Args:
        forward: (GA, groups) seconds of a microbatch's forward on one stage; all stages are equal.
        backward: the same of backward.
        num_stages: p.
    """
    count = len(forward)
    if num_stages == 1:
        alone: Float = (forward + backward).sum(axis=0)
        return alone
    orders = [one_forward_one_backward(s, num_stages, count) for s in range(num_stages)]
    finished: dict[tuple[int, bool, int], Float] = {}
    free = [np.zeros(forward.shape[1]) for _ in orders]
    next_op = [0] * num_stages
    while any(at < 2 * count for at in next_op):
        for stage, order in enumerate(orders):
            while next_op[stage] < 2 * count:
                is_backward, microbatch = order[next_op[stage]]
                start = _start(stage, is_backward, microbatch, finished, num_stages)
                if start is None:
                    break
                duration = (backward if is_backward else forward)[microbatch]
                free[stage] = np.maximum(free[stage], start) + duration
                finished[stage, is_backward, microbatch] = free[stage]
                next_op[stage] += 1
    last: Float = np.max(free, axis=0)
    return last


def _start(
    stage: int,
    is_backward: bool,
    microbatch: int,
    finished: dict[tuple[int, bool, int], Float],
    num_stages: int,
) -> Float | None:
    """When the input of an operation arrives; None while it is not known."""
    if is_backward and stage == num_stages - 1:
        return finished.get((stage, False, microbatch))
    if not is_backward and stage == 0:
        return np.zeros(1)
    neighbour = stage + 1 if is_backward else stage - 1
    return finished.get((neighbour, is_backward, microbatch))
