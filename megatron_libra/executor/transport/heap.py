"""Where every row of a layer stands in the heaps of a node's workers, known to all without a word.

In: the mailboxes of a layer and who shares memory. Out: HeapLayout: the offset of each mailbox in
this worker's heap, and for each the stretches that this worker writes in the heaps of its peers.

A heap holds the mailboxes of one layer one after the other; RowTraffic has the rows of all workers,
so each can compute the heap of any other. Example, workers 0 and 1, one mailbox, one chunk; worker
0 keeps 1 row and sends 2, worker 1 sends 1:

    heap of 0    received: 1 row | own: 2 that leave, 1 that stays | zero row
    heap of 1    received: 2 rows | own: 1 that leaves | zero row         0 writes at row 0 of it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from megatron_libra.executor.transport.interface import MailboxRequest, RowTraffic

__all__ = ["HeapLayout", "Push", "heap_layout", "moved_inside"]

ALIGNMENT = 256
"""Bytes; what a GPU allocator gives, so that kernels read rows as they would elsewhere."""
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Push:
    """Rows of one chunk that this worker writes into the heap of a peer."""

    peer: int
    first_row: int
    """Of sent(chunk)."""
    num_rows: int
    offset: int
    """Bytes from the start of the peer's heap to where the rows go."""


@dataclass(frozen=True, eq=False)
class HeapLayout:
    """The heaps of one layer, as one worker needs them."""

    num_bytes: int
    """Of the fullest heap of the node; the same on every member. 0: nothing moves inside it."""
    offsets: tuple[int | None, ...]
    """Bytes before each mailbox in this worker's heap; None for one in which nothing moves inside
    the node: it needs no heap."""
    pushes: tuple[tuple[tuple[Push, ...], ...], ...]
    """By mailbox, by chunk, by peer: first the peer after this worker, so that not all begin with
    the same."""
    sources: tuple[tuple[tuple[int, ...], ...], ...]
    """By mailbox, by chunk: the members that write here, ascending."""

    @cached_property
    def uses_heap(self) -> bool:
        """Whether any mailbox is in the heap; the same on every member."""
        return self.num_bytes > 0


def moved_inside(traffic: RowTraffic, members: Sequence[int]) -> Int64:
    """(W, W) rows that move between two members; 0 elsewhere."""
    inside = np.zeros_like(traffic.moved)
    both = np.ix_(members, members)
    inside[both] = traffic.moved[both]
    return inside


def heap_layout(requests: Sequence[MailboxRequest], members: tuple[int, ...]) -> HeapLayout:
    """The layout of a layer.

    Args:
        requests: the mailboxes of the layer; their traffics say who this worker is.
        members: workers that share memory, this one among them, ascending.
    """
    filled = np.zeros(len(requests[0].traffics[0].matrix) if requests else 0, dtype=np.int64)
    offsets: list[int | None] = []
    pushes: list[tuple[tuple[Push, ...], ...]] = []
    sources: list[tuple[tuple[int, ...], ...]] = []
    for request in requests:
        worker = request.traffics[0].worker
        inside = [moved_inside(traffic, members) for traffic in request.traffics]
        if not any(matrix.any() for matrix in inside):
            offsets.append(None)
            pushes.append(((),) * len(inside))
            sources.append(((),) * len(inside))
            continue
        offsets.append(int(filled[worker]))
        pushes.append(_pushes(request, inside, members, filled))
        sources.append(tuple(tuple(np.flatnonzero(m[:, worker]).tolist()) for m in inside))
        filled = filled + _mailbox_bytes(request)
    num_bytes = int(filled[list(members)].max(initial=0)) if requests else 0
    return HeapLayout(num_bytes, tuple(offsets), tuple(pushes), tuple(sources))


def _mailbox_bytes(request: MailboxRequest) -> Int64:
    """(W,) bytes of the mailbox on each worker, aligned."""
    rows = sum(traffic.moved.sum(0) + traffic.matrix.sum(1) for traffic in request.traffics) + 1
    return -(-rows * _row_bytes(request) // ALIGNMENT) * ALIGNMENT


def _pushes(
    request: MailboxRequest, inside: list[Int64], members: tuple[int, ...], starts: Int64
) -> tuple[tuple[Push, ...], ...]:
    """Of each chunk; starts: (W,) bytes before the mailbox on each worker."""
    worker, row_bytes = request.traffics[0].worker, _row_bytes(request)
    place = members.index(worker)
    peers = members[place + 1 :] + members[:place]
    chunk_rows = np.zeros_like(starts)  # received rows of the chunks before
    pushes = []
    for traffic, moving in zip(request.traffics, inside, strict=True):
        moved = traffic.moved
        rows_before = chunk_rows + moved[:worker].sum(0)  # received is ordered by source ...
        first_rows = np.cumsum(moved[worker]) - moved[worker]  # ... and sent by destination
        pushes.append(
            tuple(
                Push(
                    peer=peer,
                    first_row=int(first_rows[peer]),
                    num_rows=int(moving[worker, peer]),
                    offset=int(starts[peer] + rows_before[peer] * row_bytes),
                )
                for peer in peers
                if moving[worker, peer]
            )
        )
        chunk_rows = chunk_rows + moved.sum(0)
    return tuple(pushes)


def _row_bytes(request: MailboxRequest) -> int:
    size: int = request.dtype.itemsize
    return request.width * size
