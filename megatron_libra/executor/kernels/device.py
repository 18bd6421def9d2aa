"""What a CUDA device can do. In: a device. Out: facts that the kernels' own checks ask for."""

from __future__ import annotations

import torch

__all__ = ["compute_capability"]


def compute_capability(device: torch.device) -> tuple[int, int]:
    """Major and minor, (9, 0) for Hopper; (0, 0) if there is no such CUDA device here."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return 0, 0
    return torch.cuda.get_device_capability(device)
