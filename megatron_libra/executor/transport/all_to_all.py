"""Exchange rows by all_to_all_single on a torch process group (gloo or NCCL).

In and out: see `interface`. One collective for each exchange, flat buffers with split sizes: the
list form is not supported by gloo, and point-to-point batches are slower on NVLink. Zero-size parts
are legal.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_libra.executor.transport.interface import PendingExchange, RowSplits, check_exchange

__all__ = ["AllToAllTransport"]


class AllToAllTransport:
    """Satisfies Transport. The group's ranks are the pool's workers, in worker order."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.num_workers = group.size()
        self.worker = group.rank()

    def start(
        self, received: torch.Tensor, sent: torch.Tensor, splits: RowSplits
    ) -> PendingExchange:
        """See Transport.start. With NCCL it runs on the group's own stream, after the work enqueued
        so far."""
        check_exchange(self, received, sent, splits)
        # async_op also puts NCCL's kernel on the group's own, high-priority stream
        work = dist.all_to_all_single(
            received, sent, list(splits.receive), list(splits.send), group=self.group, async_op=True
        )
        return PendingExchange(received, sent, work)
