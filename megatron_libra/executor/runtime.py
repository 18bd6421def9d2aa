"""What the executor of one pool needs besides plans: two transports, a kernel, a device, the
choices.

In: PoolGroups and LibraConfig. Out: PoolRuntime, made once for each process and shared by all
layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist

from megatron_libra.config import LibraConfig
from megatron_libra.executor.groups import PoolGroups
from megatron_libra.executor.kernels import AttentionKernel, pick_kernel
from megatron_libra.executor.transport import AllToAllTransport, LoopbackTransport, Transport

__all__ = ["PoolRuntime", "pool_runtime"]


@dataclass(frozen=True, slots=True, eq=False)
class PoolRuntime:
    """The fixed parts of a pool's executor."""

    dispatch: Transport
    """Home -> worker that computes."""
    return_: Transport
    """Worker that computes -> home."""
    kernel: AttentionKernel
    device: torch.device
    config: LibraConfig


def pool_runtime(
    groups: PoolGroups,
    config: LibraConfig,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    head_dim: int,
) -> PoolRuntime:
    """Build the runtime of this worker. Local: nothing is communicated.

    Raises:
        ValueError: the kernel that config asks for cannot run here.
    """
    device = torch.device(device)
    kernel = pick_kernel(
        config.kernel,
        device=device,
        dtype=dtype,
        head_dim=head_dim,
        deterministic=config.deterministic,
    )
    return PoolRuntime(
        _transport(groups.dispatch), _transport(groups.return_), kernel, device, config
    )


def _transport(group: dist.ProcessGroup | None) -> Transport:
    return LoopbackTransport() if group is None else AllToAllTransport(group)
