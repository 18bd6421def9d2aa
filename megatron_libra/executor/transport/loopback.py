"""The transport of a pool with one worker: there is nobody to talk to, so nothing is sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_libra.executor.transport.interface import ChunkOf, Mailbox, MailboxRequest, Pending
from megatron_libra.executor.transport.ledger import Ledger, Started, plain_mailboxes

__all__ = ["LoopbackTransport"]


class LoopbackTransport:
    """Satisfies Transport. Every exchange is empty and complete at once."""

    name = "loopback"
    num_workers = 1
    worker = 0

    def __init__(self) -> None:
        self._ledger = Ledger(self.name, self.worker, self.num_workers)

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        """See Transport.open."""
        self._ledger.check_open(requests)
        return self._ledger.opened(plain_mailboxes(requests, device))

    def start(self, chunks: Sequence[ChunkOf]) -> Pending:
        """See Transport.start."""
        return Started(self._ledger, chunks, lambda: None)

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        """See Transport.close."""
        self._ledger.close(mailboxes)
