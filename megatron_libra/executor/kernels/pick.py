"""Choose the attention kernel for a device and a dtype. In: the wish (LibraConfig.kernel). Out: a
kernel or an error; the log says which, and why better ones were passed over."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import lru_cache

import torch

from megatron_libra.config import CHOICES
from megatron_libra.executor.kernels.fa4 import offer_fa4
from megatron_libra.executor.kernels.flash_attn import offer_flash_attn
from megatron_libra.executor.kernels.interface import AttentionKernel, KernelUnavailable
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.executor.kernels.torch_flash import offer_torch_flash

__all__ = ["BEST_FIRST", "pick_kernel"]

logger = logging.getLogger(__name__)

HALF = (torch.bfloat16, torch.float16)
BEST_FIRST: dict[str, Callable[[torch.device, int, bool], AttentionKernel]] = {
    "fa4": offer_fa4,
    "flash_attn": offer_flash_attn,
    "torch_flash": offer_torch_flash,
}
"""Kernels for half precision on CUDA: name -> offer(device, head_dim, deterministic)."""


def pick_kernel(
    wish: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    head_dim: int,
    deterministic: bool = False,
) -> AttentionKernel:
    """Return the kernel that is asked for. `auto` is the best of BEST_FIRST that can run on CUDA,
    and reference on the CPU. Local: every process picks for its own device.

    Raises:
        ValueError: the wish cannot be met here; the message names the way out. Nothing is replaced
            silently.
    """
    if wish not in CHOICES["kernel"]:
        raise ValueError(f"kernel ({wish!r}) must be one of {', '.join(CHOICES['kernel'])}.")
    if wish == "reference" or (wish == "auto" and device.type == "cpu"):
        return _picked(ReferenceKernel(), [])
    problem = _input_problem(wish, device, dtype)
    passed_over: list[str] = [problem] if problem else []
    candidates = () if problem else (tuple(BEST_FIRST) if wish == "auto" else (wish,))
    for name in candidates:
        try:
            return _picked(BEST_FIRST[name](device, head_dim, deterministic), passed_over)
        except KernelUnavailable as reason:
            passed_over.append(f"{name}: {reason}")
    raise ValueError(
        f"kernel ({wish}): {'; '.join(passed_over)}; or ask for kernel=reference (slow)."
    )


def _input_problem(wish: str, device: torch.device, dtype: torch.dtype) -> str | None:
    """What no kernel of BEST_FIRST takes, with the way out."""
    if device.type != "cuda":
        return f"{wish} needs a CUDA device, not {device.type}; try kernel=auto"
    if dtype not in HALF:
        needed = "bfloat16 or float16"
        return f"needs {needed}, not {str(dtype).removeprefix('torch.')}; try --bf16"
    return None


def _picked(kernel: AttentionKernel, passed_over: list[str]) -> AttentionKernel:
    _log_once(f"kernel {kernel.name}" + (f" ({'; '.join(passed_over)})" if passed_over else ""))
    return kernel


@lru_cache
def _log_once(message: str) -> None:
    """Every pool of a process picks the same kernel: one line is enough."""
    logger.info(message)
