"""Torch's built-in varlen FlashAttention-2, unmodified (CUDA, bfloat16 and float16).

In: rows of one round, strided views are fine. Out: see `interface`. Bottom-right causal, grouped
query heads and zero-query fillers are the kernel's own behaviour. Its backward adds dq with
atomics, so bits differ from run to run unless `deterministic` asks torch for the slower ordered
sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron_libra.executor.kernels.device import compute_capability
from megatron_libra.executor.kernels.interface import BoundRound, KernelUnavailable, written
from megatron_libra.plan.worker_plan import Round

__all__ = [
    "MAX_HEAD_DIM",
    "OLDEST_MAJOR",
    "TorchFlashKernel",
    "check_flash2_sizes",
    "offer_torch_flash",
]

INT32_MAX = 2**31 - 1
MAX_HEAD_DIM = 256
OLDEST_MAJOR = 8
"""Compute capability of the first GPUs with FlashAttention-2 (Ampere)."""
KERNEL_BLOCK = 128
"""Rows that the kernel pads every entry to in its float32 dq buffer."""


class TorchFlashKernel:
    """See module docstring. Satisfies AttentionKernel."""

    name = "torch_flash"

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic

    def prepare(self, plan_round: Round, device: torch.device) -> None:
        """Nothing to prepare: the kernel reads cu_queries and cu_keys on the device."""

    def check_sizes(
        self, plan_round: Round, query_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        """Raise ValueError when a buffer of the call has more than 2^31 - 1 elements."""
        check_flash2_sizes(self.name, plan_round, query_heads, head_dim)

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        bound_round: BoundRound,
        scale: float,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See AttentionKernel.forward."""
        made, lse, *_ = torch.ops.aten._flash_attention_forward(
            q, k, v, bound_round.cu_queries, bound_round.cu_keys, bound_round.max_queries,
            bound_round.max_keys, 0.0, True, False, scale=scale,
        )  # fmt: skip
        return written(made, out), lse

    def backward(
        self,
        dout: torch.Tensor,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor,
        bound_round: BoundRound,
        scale: float,
        *,
        dq: torch.Tensor | None = None,
        dk: torch.Tensor | None = None,
        dv: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """See AttentionKernel.backward."""
        # without dropout the random state is a placeholder that the kernel never reads
        random_state = torch.empty(2, dtype=torch.uint64, device=q.device)
        with _ordered_sums(self.deterministic):
            made = torch.ops.aten._flash_attention_backward(
                dout, q, k, v, out, lse, bound_round.cu_queries, bound_round.cu_keys,
                bound_round.max_queries, bound_round.max_keys, 0.0, True, random_state,
                random_state, scale=scale,
            )  # fmt: skip
        return written(made[0], dq), written(made[1], dk), written(made[2], dv)


def offer_torch_flash(device: torch.device, head_dim: int, deterministic: bool) -> TorchFlashKernel:
    """The kernel for this device.

    Raises:
        KernelUnavailable: it cannot run here.
    """
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise KernelUnavailable(
            f"needs a head_dim that 8 divides, at most {MAX_HEAD_DIM}, not {head_dim}"
        )
    major, minor = compute_capability(device)
    if major < OLDEST_MAJOR:
        raise KernelUnavailable(
            f"needs compute capability {OLDEST_MAJOR} or newer, not {major}.{minor}"
        )
    return TorchFlashKernel(deterministic=deterministic)


def check_flash2_sizes(name: str, plan_round: Round, query_heads: int, head_dim: int) -> None:
    """Raise ValueError when a buffer of a FlashAttention-2 call has more than 2^31 - 1 elements."""
    entries = len(plan_round.cu_queries) - 1
    width = query_heads * (-(-head_dim // 32) * 32)
    # backward expands dk and dv to the query heads, so keys count with query_heads too
    rows = max(
        plan_round.query_stop - plan_round.query_start,
        plan_round.key_stop - plan_round.key_start,
    )
    elements = (rows + KERNEL_BLOCK * entries) * width
    if elements > INT32_MAX:
        raise ValueError(
            f"one attention call would hold {elements} elements, but {name} indexes up to "
            f"{INT32_MAX}; raise chunks (M) or head_split (H), or use a larger pool."
        )


@contextmanager
def _ordered_sums(wanted: bool) -> Iterator[None]:
    """Torch's flash backward reads this global switch when it is called, and nothing else asks it
    for order."""
    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    if not wanted or (before and not warn_only):
        yield
        return
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before, warn_only=warn_only)
