"""kernel_cache.py without the package: what it enumerates, what it calls on tensors without memory,
what it tells the package and the user."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.executor.kernels.fa4 import PINNED_VERSION
from megatron_libra.plan.heads import HeadPartition

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "kernel_cache.py"
LAYERS = [(32, 4, 128), (128, 16, 256), (128, 4, 256), (8, 8, 64)]


@pytest.fixture(scope="module")
def script() -> types.ModuleType:
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("kernel_cache", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Calls of a stand-in for the package, in order; environment variables come back."""
    seen: list[dict[str, Any]] = []

    def forward(q: Any, k: Any, v: Any, **options: Any) -> tuple[Any, ...]:
        seen.append({"q": q, "k": k, "v": v} | options)
        return torch.empty_like(q), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32), None

    def backward(q: Any, k: Any, v: Any, out: Any, dout: Any, lse: Any, **options: Any) -> Any:
        seen.append({"q": q, "k": k, "v": v, "dout": dout, "lse": lse} | options)
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)

    module = types.ModuleType("flash_attn.cute.interface")
    vars(module).update(_flash_attn_fwd=forward, _flash_attn_bwd=backward)
    for name in ("flash_attn", "flash_attn.cute"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(importlib.metadata, "version", lambda name: PINNED_VERSION)
    monkeypatch.setattr(os, "environ", dict(os.environ))
    return seen


@pytest.mark.parametrize("layer", LAYERS)
def test_every_call_of_every_split_is_covered(
    script: types.ModuleType, layer: tuple[int, int, int]
) -> None:
    """Chunks of the exchanged part and whole shards of the local part, for every H and M."""
    query_heads, kv_heads, head_dim = layer
    shape = AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)
    specs = script.specializations([shape], ["bf16"], [False])
    ratios = {spec.ratio for spec in specs}
    needed = set()
    for head_split in (1, 2, 4, 8, 16, 32, 64, 128):
        for chunks in (1, 2, 4, 8):
            try:
                LibraConfig(head_split=head_split, chunks=chunks).check_shape(shape)
            except ValueError:  # does not cut these heads
                continue
            heads = HeadPartition(query_heads, kv_heads, head_split=head_split, chunks=chunks)
            needed.add(heads.query_heads_per_chunk // heads.kv_heads_per_chunk)
            needed.add(query_heads // head_split // heads.kv_heads_per_shard)
    assert ratios == needed
    assert len(specs) == 2 * len(ratios)  # up to 256 entries, and more


def test_usual_calls_come_first(script: types.ModuleType) -> None:
    shapes = [AttentionShape(query_heads=8, kv_heads=2, head_dim=d) for d in (64, 128)]
    specs = script.specializations(shapes, ["bf16"], [False, True])
    order = [(s.deterministic, s.many_entries, s.ratio, s.head_dim) for s in specs]
    assert order[:3] == [(False, False, 4, 64), (False, False, 4, 128), (False, False, 2, 64)]
    assert len(set(order)) == len(order) == 2 * 2 * 3 * 2


@pytest.mark.parametrize("many", [False, True])
def test_the_calls_that_are_compiled(
    script: types.ModuleType, calls: list[dict[str, Any]], many: bool
) -> None:
    spec = script.Specialization(128, 4, many, True, "fp16")
    assert script.compile_one(spec) > 0
    forward, backward = calls
    for call in calls:
        assert call["q"].shape[1:] == (8, 128) and call["k"].shape[1:] == (2, 128)
        assert call["q"].dtype == torch.float16 and call["q"].device.type == "cuda"
        assert (len(call["cu_seqlens_q"]) - 1 > 256) is many
        assert call["cu_seqlens_k"].dtype == torch.int32 and call["causal"] is True
        assert min(call["max_seqlen_q"], call["max_seqlen_k"]) > 192
    assert forward["return_lse"] is True and backward["deterministic"] is True


def test_command(
    script: types.ModuleType,
    calls: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "cache"
    (out / "digest").mkdir(parents=True)
    (out / "digest" / "kernel.o").write_bytes(b"x" * 1_500_000)
    argv = ["kernel_cache.py", "--out", str(out), "--heads", "4,1,64", "--deterministic", "both"]
    monkeypatch.setattr(sys, "argv", argv)
    script.main()
    assert len(calls) == 2 * 12  # ratios 4, 2, 1; few and many entries; both backwards
    assert os.environ["FLASH_ATTENTION_ARCH"] == "sm_90" and os.environ["CUTE_DSL_ARCH"] == "sm_90a"
    printed = capsys.readouterr().out
    assert "1/12" in printed and "d 64, 4 query heads for each kv head, bf16" in printed
    assert "1 kernel files, 1.5 MB." in printed
    assert printed.endswith(
        "export FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED=1\n"
        f"export FLASH_ATTENTION_CUTE_DSL_CACHE_DIR={out}\n"
    )


@pytest.mark.parametrize(
    ("heads", "message"),
    [
        ("32,4", "not like 32,4,128"),
        ("a,b,c", "not like"),
        ("32,5,128", "kv_heads .5. must divide"),
    ],
)
def test_bad_heads(
    script: types.ModuleType, heads: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        script.arguments(["--out", "x", "--heads", heads])
    assert re.search(message, capsys.readouterr().err)


def test_without_the_package(
    script: types.ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(name: str) -> str:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", missing)
    argv = ["kernel_cache.py", "--out", str(tmp_path), "--heads", "4,1,64"]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(SystemExit, match=r"fa4: not installed, pip install -e '\.\[fa4\]'"):
        script.main()
