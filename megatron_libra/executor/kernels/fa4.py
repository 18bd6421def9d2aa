"""FlashAttention-4 (CuTe DSL), the fastest kernel on Hopper and datacenter Blackwell; unmodified.

In: rows of one round, strided views are fine. Out: see `interface`. The package compiles a kernel
when it is first called with a new specialization (seconds; `scripts/kernel_cache.py` does it
beforehand, without a GPU). The same kernel comes compiled twice where a hint says that an entry
fits one block, so hints are raised above a block: head dim, heads per kv head, dtype, determinism
and "more than 256 entries" are all that is specialized.

Copies: none on Hopper, as long as rows start at multiples of 16 bytes (whole heads of an aligned
buffer do) and so do lse and both boundary tensors; the package clones what is not aligned. Its
backward holds dq (query heads), dk and dv (kv heads) once in float32.
"""

from __future__ import annotations

import importlib
import importlib.metadata
from collections.abc import Callable
from typing import Any

import torch

from megatron_libra.executor.kernels.device import compute_capability
from megatron_libra.executor.kernels.interface import BoundRound, KernelUnavailable
from megatron_libra.extras import install_hint
from megatron_libra.plan.worker_plan import Round

__all__ = ["PINNED_VERSION", "Fa4Kernel", "check_version", "offer_fa4"]

PACKAGE = "flash-attn-4"
PINNED_VERSION = "4.0.0b36"
"""Only pre-releases exist and their private calls change; this one was tested."""
INSTALL = install_hint("fa4")

INT32_MAX = 2**31 - 1
LARGEST_BLOCK = 128
"""Most rows that an entry is padded to in the float32 buffers of backward."""
SMALLEST_BLOCK = 48
LEAST_HINT = 256
"""Above every block of every specialization (192 queries is the largest)."""
HEAD_DIM_BLOCK = 64
"""Float32 buffers round the head dim up to this at most."""


class Fa4Kernel:
    """See module docstring. Satisfies AttentionKernel."""

    name = "fa4"

    def __init__(self, *, deterministic: bool = False) -> None:
        self.deterministic = deterministic
        self._forward, self._backward = _load()

    def prepare(self, plan_round: Round, device: torch.device) -> tuple[int, int]:
        """Hints for the longest entry, in queries and keys. Plain ints: they are part of a
        key."""
        return (
            max(int(plan_round.max_queries), LEAST_HINT),
            max(int(plan_round.max_keys), LEAST_HINT),
        )

    def check_sizes(
        self, plan_round: Round, query_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        """Raise ValueError when a number that the kernels count in int32 passes 2^31 - 1: elements
        of one head's float32 sums, rows that the query heads of one kv head make together, locks of
        the ordered backward. Offsets between heads have 64 bits."""
        entries = len(plan_round.cu_queries)
        query_rows = plan_round.query_stop - plan_round.query_start
        key_rows = plan_round.key_stop - plan_round.key_start
        width = -(-head_dim // HEAD_DIM_BLOCK) * HEAD_DIM_BLOCK
        rows = max(query_rows, key_rows) + LARGEST_BLOCK * entries
        count = rows * max(width, query_heads // kv_heads)
        if self.deterministic:
            max_queries, max_keys = self.prepare(plan_round, torch.device("cpu"))
            blocks = max(query_heads * max_queries, 2 * kv_heads * max_keys) // SMALLEST_BLOCK + 1
            count = max(count, entries * blocks)
        if count > INT32_MAX:
            raise ValueError(
                f"one attention call would count to {count}, but fa4 counts to {INT32_MAX}; use a "
                "larger pool, a larger context parallel size or a larger head_split (H)."
            )

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
        max_queries, max_keys = bound_round.prepared
        results = self._forward(
            q,
            k,
            v,
            cu_seqlens_q=bound_round.cu_queries,
            cu_seqlens_k=bound_round.cu_keys,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            softmax_scale=scale,
            causal=True,
            return_lse=True,
            out=out,
        )
        return results[0], results[1]  # the tuple has grown between pre-releases

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
        """See AttentionKernel.backward. Every row of dk and dv is written: the float32 sums start
        at zero and are converted entry by entry, fillers included."""
        max_queries, max_keys = bound_round.prepared
        results = self._backward(
            q,
            k,
            v,
            out,
            dout,
            lse,
            softmax_scale=scale,
            causal=True,
            cu_seqlens_q=bound_round.cu_queries,
            cu_seqlens_k=bound_round.cu_keys,
            max_seqlen_q=max_queries,
            max_seqlen_k=max_keys,
            deterministic=self.deterministic,
            dq=dq,
            dk=dk,
            dv=dv,
        )
        return results[0], results[1], results[2]


def offer_fa4(device: torch.device, head_dim: int, deterministic: bool) -> Fa4Kernel:
    """The kernel for this device. Imports the package (seconds) if nothing is in the way.

    Raises:
        KernelUnavailable: it cannot run here.
    """
    check_hardware(compute_capability(device), head_dim)
    check_version()
    try:
        return Fa4Kernel(deterministic=deterministic)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:  # a library below it
        reason = f"cannot be imported ({str(error) or type(error).__name__}), {INSTALL}"
        raise KernelUnavailable(reason) from error


def check_hardware(capability: tuple[int, int], head_dim: int) -> None:
    """Raise KernelUnavailable beyond what the package takes forward and backward (its own
    _validate_head_dims)."""
    major, minor = capability
    if major not in (9, 10, 11):
        raise KernelUnavailable(f"needs compute capability 9, 10 or 11, not {major}.{minor}")
    most = "at most 256" if major == 9 else "at most 128 or just 256"
    if head_dim % 8 or head_dim > 256 or (major > 9 and 128 < head_dim < 256):
        raise KernelUnavailable(f"needs a head_dim that 8 divides, {most}, not {head_dim}")


def check_version() -> None:
    """Raise KernelUnavailable unless the pinned version is installed."""
    try:
        version = importlib.metadata.version(PACKAGE)
    except importlib.metadata.PackageNotFoundError:
        raise KernelUnavailable(f"not installed, {INSTALL}") from None
    if version != PINNED_VERSION:
        raise KernelUnavailable(f"needs {PACKAGE} {PINNED_VERSION}, not {version}, {INSTALL}")


def _load() -> tuple[Callable[..., Any], Callable[..., Any]]:
    """The package's forward and backward. Imported here: it takes seconds and a GPU stack."""
    interface = importlib.import_module("flash_attn.cute.interface")
    return interface._flash_attn_fwd, interface._flash_attn_bwd
