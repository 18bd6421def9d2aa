"""What a transport offers: start an exchange of rows, wait for it.

In: send rows (Ns, width), grouped by destination in ascending worker order. Out: received rows (Nr,
width), grouped by source. A worker's own rows never enter an exchange. The paper's dispatch and
return (4.4) are such exchanges.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

__all__ = ["PendingExchange", "RowSplits", "Transport"]


@dataclass(frozen=True, slots=True)
class RowSplits:
    """How many rows go to and come from each worker of the pool; the own entries are 0."""

    send: tuple[int, ...]
    receive: tuple[int, ...]

    @property
    def num_sent(self) -> int:
        """Rows that leave this worker."""
        return sum(self.send)

    @property
    def num_received(self) -> int:
        """Rows that arrive at this worker."""
        return sum(self.receive)

    def inverse(self) -> RowSplits:
        """The way back: what was received is sent."""
        return RowSplits(send=self.receive, receive=self.send)


class PendingExchange:
    """A started exchange. It keeps the buffers alive; wait() is called exactly once."""

    def __init__(
        self, received: torch.Tensor, sent: torch.Tensor, work: dist.Work | None = None
    ) -> None:
        self._buffers: tuple[torch.Tensor, torch.Tensor] | None = (received, sent)
        self._work = work

    def wait(self) -> torch.Tensor:
        """Return the received rows, ready for use on the current stream (CUDA) or for the caller
        (CPU).

        Raises:
            RuntimeError: wait() was called before, or the collective failed.
        """
        if self._buffers is None:
            raise RuntimeError("wait() was already called on this exchange; start another one.")
        if self._work is not None:
            self._work.wait()
        received, _ = self._buffers
        self._buffers = self._work = None
        return received


class Transport(Protocol):
    """Moves rows inside one pool. Every worker starts the same exchanges in the same order."""

    num_workers: int
    worker: int

    def start(
        self, received: torch.Tensor, sent: torch.Tensor, splits: RowSplits
    ) -> PendingExchange:
        """Start one exchange. Collective: every worker of the pool calls it, also with nothing to
        send.

        Args:
            received: contiguous (splits.num_received, width), written until wait().
            sent: contiguous (splits.num_sent, width), not to be changed until wait().
            splits: rows for each worker.
        """


def check_exchange(
    transport: Transport, received: torch.Tensor, sent: torch.Tensor, splits: RowSplits
) -> None:
    """Raise RuntimeError for buffers that would hang or corrupt a collective: a fault of the
    caller."""
    if len(splits.send) != transport.num_workers or len(splits.receive) != transport.num_workers:
        raise RuntimeError(
            f"splits name {len(splits.send)} workers, the pool has {transport.num_workers}."
        )
    if splits.send[transport.worker] or splits.receive[transport.worker]:
        raise RuntimeError(
            f"worker {transport.worker} must not send rows to itself through a transport."
        )
    if (len(sent), len(received)) != (splits.num_sent, splits.num_received):
        raise RuntimeError(
            f"buffers hold {len(sent)} and {len(received)} rows, the splits say "
            f"{splits.num_sent} and {splits.num_received}."
        )
    if not (sent.is_contiguous() and received.is_contiguous()):
        raise RuntimeError("send and receive buffers must be contiguous.")
