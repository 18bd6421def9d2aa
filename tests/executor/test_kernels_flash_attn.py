"""FlashAttnKernel against stand-ins with the recorded signatures of flash_attn 2.7 to 2.8.3 and of
FlashAttention-3 (3.0 as tagged, and its main branch with custom ops), which compute. No GPU."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import types
from importlib.machinery import ModuleSpec
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron_libra.executor.kernels import flash_attn
from megatron_libra.executor.kernels.flash_attn import Package2, Package3, offer_flash_attn
from megatron_libra.executor.kernels.interface import KernelUnavailable, bind_round
from megatron_libra.executor.kernels.reference import ReferenceKernel
from tests.helpers.kernels import (
    make_round,
    packaged_backward,
    packaged_forward,
    strided_rows,
)

CUDA = torch.device("cuda")


def write(targets: tuple[Any, ...], values: tuple[Tensor, ...]) -> None:
    for target, value in zip(targets, values, strict=True):
        target.copy_(value)


def two() -> types.ModuleType:
    """flash_attn.flash_attn_interface of 2.7 to 2.8.3."""

    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale,
        causal, window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None,
        return_softmax=False, block_table=None, leftpad_k=None, seqused_k=None, zero_tensors=False,
    ):  # fmt: skip
        assert (max_seqlen_q, max_seqlen_k, dropout_p, causal) == (5, 9, 0.0, True)
        out, lse = packaged_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
        return out, lse, None, None

    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
        max_seqlen_k, dropout_p, softmax_scale, causal, window_size_left, window_size_right,
        softcap, alibi_slopes, deterministic, rng_state=None, zero_tensors=False,
    ):  # fmt: skip
        assert (max_seqlen_q, max_seqlen_k, dropout_p, causal) == (5, 9, 0.0, True)
        assert (window_size_left, window_size_right, softcap, alibi_slopes) == (-1, -1, 0.0, None)
        assert deterministic is True
        gradients = packaged_backward(
            dout, (q, k, v), (out, softmax_lse), cu_seqlens_q, cu_seqlens_k, softmax_scale
        )
        write((dq, dk, dv), gradients)
        return torch.empty(0)  # softmax_d

    module = types.ModuleType("flash_attn.flash_attn_interface")
    vars(module).update(
        _flash_attn_varlen_forward=_flash_attn_varlen_forward,
        _flash_attn_varlen_backward=_flash_attn_varlen_backward,
    )
    return module


def three_tagged() -> types.ModuleType:
    """flash_attn_interface of 3.0 as tagged with 2.8.3: nearly everything must be given."""

    def _flash_attn_forward(
        q, k, v, k_new, v_new, qv, out, cu_seqlens_q, cu_seqlens_k, cu_seqlens_k_new, seqused_q,
        seqused_k, max_seqlen_q, max_seqlen_k, page_table, kv_batch_idx, leftpad_k, rotary_cos,
        rotary_sin, seqlens_rotary, q_descale, k_descale, v_descale, softmax_scale, causal,
        window_size=(-1, -1), attention_chunk=0, softcap=0.0, rotary_interleaved=True,
        scheduler_metadata=None, num_splits=1, pack_gqa=None, sm_margin=0,
    ):  # fmt: skip
        assert (max_seqlen_q, max_seqlen_k, causal) == (5, 9, True)
        unused = (k_new, v_new, qv, out, cu_seqlens_k_new, seqused_q, seqused_k, page_table)
        unused += (kv_batch_idx, leftpad_k, rotary_cos, rotary_sin, seqlens_rotary)
        assert not any(x is not None for x in (*unused, q_descale, k_descale, v_descale))
        out, lse = packaged_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
        return out, lse, None, None

    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, cu_seqlens_q, cu_seqlens_k, sequed_q, sequed_k,
        max_seqlen_q, max_seqlen_k, dq, dk, dv, softmax_scale, causal, window_size=(-1, -1),
        softcap=0.0, deterministic=False, sm_margin=0,
    ):  # fmt: skip
        assert (max_seqlen_q, max_seqlen_k, causal, deterministic) == (5, 9, True, True)
        assert sequed_q is None and sequed_k is None
        gradients = packaged_backward(
            dout, (q, k, v), (out, softmax_lse), cu_seqlens_q, cu_seqlens_k, softmax_scale
        )
        write((dq, dk, dv), gradients)
        return dq, dk, dv, torch.empty(0)

    module = types.ModuleType("flash_attn_interface")
    vars(module).update(
        _flash_attn_forward=_flash_attn_forward, _flash_attn_backward=_flash_attn_backward
    )
    return module


@torch.library.custom_op("libra_stand_in::forward", mutates_args=(), device_types="cpu")
def op_forward(
    q: Tensor, k: Tensor, v: Tensor, k_new: Tensor | None = None, v_new: Tensor | None = None,
    qv: Tensor | None = None, out_: Tensor | None = None, cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None, cu_seqlens_k_new: Tensor | None = None,
    seqused_q: Tensor | None = None, seqused_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None,
    page_table: Tensor | None = None, kv_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None, rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None, seqlens_rotary: Tensor | None = None,
    q_descale: Tensor | None = None, k_descale: Tensor | None = None,
    v_descale: Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    window_size_left: int = -1, window_size_right: int = -1, attention_chunk: int = 0,
    softcap: float = 0.0, rotary_interleaved: bool = True,
    scheduler_metadata: Tensor | None = None, num_splits: int = 1, pack_gqa: bool | None = None,
    sm_margin: int = 0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """flash_attn_3::_flash_attn_forward of the main branch."""
    assert (max_seqlen_q, max_seqlen_k, causal) == (5, 9, True)
    assert cu_seqlens_q is not None and cu_seqlens_k is not None and softmax_scale is not None
    out, lse = packaged_forward(q, k, v, cu_seqlens_q, cu_seqlens_k, softmax_scale)
    return out, lse, torch.empty(0), torch.empty(0)


@torch.library.custom_op(
    "libra_stand_in::backward", mutates_args=("dq", "dk", "dv"), device_types="cpu"
)
def op_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    cu_seqlens_q: Tensor | None = None, cu_seqlens_k: Tensor | None = None,
    sequed_q: Tensor | None = None, sequed_k: Tensor | None = None,
    max_seqlen_q: int | None = None, max_seqlen_k: int | None = None, dq: Tensor | None = None,
    dk: Tensor | None = None, dv: Tensor | None = None, softmax_scale: float | None = None,
    is_causal: bool = False, window_size_left: int = -1, window_size_right: int = -1,
    softcap: float = 0.0, deterministic: bool = False, sm_margin: int = 0,
) -> Tensor:  # fmt: skip
    """flash_attn_3::_flash_attn_backward of the main branch."""
    assert (max_seqlen_q, max_seqlen_k, is_causal, deterministic) == (5, 9, True, True)
    assert cu_seqlens_q is not None and cu_seqlens_k is not None and softmax_scale is not None
    gradients = packaged_backward(
        dout, (q, k, v), (out, softmax_lse), cu_seqlens_q, cu_seqlens_k, softmax_scale
    )
    write((dq, dk, dv), gradients)
    return torch.empty(0)


def three_ops() -> types.ModuleType:
    """flash_attn_interface of the main branch."""
    module = types.ModuleType("flash_attn_interface")
    vars(module).update(_flash_attn_forward=op_forward, _flash_attn_backward=op_backward)
    return module


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is installed: module name -> module, "flash-attn" -> version; on a Hopper GPU."""
    installed: dict[str, Any] = {}
    real = importlib.metadata.version, importlib.import_module, importlib.util.find_spec

    def version(name: str) -> str:
        if name != "flash-attn":
            return real[0](name)
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    def import_module(name: str, package: str | None = None) -> types.ModuleType:
        found = installed[name] if name.startswith("flash_attn") else real[1](name, package)
        if isinstance(found, Exception):
            raise found
        return found

    def find_spec(name: str, package: str | None = None) -> ModuleSpec | None:
        if not name.startswith("flash_attn"):
            return real[2](name, package)
        return ModuleSpec(name, None) if name in installed else None

    monkeypatch.setattr(flash_attn, "compute_capability", lambda device: (9, 0))
    monkeypatch.setattr(importlib.metadata, "version", version)
    monkeypatch.setattr(importlib.util, "find_spec", find_spec)
    monkeypatch.setattr(importlib, "import_module", import_module)
    return installed


@pytest.mark.parametrize("package", [two, three_tagged, three_ops])
@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_calls(package: Any, heads: tuple[int, int], machine: dict[str, Any]) -> None:
    """Strided rows, a filler, a key start; gradients of the rows' own shape and dtype."""
    module = package()
    machine.update({module.__name__: module, "flash-attn": "2.8.3"})
    kernel = offer_flash_attn(CUDA, 8, True)
    assert type(kernel.package) is (Package2 if package is two else Package3)
    plan_round, reference = make_round([5, 0, 3], [9, 4, 3], key_start=7), ReferenceKernel()
    generator = torch.Generator().manual_seed(0)
    q, dout = (strided_rows(8, heads[0], 8, generator) for _ in range(2))
    k, v = (strided_rows(16, heads[1], 8, generator) for _ in range(2))
    expected_round = bind_round(plan_round, reference)
    out, lse = reference.forward(q, k, v, expected_round, 0.3)
    gradients = reference.backward(dout, q, k, v, out, lse, expected_round, 0.3)
    bound_round = bind_round(plan_round, kernel)
    actual_out, actual_lse = kernel.forward(q, k, v, bound_round, 0.3)
    assert torch.equal(actual_out, out) and torch.equal(actual_lse, lse)
    actual = kernel.backward(dout, q, k, v, out, lse, bound_round, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(actual, gradients, strict=True))


def test_three_comes_first_on_hopper(
    machine: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine.update(
        {"flash-attn": "2.8.3", "flash_attn.flash_attn_interface": two(),
         "flash_attn_interface": three_tagged()}
    )  # fmt: skip
    assert type(offer_flash_attn(CUDA, 128, False).package) is Package3
    assert type(offer_flash_attn(CUDA, 256, False).package) is Package3
    assert type(offer_flash_attn(CUDA, 256, True).package) is Package2  # has no ordered backward
    flags = {"build_flags": {"FLASHATTENTION_DISABLE_BACKWARD": True}}
    machine["flash_attn_config"] = types.SimpleNamespace(CONFIG=flags)
    assert type(offer_flash_attn(CUDA, 128, False).package) is Package2
    del machine["flash_attn_config"]
    monkeypatch.setattr(flash_attn, "compute_capability", lambda device: (8, 0))
    assert type(offer_flash_attn(CUDA, 128, False).package) is Package2


@pytest.mark.parametrize(
    ("installed", "head_dim", "reason"),
    [
        ({}, 128, r"^not installed, pip install flash-attn$"),
        ({"flash-attn": "2.6.3"}, 128, "flash_attn 2.6.3 is older than 2.7"),
        ({"flash-attn": "2.8.3"}, 130, "8 divides, at most 256, not 130"),
        ({"flash-attn": "2.8.3", "flash_attn.flash_attn_interface": OSError("undefined symbol")},
         128, "cannot be imported .undefined symbol"),
        ({"flash-attn": "2.8.3", "flash_attn.flash_attn_interface": types.ModuleType("x")},
         128, "other calls than expected .*_flash_attn_varlen_forward"),
    ],
)  # fmt: skip
def test_refusals(
    installed: dict[str, Any], head_dim: int, reason: str, machine: dict[str, Any]
) -> None:
    machine.update(installed)
    with pytest.raises(KernelUnavailable, match=reason):
        offer_flash_attn(CUDA, head_dim, False)
