"""Overlap the exchange of head chunks with computation (section 4.4, figure 10).

In: the stages of a layer. Out: all results are home. With M = 4; local work, which needs nobody,
fills the ends that would be exposed:

    dispatch  0 1 2 3
    compute   early | 0 | 1 | 2 | 3 | late
    return              | 0 | 1 | 2 | 3
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["Stages", "run_chunks"]


class Stages(Protocol):
    """What a layer does."""

    def dispatch(self) -> None:
        """Start every chunk's transfers in, in chunk order."""

    def compute_local(self, *, early: bool) -> None:
        """Compute one half of the local part."""

    def compute(self, chunk: int) -> None:
        """Wait for a chunk, compute it and start its transfers home."""


def run_chunks(num_chunks: int, layer: Stages) -> None:
    """Run a layer in time order. Collective: every worker of the pool, with equally many chunks.

    num_chunks is 0 on every worker if nobody exchanges anything.
    """
    if num_chunks:
        layer.dispatch()
    layer.compute_local(early=True)  # hides the first dispatch
    for chunk in range(num_chunks):
        # later dispatches and earlier returns travel meanwhile
        layer.compute(chunk)
    layer.compute_local(early=False)  # hides the last return
