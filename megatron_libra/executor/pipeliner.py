"""Overlap the exchange of head chunks with computation (section 4.4, figure 10).

In: the stages of a layer. Out: all results are home. A step is a chunk of the near or the far part
(`plan.parts.pipeline_order`). With M = 2; local work, which needs nobody, fills the ends that would
be exposed, and near chunks hide the transfers of the far ones:

    dispatch  n0 f0 f1 n1
    compute   early | n0 | f0 | f1 | n1 | late
    return               | n0 | f0 | f1 | n1
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Stages", "run_steps"]


class Stages(Protocol):
    """What a layer does."""

    def dispatch(self) -> None:
        """Start every step's transfers in, in order."""

    def compute_local(self, *, early: bool) -> None:
        """Compute one half of the local part."""

    def compute(self, step: int) -> None:
        """Wait for a step's rows, compute it and start its transfers home."""


def run_steps(num_steps: int, layer: Stages) -> None:
    """Run a layer in time order. Collective: every worker of the pool, with equally many steps.

    num_steps is 0 on every worker if nobody exchanges anything.
    """
    if num_steps:
        layer.dispatch()
    layer.compute_local(early=True)  # hides the first dispatch
    for step in range(num_steps):
        # later dispatches and earlier returns travel meanwhile
        layer.compute(step)
    layer.compute_local(early=False)  # hides the last return
