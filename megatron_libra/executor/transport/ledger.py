"""What a layer has open, started and waited for; the same rules for every transport.

In: the calls of a transport. Out: RuntimeError where a call would read or overwrite rows that are
not there, which would otherwise hang a collective or corrupt a layer far away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from megatron_libra.executor.transport.interface import ChunkOf, Mailbox, MailboxRequest

__all__ = ["Ledger", "Started", "plain_mailboxes", "plain_rows"]


class Ledger:
    """Open mailboxes of one transport, which it keeps alive. Local."""

    def __init__(self, name: str, worker: int, num_workers: int) -> None:
        self.name, self.worker, self.num_workers = name, worker, num_workers
        self._started: dict[Mailbox, set[int]] = {}
        self._num_waiting = 0

    def check_open(self, requests: Sequence[MailboxRequest]) -> None:
        """Raise RuntimeError unless a layer with these mailboxes may be opened."""
        if self._started:
            raise RuntimeError(
                f"{self.name}: {len(self._started)} mailboxes are still open; close() a layer "
                "before the next one is opened."
            )
        for request in requests:
            traffic = request.traffics[0]
            workers = len(traffic.matrix)
            if (traffic.worker, workers) != (self.worker, self.num_workers):
                raise RuntimeError(
                    f"{self.name}: the traffic is that of worker {traffic.worker} of "
                    f"{workers}, the transport that of worker {self.worker} of {self.num_workers}."
                )

    def opened(self, mailboxes: Sequence[Mailbox]) -> tuple[Mailbox, ...]:
        """Note the mailboxes of a layer."""
        self._started = {mailbox: set() for mailbox in mailboxes}
        return tuple(mailboxes)

    def start(self, chunks: Sequence[ChunkOf]) -> None:
        """Note one more exchange.

        Raises:
            RuntimeError: a mailbox is not open, or a chunk is unknown or started before.
        """
        for mailbox, chunk in chunks:
            started = self._started.get(mailbox)
            if started is None:
                raise RuntimeError(f"{self.name}: start() of a mailbox that is not open.")
            if chunk in started or not 0 <= chunk < mailbox.chunks:
                raise RuntimeError(
                    f"{self.name}: chunk {chunk} of a mailbox of {mailbox.chunks} must be started "
                    f"once; started are {sorted(started)}."
                )
            started.add(chunk)
        self._num_waiting += 1

    def waited(self) -> None:
        """Note that an exchange was waited for."""
        self._num_waiting -= 1

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        """Forget the mailboxes of a layer.

        Raises:
            RuntimeError: they are not those that are open, or an exchange was not waited for.
        """
        if set(mailboxes) != set(self._started):
            raise RuntimeError(
                f"{self.name}: close() names {len(mailboxes)} mailboxes, not the "
                f"{len(self._started)} that are open."
            )
        if self._num_waiting:
            raise RuntimeError(
                f"{self.name}: {self._num_waiting} exchanges were not waited for before close()."
            )
        self._started = {}


class Started:
    """Satisfies Pending: calls `finish` once, then lets go of what it holds."""

    def __init__(
        self, ledger: Ledger, chunks: Sequence[ChunkOf], finish: Callable[[], None]
    ) -> None:
        ledger.start(chunks)
        self._ledger = ledger
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        """See Pending.wait."""
        if self._finish is None:
            raise RuntimeError(f"{self._ledger.name}: wait() was called before.")
        finish, self._finish = self._finish, None
        finish()
        self._ledger.waited()


def plain_rows(request: MailboxRequest, device: torch.device) -> torch.Tensor:
    """Rows of a mailbox in ordinary memory of the device."""
    return torch.empty(request.num_rows, request.width, dtype=request.dtype, device=device)


def plain_mailboxes(requests: Sequence[MailboxRequest], device: torch.device) -> list[Mailbox]:
    """Mailboxes in ordinary memory of the device."""
    return [request.mailbox(plain_rows(request, device)) for request in requests]
