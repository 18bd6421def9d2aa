"""What a transport offers: mailboxes for a layer's rows, started exchanges, waiting for them.

A layer moves rows along a route direction in chunks, each with its RowTraffic. Rows of a chunk
stand in *travel order*: those for the other workers by ascending peer, then the local ones, which
never enter an exchange. The paper's dispatch and return (4.4) are such exchanges. Example, worker 0
of 2, two chunks, of each one row arrives, two leave and three stay:

    mailbox.rows   received 0 | received 1 | own 0: leave leave stay stay stay | own 1: ... | zero
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

__all__ = [
    "ChunkOf",
    "Mailbox",
    "MailboxPlaces",
    "MailboxRequest",
    "Pending",
    "RowTraffic",
    "Transport",
]

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
class MailboxPlaces:
    """Where the chunks of a mailbox begin."""

    received: tuple[int, ...]
    """(chunks + 1,) first received row of each chunk, and behind the last."""
    own: tuple[int, ...]
    """(chunks + 1,) first packed row of each chunk, and behind the last."""

    @classmethod
    def of(cls, traffics: Sequence[RowTraffic]) -> MailboxPlaces:
        """Received rows of all chunks, then packed rows of all chunks."""
        rows = [traffic.num_received for traffic in traffics]
        rows += [traffic.num_own for traffic in traffics]
        starts = (0, *accumulate(rows))
        return cls(starts[: len(traffics) + 1], starts[len(traffics) :])


@dataclass(frozen=True)
class MailboxRequest:
    """A mailbox that a layer needs; equal on all workers but for who they are."""

    traffics: tuple[RowTraffic, ...]
    """By chunk; at least one."""
    width: int
    """Elements of a row."""
    dtype: torch.dtype

    def mailbox(self, rows: torch.Tensor) -> Mailbox:
        """The mailbox in memory that a transport gives: (num_rows, width)."""
        return Mailbox(rows, self.traffics, self._places)

    @property
    def num_rows(self) -> int:
        """Rows on this worker, with the last one, which is the caller's."""
        return self._places.own[-1] + 1

    @cached_property
    def _places(self) -> MailboxPlaces:
        return MailboxPlaces.of(self.traffics)


@dataclass(frozen=True, slots=True, eq=False)
class Mailbox:
    """Rows of all chunks of one route direction on this worker, see the module docstring."""

    rows: torch.Tensor
    """(rows of `places` + 1, width), contiguous; the last row is the caller's."""
    traffics: tuple[RowTraffic, ...]
    """By chunk."""
    places: MailboxPlaces

    @property
    def chunks(self) -> int:
        """Chunks that are exchanged, each on its own."""
        return len(self.traffics)

    def received(self, chunk: int) -> torch.Tensor:
        """(num_received, width), written between start and wait; by ascending source."""
        return self.rows[self.places.received[chunk] : self.places.received[chunk + 1]]

    def own(self, first: int, last: int) -> torch.Tensor:
        """(sum of num_own, width): where the caller packs chunks [first, last)."""
        return self.rows[self.places.own[first] : self.places.own[last]]

    def sent(self, chunk: int) -> torch.Tensor:
        """(num_sent, width), by ascending destination; not to be changed until the exchange is
        waited for and the mailbox closed."""
        start = self.places.own[chunk]
        return self.rows[start : start + self.traffics[chunk].num_sent]


ChunkOf = tuple[Mailbox, int]
"""A mailbox and the chunk of it that an exchange moves."""


class Pending(Protocol):
    """A started exchange; the transport keeps its mailboxes alive until they are closed."""

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
    """nccl, gloo, symmetric, symmetric + nccl, symmetric + gloo or loopback."""
    num_workers: int
    worker: int

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        """Mailboxes for one layer; their contents are undefined. Must not be kept after close()."""

    def start(self, chunks: Sequence[ChunkOf]) -> Pending:
        """Exchange sent(chunk) of each named mailbox into received(chunk) of its peers, as one
        exchange. On CUDA it runs after the work enqueued so far on the current stream."""

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        """The caller has enqueued its last read of the mailboxes on the current stream."""
