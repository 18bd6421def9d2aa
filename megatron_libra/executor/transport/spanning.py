"""Pools that span nodes: pushes inside each node and collectives between the nodes, at once.

In and out: see `interface`. Mailboxes are those of the symmetric transport; the rows of peers on
other nodes go between the same mailboxes through the pool's process group. The workers of a node
may stand anywhere in worker order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron_libra.executor.transport.interface import (
    ChunkOf,
    Mailbox,
    MailboxRequest,
    Pending,
    RowTraffic,
)
from megatron_libra.executor.transport.ledger import Ledger, Started
from megatron_libra.executor.transport.symmetric import SymmetricTransport

__all__ = ["SpanningTransport"]


class SpanningTransport:
    """Satisfies Transport."""

    def __init__(
        self, inside: SymmetricTransport, group: dist.ProcessGroup, nodes: Sequence[int]
    ) -> None:
        """Local.

        Args:
            inside: of the workers of this worker's node.
            group: of all workers of the pool, in worker order; gloo or NCCL.
            nodes: the node of each worker.
        """
        self.inside, self.group, self.backend = inside, group, dist.get_backend(group)
        self.name = f"{inside.name} + {self.backend}"
        self.worker, self.num_workers = inside.worker, inside.num_workers
        self._ledger = Ledger(self.name, self.worker, self.num_workers)
        ids = np.asarray(nodes)
        self._between = ids[:, None] != ids[None, :]
        self._moves: WeakKeyDictionary[RowTraffic, bool] = WeakKeyDictionary()

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        """See Transport.open and SymmetricTransport.open."""
        self._ledger.check_open(requests)
        return self._ledger.opened(self.inside.open(requests, device))

    def start(self, chunks: Sequence[ChunkOf]) -> Pending:
        """See Transport.start. The nodes' exchange first: it takes longer."""
        started: list[Any] = []

        def finish() -> None:
            for part in started:
                part.wait()

        pending = Started(self._ledger, chunks, finish)
        started += self._start_between(
            [part for part in chunks if self._crosses(part[0].traffics[part[1]])]
        )
        started.append(self.inside.start(chunks))
        return pending

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        """See Transport.close."""
        self._ledger.close(mailboxes)
        self.inside.close(mailboxes)

    def _crosses(self, traffic: RowTraffic) -> bool:
        """Whether any row of the pool moves between nodes; the same on every worker."""
        if traffic not in self._moves:
            self._moves[traffic] = bool(traffic.moved[self._between].any())
        return self._moves[traffic]

    def _start_between(self, chunks: Sequence[ChunkOf]) -> list[Any]:
        if not chunks:
            return []
        if self.backend == "nccl":
            return self._all_to_all(chunks)
        return [work for mailbox, chunk in chunks for work in self._send(mailbox, chunk)]

    def _all_to_all(self, chunks: Sequence[ChunkOf]) -> list[Any]:
        """One group call of NCCL; its list form takes rows that are not next to each other."""
        with _coalescing_manager(self.group, chunks[0][0].rows.device, async_ops=True) as group:
            for mailbox, chunk in chunks:
                received, sent = self._parts(mailbox, chunk)
                dist.all_to_all(received, sent, group=self.group, async_op=True)
        return [group]

    def _send(self, mailbox: Mailbox, chunk: int) -> list[Any]:
        """The same point to point, for gloo, which has no such form."""
        received, sent = self._parts(mailbox, chunk)
        works = []
        for peer in range(self.num_workers):
            if received[peer].numel():
                works.append(dist.irecv(received[peer], group=self.group, group_src=peer))
            if sent[peer].numel():
                works.append(dist.isend(sent[peer], group=self.group, group_dst=peer))
        return works

    def _parts(self, mailbox: Mailbox, chunk: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Received and sent rows by worker; nothing for those of this node."""
        received = mailbox.received(chunk).split(mailbox.traffics[chunk].receive)
        sent = mailbox.sent(chunk).split(mailbox.traffics[chunk].send)
        here, nothing = self._between[self.worker], mailbox.rows[:0]

        def others(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [p if away else nothing for p, away in zip(parts, here, strict=True)]

        return others(received), others(sent)
