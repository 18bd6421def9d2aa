"""The `flash_attn` package, 2.7 or newer, or FlashAttention-3, if the user's image has one.

In: rows of one round, strided views are fine. Out: see `interface`. FlashAttention-3 is taken on
Hopper if it is there with its backward. The split calls differ by version; the two Package classes
hide that, and nothing else knows. Tested against the recorded signatures of 2.7 to 2.8.3 and of
both forms of 3.0 with stand-ins that compute, only: it has never run on a GPU.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import re
from collections.abc import Callable
from types import ModuleType
from typing import Any, Protocol

import torch

from megatron_libra.executor.kernels.device import compute_capability
from megatron_libra.executor.kernels.interface import BoundRound, KernelUnavailable, written
from megatron_libra.executor.kernels.torch_flash import (
    MAX_HEAD_DIM,
    OLDEST_MAJOR,
    check_flash2_sizes,
)
from megatron_libra.plan.worker_plan import Round

__all__ = ["FlashAttnKernel", "offer_flash_attn"]

INSTALL = "pip install flash-attn"
OLDEST = (2, 7)
"""Before it, lse was padded and the calls took other arguments."""
LARGEST_ORDERED_HEAD_DIM_3 = 192
"""FlashAttention-3 has no deterministic backward above it."""

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Package(Protocol):
    """The split calls of one package, made alike."""

    def forward(
        self, qkv: Triple, bound_round: BoundRound, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return out and lse (N, T)."""

    def backward(
        self,
        dout: torch.Tensor,
        qkv: Triple,
        results: tuple[torch.Tensor, torch.Tensor],
        gradients: Triple,
        bound_round: BoundRound,
        scale: float,
        deterministic: bool,
    ) -> None:
        """Write dq, dk, dv; results are out and lse."""


class Package2:
    """flash_attn 2.7 and newer."""

    def __init__(self, module: ModuleType) -> None:
        self._forward = module._flash_attn_varlen_forward
        self._backward = module._flash_attn_varlen_backward

    def forward(
        self, qkv: Triple, bound_round: BoundRound, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Package.forward."""
        r = bound_round
        out, lse, *_ = self._forward(
            *qkv, r.cu_queries, r.cu_keys, r.max_queries, r.max_keys, 0.0, scale, True
        )
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        qkv: Triple,
        results: tuple[torch.Tensor, torch.Tensor],
        gradients: Triple,
        bound_round: BoundRound,
        scale: float,
        deterministic: bool,
    ) -> None:
        """See Package.backward."""
        r, window, softcap, alibi_slopes = bound_round, (-1, -1), 0.0, None
        self._backward(
            dout, *qkv, *results, *gradients, r.cu_queries, r.cu_keys, r.max_queries, r.max_keys,
            0.0, scale, True, *window, softcap, alibi_slopes, deterministic,
        )  # fmt: skip


class Package3:
    """FlashAttention-3: functions that want every argument (3.0 as tagged) or custom ops with
    defaults (its main branch)."""

    def __init__(self, module: ModuleType) -> None:
        self._forward = module._flash_attn_forward
        self._backward = module._flash_attn_backward
        self._forward_unused = _required(self._forward)
        self._backward_unused = _required(self._backward)
        self._causal = "causal" if "causal" in self._backward_unused else "is_causal"

    def forward(
        self, qkv: Triple, bound_round: BoundRound, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See Package.forward."""
        arguments = dict(zip("qkv", qkv, strict=True), softmax_scale=scale, causal=True)
        out, lse, *_ = self._forward(
            **{**self._forward_unused, **arguments, **_entries(bound_round)}
        )
        return out, lse

    def backward(
        self,
        dout: torch.Tensor,
        qkv: Triple,
        results: tuple[torch.Tensor, torch.Tensor],
        gradients: Triple,
        bound_round: BoundRound,
        scale: float,
        deterministic: bool,
    ) -> None:
        """See Package.backward."""
        names = ("q", "k", "v", "out", "softmax_lse", "dq", "dk", "dv")
        arguments = dict(zip(names, (*qkv, *results, *gradients), strict=True))
        arguments |= {"dout": dout, "softmax_scale": scale, self._causal: True}
        self._backward(
            **{**self._backward_unused, **arguments, **_entries(bound_round)},
            deterministic=deterministic,
        )


def _entries(bound_round: BoundRound) -> dict[str, Any]:
    return {
        "cu_seqlens_q": bound_round.cu_queries,
        "cu_seqlens_k": bound_round.cu_keys,
        "max_seqlen_q": bound_round.max_queries,
        "max_seqlen_k": bound_round.max_keys,
    }


def _required(function: Callable[..., Any]) -> dict[str, None]:
    """None for every argument without a default. Custom ops show no arguments: theirs have all."""
    return {
        name: None
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty
        and parameter.kind is parameter.POSITIONAL_OR_KEYWORD
    }


class FlashAttnKernel:
    """See module docstring. Satisfies AttentionKernel."""

    name = "flash_attn"

    def __init__(self, package: Package, *, deterministic: bool = False) -> None:
        self.package = package
        self.deterministic = deterministic

    def prepare(self, plan_round: Round, device: torch.device) -> None:
        """Nothing to prepare: the kernel reads cu_queries and cu_keys on the device."""

    def check_sizes(
        self, plan_round: Round, query_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        """Raise ValueError when a buffer of the call has more than 2^31 - 1 elements (the rule of
        FlashAttention-2; the other is no stricter)."""
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
        made, lse = self.package.forward((q, k, v), bound_round, scale)
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
        gradients = tuple(
            torch.empty_like(like) if target is None else target
            for like, target in ((q, dq), (k, dk), (v, dv))
        )
        self.package.backward(
            dout, (q, k, v), (out, lse), gradients, bound_round, scale, self.deterministic
        )
        return gradients


def offer_flash_attn(device: torch.device, head_dim: int, deterministic: bool) -> FlashAttnKernel:
    """The kernel for this device, FlashAttention-3 before 2. Imports what is installed.

    Raises:
        KernelUnavailable: neither can run here.
    """
    if head_dim % 8 or head_dim > MAX_HEAD_DIM:
        raise KernelUnavailable(
            f"needs a head_dim that 8 divides, at most {MAX_HEAD_DIM}, not {head_dim}"
        )
    major, reasons = compute_capability(device)[0], []
    for find in (_find_3, _find_2):
        try:
            package = find(major, head_dim, deterministic)
            return FlashAttnKernel(package, deterministic=deterministic)
        except KernelUnavailable as reason:
            reasons.append(str(reason))
    raise KernelUnavailable("; ".join(dict.fromkeys(reasons)))


def _find_3(major: int, head_dim: int, deterministic: bool) -> Package3:
    if importlib.util.find_spec("flash_attn_interface") is None:
        raise KernelUnavailable(f"not installed, {INSTALL}")
    if major != 9:
        raise KernelUnavailable(f"FlashAttention-3 is for compute capability 9, not {major}")
    if deterministic and head_dim > LARGEST_ORDERED_HEAD_DIM_3:
        raise KernelUnavailable(f"FlashAttention-3 is not deterministic at head_dim {head_dim}")
    if importlib.util.find_spec("flash_attn_config") is not None:
        flags = _import("flash_attn_config").CONFIG["build_flags"]
        if flags.get("FLASHATTENTION_DISABLE_BACKWARD"):
            raise KernelUnavailable("this build of FlashAttention-3 has no backward")
    return _package(Package3, "flash_attn_interface")


def _find_2(major: int, head_dim: int, deterministic: bool) -> Package2:
    try:
        version = importlib.metadata.version("flash-attn")
    except importlib.metadata.PackageNotFoundError:
        raise KernelUnavailable(f"not installed, {INSTALL}") from None
    numbers = tuple(int(number) for number in re.findall(r"\d+", version)[:2])
    if numbers < OLDEST:
        raise KernelUnavailable(f"flash_attn {version} is older than 2.7, {INSTALL}")
    if major < OLDEST_MAJOR:
        raise KernelUnavailable(f"needs compute capability {OLDEST_MAJOR} or newer, not {major}")
    return _package(Package2, "flash_attn.flash_attn_interface")


def _package[P: (Package2, Package3)](kind: type[P], module: str) -> P:
    try:
        return kind(_import(module))
    except AttributeError as error:
        raise KernelUnavailable(f"{module} has other calls than expected ({error})") from error


def _import(name: str) -> ModuleType:
    """The module; a build for another torch or CUDA fails here."""
    try:
        return importlib.import_module(name)
    except (ImportError, OSError, RuntimeError) as error:
        raise KernelUnavailable(f"{name} cannot be imported ({error})") from error
