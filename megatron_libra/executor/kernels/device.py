"""What a CUDA device can do. In: a device. Out: facts that the kernels' own checks ask for."""

from __future__ import annotations

import torch

from megatron_libra.executor.kernels.interface import KernelUnavailable

__all__ = ["compute_capability"]


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Major and minor, (9, 0) for Hopper.

    Raises:
        KernelUnavailable: there is no CUDA device here.
    """
    if not torch.cuda.is_available():
        raise KernelUnavailable("needs a CUDA device; none found")
    major, minor = torch.cuda.get_device_capability(device)
    return major, minor
