"""How rows travel between the workers of a pool: loopback, collectives, pushes between GPUs.

In: mailboxes with packed rows. Out: the same mailboxes with the rows that arrived.
"""

from megatron_libra.executor.transport.all_to_all import AllToAllTransport
from megatron_libra.executor.transport.interface import (
    ChunkOf,
    Mailbox,
    MailboxPlaces,
    MailboxRequest,
    Pending,
    RowTraffic,
    Transport,
)
from megatron_libra.executor.transport.loopback import LoopbackTransport

__all__ = [
    "AllToAllTransport",
    "ChunkOf",
    "LoopbackTransport",
    "Mailbox",
    "MailboxPlaces",
    "MailboxRequest",
    "Pending",
    "RowTraffic",
    "Transport",
]
