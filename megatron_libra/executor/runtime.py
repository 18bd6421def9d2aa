"""What the executor of one pool needs besides plans: two transports, a kernel, a device, the
choices.

In: PoolGroups and LibraConfig. Out: PoolRuntime, made once for each process and shared by all
layers.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_libra.config import LibraConfig
from megatron_libra.executor.groups import PoolGroups
from megatron_libra.executor.kernels import AttentionKernel, pick_kernel
from megatron_libra.executor.transport import Transport
from megatron_libra.executor.transport.pick import pick_transports

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
    """Build the runtime of this worker. Collective: every worker of the pool calls it, as often;
    on CUDA they tell each other which GPUs they have.

    Raises:
        ValueError: the kernel or the transport that config asks for cannot run here.
    """
    device = torch.device(device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    kernel = pick_kernel(
        config.kernel,
        device=device,
        dtype=dtype,
        head_dim=head_dim,
        deterministic=config.deterministic,
    )
    dispatch, return_ = pick_transports(config.transport, groups, device)
    return PoolRuntime(dispatch, return_, kernel, device, config)
