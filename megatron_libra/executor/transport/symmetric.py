"""Push rows straight into the memory of the worker that needs them, inside one node.

In and out: see `interface`. Received rows stand in this worker's heap, where its peers write them;
own rows stand there too. No worker asks where: all compute the same layout (`heap`).

    layer n, this worker                          its peer
    open     wait for the pushes of layer n-1
    start    push: wait CREDIT of peer >= n-1     <- close of layer n-1 posted it
             push: copy rows, post ARRIVAL e  ->  wait until ARRIVAL >= e, then the rows are there
    wait     wait ARRIVAL e of every source
    close    push: post CREDIT n to all       ->  start of layer n+1 goes on

Exchanges e and layers n are counted alike on all members, because all make the same calls. A
credit goes to every member: one that sent nothing in layer n may be the first to write in n+1. It
is posted on the push queue, after the caller's last read and after the pushes that read own rows.

Why nothing can wait in a circle, even when all streams of a worker share one hardware queue (with
CUDA_DEVICE_MAX_CONNECTIONS=1, which Megatron demands, commands run in the order in which the host
enqueued them): number the calls of a worker, of both its transports, in program order; it is the
same on all members. What a call enqueues waits only for what a peer's *earlier* call enqueues:
start (credits) for a close, wait (arrivals) for a start, open and close for own pushes. So "all
members do call 1, then all do call 2, ..." is a valid serial order, and a worker that lags behind
never depends on one that is ahead. The same holds if a call blocks the host.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from megatron_libra.executor.transport.heap import HeapLayout, heap_layout
from megatron_libra.executor.transport.interface import ChunkOf, Mailbox, MailboxRequest, Pending
from megatron_libra.executor.transport.ledger import Ledger, Started, plain_rows
from megatron_libra.executor.transport.peers import ARRIVAL, CREDIT, Copy, Peers

__all__ = ["SymmetricTransport"]

KEPT_VIEWS = 32
GROWTH = 1.5
logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Exchange:
    """The work of one start()."""

    copies: tuple[tuple[int, tuple[Copy, ...]], ...]
    """By peer, in the order of pushing."""
    sources: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class _Views:
    """A layout's views of the heaps; made once a plan, used by all its layers."""

    layout: HeapLayout
    rows: tuple[torch.Tensor | None, ...]
    exchanges: dict[tuple[tuple[int, int], ...], _Exchange] = field(default_factory=dict)
    """By the (mailbox, chunk) pairs that an exchange moves."""


class SymmetricTransport:
    """Satisfies Transport for the rows between the members; spanning.py adds the others."""

    def __init__(self, peers: Peers, worker: int, num_workers: int) -> None:
        """Local; memory is allocated by the first open() in which rows move.

        Args:
            peers: memory of the workers of this worker's node.
            worker: this one.
            num_workers: of the pool; peers.workers may be fewer.
        """
        self.peers, self.name = peers, "symmetric"
        self.worker, self.num_workers = worker, num_workers
        self._ledger = Ledger(self.name, worker, num_workers)
        self._views: OrderedDict[tuple[MailboxRequest, ...], _Views] = OrderedDict()
        self._open: _Views | None = None
        self._places: dict[Mailbox, int] = {}
        self._num_bytes = 0
        self._num_layers = 0  # those that use the heap
        self._num_exchanges = 0  # those that move rows
        self._credited: set[int] = set()

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        """See Transport.open. If the layer needs a larger heap than any before, all members
        allocate one; then, on CUDA, the host waits for its streams, and the log has a line.

        Raises:
            RuntimeError: see Ledger; or an earlier layer did not end within the timeout.
        """
        self._ledger.check_open(requests)
        views = self._views_of(tuple(requests), device)
        if views.layout.uses_heap:
            self.peers.check()
            self.peers.join()  # the caller is about to overwrite what the last layer pushed
            self._num_layers += 1
        self._open, self._credited = views, set()
        mailboxes = [
            request.mailbox(plain_rows(request, device) if rows is None else rows)
            for request, rows in zip(requests, views.rows, strict=True)
        ]
        self._places = {mailbox: place for place, mailbox in enumerate(mailboxes)}
        return self._ledger.opened(mailboxes)

    def start(self, chunks: Sequence[ChunkOf]) -> Pending:
        """See Transport.start. The copies run on the push queue."""
        number = self._num_exchanges + 1
        sources: list[int] = []

        def finish() -> None:
            self.peers.wait(sources, ARRIVAL, number)

        pending = Started(self._ledger, chunks, finish)
        exchange = self._exchange_of(chunks)
        if exchange is not None:
            self._num_exchanges = number
            sources += exchange.sources
            self._push(exchange, number)
        return pending

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        """See Transport.close. Peers may write the next layer's rows from here on."""
        self._ledger.close(mailboxes)
        if self._open is not None and self._open.layout.uses_heap:
            self.peers.fork()
            for peer in self.peers.workers:
                if peer != self.worker:
                    self.peers.post(peer, CREDIT, self._num_layers)
            self.peers.watch()
        self._open, self._places = None, {}

    def _push(self, exchange: _Exchange, number: int) -> None:
        if exchange.copies:
            self.peers.fork()
        for peer, copies in exchange.copies:
            if peer not in self._credited and self._num_layers > 1:
                self.peers.hold(peer, CREDIT, self._num_layers - 1)
            self._credited.add(peer)
            self.peers.push(copies)
            self.peers.post(peer, ARRIVAL, number)

    def _exchange_of(self, chunks: Sequence[ChunkOf]) -> _Exchange | None:
        """The views to copy; None if the exchange moves nothing between any two members."""
        assert self._open is not None
        offsets = self._open.layout.offsets
        key = tuple((self._places[mailbox], chunk) for mailbox, chunk in chunks)
        if all(offsets[place] is None for place, _ in key):
            return None
        if key not in self._open.exchanges:
            with torch.inference_mode(False):
                self._open.exchanges[key] = self._make_exchange(self._open.layout, chunks)
        return self._open.exchanges[key]

    def _make_exchange(self, layout: HeapLayout, chunks: Sequence[ChunkOf]) -> _Exchange:
        copies: dict[int, list[Copy]] = {}
        sources: set[int] = set()
        for mailbox, chunk in chunks:
            place, sent = self._places[mailbox], mailbox.sent(chunk)
            sources.update(layout.sources[place][chunk])
            for push in layout.pushes[place][chunk]:
                source = sent[push.first_row : push.first_row + push.num_rows]
                heap = self.peers.heap(push.peer)[push.offset : push.offset + source.nbytes]
                destination = heap.view(source.dtype).view(source.shape)
                copies.setdefault(push.peer, []).append((destination, source))
        turn = {peer: (peer - self.worker) % self.num_workers for peer in copies}
        ordered = sorted(copies, key=turn.__getitem__)
        return _Exchange(
            tuple((peer, tuple(copies[peer])) for peer in ordered), tuple(sorted(sources))
        )

    def _views_of(self, requests: tuple[MailboxRequest, ...], device: torch.device) -> _Views:
        views = self._views.pop(requests, None)
        if views is None:
            layout = heap_layout(requests, self.peers.workers)
            if layout.num_bytes > self._num_bytes:
                with torch.inference_mode(False):
                    self._grow(layout.num_bytes, device)
            with torch.inference_mode(False):  # evaluation may come first, training later
                views = self._make_views(requests, layout)
        self._views[requests] = views
        if len(self._views) > KEPT_VIEWS:
            self._views.popitem(last=False)
        return views

    def _grow(self, num_bytes: int, device: torch.device) -> None:
        """All members do it in the same open(), as a layout has the same size on all of them."""
        self._views.clear()  # they would keep the smaller heap
        self._num_bytes = max(num_bytes, int(GROWTH * self._num_bytes))
        logger.info(
            "worker %d: %.1f MiB of memory shared with workers %s",
            self.worker,
            self._num_bytes / 2**20,
            list(self.peers.workers),
        )
        self.peers.reserve(self._num_bytes, device)

    def _make_views(self, requests: tuple[MailboxRequest, ...], layout: HeapLayout) -> _Views:
        rows: list[torch.Tensor | None] = []
        for request, offset in zip(requests, layout.offsets, strict=True):
            if offset is None:
                rows.append(None)
                continue
            count, size = request.num_rows, request.width * request.dtype.itemsize
            part = self.peers.heap(self.worker)[offset : offset + count * size]
            rows.append(part.view(request.dtype).view(count, request.width))
        return _Views(layout, tuple(rows))
