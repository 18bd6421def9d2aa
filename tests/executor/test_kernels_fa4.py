"""Fa4Kernel against a stand-in for its package: what it passes on, what it takes back, what it
refuses. On a GPU: test_gpu_kernels.py."""

from __future__ import annotations

import importlib.metadata
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_libra.executor.kernels import fa4
from megatron_libra.executor.kernels.interface import KernelUnavailable, bind_round
from megatron_libra.executor.kernels.reference import ReferenceKernel
from tests.helpers.kernels import (
    make_round,
    packaged_backward,
    packaged_forward,
    strided_rows,
)

ROOT = Path(__file__).resolve().parents[2]


def fake_forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
    """As 4.0.0b36: five results; without return_lse the second is None."""
    assert options.pop("causal") is True and options.pop("return_lse") is True
    hints = options.pop("max_seqlen_q"), options.pop("max_seqlen_k")
    assert all(type(hint) is int and hint > 192 for hint in hints), hints
    cu_queries, cu_keys = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
    target = options.pop("out")
    out, lse = packaged_forward(q, k, v, cu_queries, cu_keys, options.pop("softmax_scale"))
    assert not options
    out = out if target is None else target.copy_(out)
    return out, lse, None, None, None


def fake_backward(
    q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **options: Any
) -> tuple[Any, ...]:
    """As 4.0.0b36: dout comes after out."""
    assert options.pop("causal") is True and options.pop("deterministic") is True
    hints = options.pop("max_seqlen_q"), options.pop("max_seqlen_k")
    assert all(type(hint) is int and hint > 192 for hint in hints), hints
    cu_queries, cu_keys = options.pop("cu_seqlens_q"), options.pop("cu_seqlens_k")
    scale = options.pop("softmax_scale")
    targets = [options.pop(name) for name in ("dq", "dk", "dv")]
    assert not options
    made = packaged_backward(dout, (q, k, v), (out, lse), cu_queries, cu_keys, scale)
    return tuple(
        x if target is None else target.copy_(x) for x, target in zip(made, targets, strict=True)
    )


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """flash_attn.cute.interface, installed in the pinned version, on a Hopper GPU."""
    module = types.ModuleType("flash_attn.cute.interface")
    module._flash_attn_fwd, module._flash_attn_bwd = fake_forward, fake_backward  # type: ignore
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: fa4.PINNED_VERSION)
    monkeypatch.setattr(fa4, "compute_capability", lambda device: (9, 0))
    return module


@pytest.mark.parametrize("heads", [(4, 4), (8, 2)])
def test_calls(package: types.ModuleType, heads: tuple[int, int]) -> None:
    """Strided rows, a filler, a key start; hints above every block although entries are short."""
    kernel = fa4.offer_fa4(torch.device("cuda"), 8, True)
    reference = ReferenceKernel()
    plan_round = make_round([5, 0, 3], [9, 4, 3], key_start=7)
    generator = torch.Generator().manual_seed(0)
    q, dout = (strided_rows(8, heads[0], 8, generator) for _ in range(2))
    k, v = (strided_rows(23, heads[1], 8, generator)[plan_round.key_start :] for _ in range(2))
    expected_round = bind_round(plan_round, reference)
    out, lse = reference.forward(q, k, v, expected_round, 0.3)
    gradients = reference.backward(dout, q, k, v, out, lse, expected_round, 0.3)
    bound_round = bind_round(plan_round, kernel)
    assert bound_round.keys == slice(7, 23) and bound_round.queries == slice(0, 8)
    actual_out, actual_lse = kernel.forward(q, k, v, bound_round, 0.3)
    assert torch.equal(actual_out, out) and torch.equal(actual_lse, lse)
    actual = kernel.backward(dout, q, k, v, out, lse, bound_round, 0.3)
    assert all(torch.equal(a, b) for a, b in zip(actual, gradients, strict=True))
    strided = [torch.empty(len(x), 2, *x.shape[1:], dtype=x.dtype)[:, 1] for x in (q, q, k, v)]
    kernel.forward(q, k, v, bound_round, 0.3, out=strided[0])
    names = dict(zip(("dq", "dk", "dv"), strided[1:], strict=True))
    kernel.backward(dout, q, k, v, out, lse, bound_round, 0.3, **names)
    assert all(torch.equal(a, b) for a, b in zip(strided, (out, *gradients), strict=True))


def test_hints_follow_long_entries() -> None:
    kernel = object.__new__(fa4.Fa4Kernel)  # prepare needs no package
    plan_round = make_round([300, 2], [5000, 2])
    assert kernel.prepare(plan_round, torch.device("cpu")) == (300, 5000)


@pytest.mark.parametrize(
    ("capability", "head_dim", "reason"),
    [
        ((8, 0), 128, "compute capability 9, 10 or 11, not 8.0"),
        ((12, 0), 128, "compute capability 9, 10 or 11, not 12.0"),
        ((9, 0), 100, "8 divides, at most 256, not 100"),
        ((9, 0), 264, "8 divides, at most 256, not 264"),
        ((10, 0), 192, "at most 128 or just 256, not 192"),
    ],
)
def test_refused_hardware(capability: tuple[int, int], head_dim: int, reason: str) -> None:
    with pytest.raises(KernelUnavailable, match=reason):
        fa4.check_hardware(capability, head_dim)


@pytest.mark.parametrize(("capability", "head_dim"), [((9, 0), 192), ((10, 0), 256), ((10, 3), 96)])
def test_accepted_hardware(capability: tuple[int, int], head_dim: int) -> None:
    fa4.check_hardware(capability, head_dim)


def test_other_version(package: types.ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.0.0b35")
    with pytest.raises(KernelUnavailable, match="needs flash-attn-4 4.0.0b36, not 4.0.0b35, pip"):
        fa4.offer_fa4(torch.device("cuda"), 128, False)


def test_broken_package(package: types.ModuleType) -> None:
    """Installed, but its calls have other names; or nothing below it."""
    del package._flash_attn_bwd
    with pytest.raises(KernelUnavailable, match="cannot be imported .*_flash_attn_bwd"):
        fa4.offer_fa4(torch.device("cuda"), 128, False)


def test_sizes_are_counted_for_one_head(package: types.ModuleType) -> None:
    """8 million rows of 256 elements fit however many heads there are; 9 million do not. The
    ordered backward has locks for each entry, head and block."""
    free, ordered = fa4.Fa4Kernel(), fa4.Fa4Kernel(deterministic=True)
    free.check_sizes(make_round([1], [8_000_000]), 128, 16, 256)
    with pytest.raises(ValueError, match="larger pool"):
        free.check_sizes(make_round([1], [9_000_000]), 16, 16, 256)
    many = make_round([100_000, *[10] * 9999], [100_000, *[10] * 9999])
    free.check_sizes(many, 128, 16, 128)
    with pytest.raises(ValueError, match="head_split"):
        ordered.check_sizes(many, 128, 16, 128)


def test_the_extra_pins_the_same_version() -> None:
    assert f'"flash-attn-4=={fa4.PINNED_VERSION}"' in (ROOT / "setup.py").read_text()
