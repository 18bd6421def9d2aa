"""Choose the attention kernel for a device and a dtype. In: the wish (LibraConfig.kernel). Out: a
kernel or an error."""

from __future__ import annotations

import torch

from megatron_libra.executor.kernels.interface import AttentionKernel
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.executor.kernels.torch_flash import TorchFlashKernel

__all__ = ["pick_kernel"]

HALF = (torch.bfloat16, torch.float16)
MAX_FLASH_HEAD_DIM = 256


def pick_kernel(
    wish: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool = False,
) -> AttentionKernel:
    """Return the kernel that is asked for. `auto` is torch_flash on CUDA and reference on the CPU.

    Raises:
        ValueError: the wish cannot be met here; the message names the way out. Nothing is replaced
            silently.
    """
    if wish == "reference" or (wish == "auto" and device.type == "cpu"):
        return ReferenceKernel()
    if wish not in ("auto", "torch_flash"):
        raise ValueError(f"kernel ({wish!r}) must be one of auto, reference, torch_flash.")
    problem = _flash_problem(device, dtype, head_dim)
    if problem:
        raise ValueError(
            f"kernel ({wish}): torch_flash {problem}; or ask for kernel=reference (slow)."
        )
    return TorchFlashKernel(deterministic=deterministic)


def _flash_problem(device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why torch's FlashAttention cannot run, with the way out; None if it can."""
    if device.type != "cuda":
        return f"needs a CUDA device, not {device.type}; try kernel=auto"
    if dtype not in HALF:
        return f"needs bfloat16 or float16, not {str(dtype).removeprefix('torch.')}; try --bf16"
    if head_dim % 8 or head_dim > MAX_FLASH_HEAD_DIM:
        return f"needs a head_dim that 8 divides, at most {MAX_FLASH_HEAD_DIM}, not {head_dim}"
    return None
