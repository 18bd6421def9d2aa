"""Exchange rows by all_to_all_single on a torch process group (gloo or NCCL).

In and out: see `interface`. NCCL makes one group call for all mailboxes of an exchange; gloo, which
cannot, one collective for each. A mailbox in which no row of the pool moves makes none. Flat
buffers with split sizes, because gloo has no list form and point-to-point batches are slower on
NVLink. Zero-size parts are legal.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _coalescing_manager

from megatron_libra.executor.transport.interface import ChunkOf, Mailbox, MailboxRequest, Pending
from megatron_libra.executor.transport.ledger import Ledger, Started, plain_mailboxes

__all__ = ["AllToAllTransport"]


class AllToAllTransport:
    """Satisfies Transport. The group's ranks are the pool's workers, in worker order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name = dist.get_backend(group)
        self.num_workers = group.size()
        self.worker = group.rank()
        self._ledger = Ledger(self.name, self.worker, self.num_workers)

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        """See Transport.open. Ordinary memory; nothing is communicated."""
        self._ledger.check_open(requests)
        return self._ledger.opened(plain_mailboxes(requests, device))

    def start(self, chunks: Sequence[ChunkOf]) -> Pending:
        """See Transport.start. With NCCL it runs on the group's own stream."""
        works: list[Any] = []

        def finish() -> None:
            for work in works:
                work.wait()

        pending = Started(self._ledger, chunks, finish)
        works += self._exchange([part for part in chunks if part[0].traffics[part[1]].moves])
        return pending

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        """See Transport.close."""
        self._ledger.close(mailboxes)

    def _exchange(self, chunks: Sequence[ChunkOf]) -> list[Any]:
        if self.name != "nccl" or len(chunks) < 2:
            return [self._all_to_all(mailbox, chunk) for mailbox, chunk in chunks]
        # inside ncclGroupStart/End: one launch, and one event that wait() makes the stream wait for
        with _coalescing_manager(self.group, chunks[0][0].rows.device, async_ops=True) as group:
            for mailbox, chunk in chunks:
                self._all_to_all(mailbox, chunk)
        return [group]

    def _all_to_all(self, mailbox: Mailbox, chunk: int) -> Any:
        # async_op also puts NCCL's kernel on the group's own, high-priority stream
        return dist.all_to_all_single(
            mailbox.received(chunk),
            mailbox.sent(chunk),
            list(mailbox.traffics[chunk].receive),
            list(mailbox.traffics[chunk].send),
            group=self.group,
            async_op=True,
        )
