"""How rows travel between the workers of a pool; one exchange is one collective or none.

In: rows packed by peer. Out: a PendingExchange whose wait() gives the received rows.
"""

from megatron_libra.executor.transport.all_to_all import AllToAllTransport
from megatron_libra.executor.transport.interface import PendingExchange, RowSplits, Transport
from megatron_libra.executor.transport.loopback import LoopbackTransport

__all__ = ["AllToAllTransport", "LoopbackTransport", "PendingExchange", "RowSplits", "Transport"]
