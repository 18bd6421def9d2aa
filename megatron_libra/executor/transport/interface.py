"""What a transport offers: mailboxes for a layer's rows, started exchanges, waiting for them.

A layer moves rows along a route direction in chunks: every chunk sends the same rows of other head
slices, so one RowTraffic describes them all. Rows stand in *travel order*: those for the other
workers by ascending peer, then the local ones, which never enter an exchange. The paper's dispatch
and return (4.4) are such exchanges. Example, worker 0 of 2, two chunks, one row arrives, two leave
and three stay:

    mailbox.rows   received 0 | received 1 | own 0: leave leave stay stay stay | own 1: ... | zero
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = ["ChunkOf", "Mailbox", "MailboxRequest", "Pending", "RowTraffic", "Transport"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class RowTraffic:
    """Rows of one chunk in one route direction, between all workers of a pool; made once a bind."""

    matrix: Int64
    """(W, W) rows from source to destination; the diagonal stays where it is."""
    worker: int
    """This worker."""

    @cached_property
    def moved(self) -> Int64:
        """The matrix without its diagonal."""
        moved = self.matrix.copy()
        np.fill_diagonal(moved, 0)
        return moved

    @cached_property
    def send(self) -> tuple[int, ...]:
        """Rows from this worker to each worker; 0 for the own."""
        return tuple(self.moved[self.worker].tolist())

    @cached_property
    def receive(self) -> tuple[int, ...]:
        """Rows that each worker sends here; 0 for the own."""
        return tuple(self.moved[:, self.worker].tolist())

    @cached_property
    def num_sent(self) -> int:
        """Rows that leave this worker."""
        return sum(self.send)

    @cached_property
    def num_received(self) -> int:
        """Rows that arrive at this worker."""
        return sum(self.receive)

    @cached_property
    def num_local(self) -> int:
        """Rows that stay on this worker."""
        return int(self.matrix[self.worker, self.worker])

    @property
    def num_own(self) -> int:
        """Rows that this worker packs: those that leave and those that stay."""
        return self.num_sent + self.num_local

    @cached_property
    def moves(self) -> bool:
        """Whether any two workers of the pool exchange a row; the same on every worker."""
        return bool(self.moved.any())

    @cached_property
    def inverse(self) -> RowTraffic:
        """The way back: what was received is sent."""
        return RowTraffic(np.ascontiguousarray(self.matrix.T), self.worker)


@dataclass(frozen=True, slots=True)
class MailboxRequest:
    """A mailbox that a layer needs; equal on all workers but for traffic.worker."""

    traffic: RowTraffic
    chunks: int
    width: int
    """Elements of a row."""
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
    """Rows of all chunks of one route direction on this worker, see the module docstring."""

    rows: torch.Tensor
    """(chunks * (num_received + num_own) + 1, width), contiguous; the last row is the caller's."""
    traffic: RowTraffic
    chunks: int

    def received(self, chunk: int) -> torch.Tensor:
        """(num_received, width), written between start and wait; by ascending source."""
        count = self.traffic.num_received
        return self.rows[chunk * count : (chunk + 1) * count]

    def own(self, first: int, last: int) -> torch.Tensor:
        """((last - first) * num_own, width): where the caller packs chunks [first, last)."""
        start, count = self.chunks * self.traffic.num_received, self.traffic.num_own
        return self.rows[start + first * count : start + last * count]

    def sent(self, chunk: int) -> torch.Tensor:
        """(num_sent, width), by ascending destination; not to be changed until the exchange is
        waited for and the mailbox closed."""
        start = self.chunks * self.traffic.num_received + chunk * self.traffic.num_own
        return self.rows[start : start + self.traffic.num_sent]


ChunkOf = tuple[Mailbox, int]
"""A mailbox and the chunk of it that an exchange moves."""


class Pending(Protocol):
    """A started exchange; it keeps its buffers alive."""

    def wait(self) -> None:
        """Return when the received rows are ready: for the current stream (CUDA, the host does not
        wait) or for the caller (CPU). Called exactly once.

        Raises:
            RuntimeError: wait() was called before, or the exchange failed.
        """


class Transport(Protocol):
    """Moves rows inside one pool, in one of the two directions (dispatch or return).

    Collective: every worker of the pool makes the same calls in the same order, also with nothing
    to send. A layer opens its mailboxes, starts their chunks, waits for each, closes them; the next
    layer of the same transport opens after that.
    """

    name: str
    """nccl, gloo, symmetric, symmetric + nccl or loopback."""
    num_workers: int
    worker: int

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        """Mailboxes for one layer; their contents are undefined. Must not be kept after close()."""

    def start(self, chunks: Sequence[ChunkOf]) -> Pending:
        """Exchange sent(chunk) of each named mailbox into received(chunk) of its peers, as one
        exchange. On CUDA it runs after the work enqueued so far on the current stream."""

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        """The caller has enqueued its last read of the mailboxes on the current stream."""
