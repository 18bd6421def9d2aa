"""Overlap the exchange of head chunks with their computation (section 4.4, figure 10).

In: the stages of a layer. Out: all results are home. With M = 4 (the first dispatch and the last
return stay exposed):

    dispatch  0 | 1 | 2 | 3 |   |
    compute     | 0 | 1 | 2 | 3 |
    return      |   | 0 | 1 | 2 | 3
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

__all__ = ["Pending", "Stages", "run_chunks"]


class Pending(Protocol):
    """A started transfer."""

    def wait(self) -> torch.Tensor:
        """Return what arrived, ready for use."""


class Stages(Protocol):
    """What a layer does with one head chunk."""

    def dispatch(self, chunk: int) -> Sequence[Pending]:
        """Start the transfers in."""

    def compute(self, chunk: int, arrived: list[torch.Tensor]) -> Any:
        """Compute with what arrived."""

    def send_home(self, chunk: int, computed: Any) -> Sequence[Pending]:
        """Start the transfers out."""


def run_chunks(num_chunks: int, layer: Stages) -> None:
    """Run all chunks in time order. Collective: every worker of the pool, equally many chunks."""
    returning: list[Pending] = []
    arriving = layer.dispatch(0)
    for chunk in range(num_chunks):
        upcoming = layer.dispatch(chunk + 1) if chunk + 1 < num_chunks else ()
        # wait right before use: the compute of chunk - 1 hid this transfer
        arrived = [transfer.wait() for transfer in arriving]
        # the return travels while chunk + 1 computes
        returning += layer.send_home(chunk, layer.compute(chunk, arrived))
        arriving = upcoming
    for transfer in returning:
        transfer.wait()
