"""Pools to measure, and a layer of one worker. In: names of presets and head shapes, a plan, a
runtime. Out: lengths; a layer's forward and backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from bench_common import World

from megatron_libra import AttentionShape, LibraConfig, PoolPlan
from megatron_libra.data.corpora import CORPORA, packed_corpus
from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.bound_plan import BoundPlan
from megatron_libra.executor.groups import create_pool_groups
from megatron_libra.executor.runtime import PoolRuntime, pool_runtime

__all__ = [
    "HEADS",
    "Layer",
    "forward_pairs",
    "long_tail",
    "runtime_of",
    "scaled_rows",
    "shape_of",
]

HEADS = {"32q4kv128": (32, 4, 128), "128q16kv256": (128, 16, 256), "8q2kv16": (8, 2, 16)}
"""Query heads, kv heads, head dim; the last for dry runs."""
TFLOPS = {"fa4": 660, "flash_attn": 600, "torch_flash": 330, "reference": 0.005}
"""Rough forward speeds, to guess a size before it is measured."""


def shape_of(name: str) -> AttentionShape:
    """The attention shape of a name in HEADS."""
    query_heads, kv_heads, head_dim = HEADS[name]
    return AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim)


def forward_pairs(ms: float, shape: AttentionShape, kernel: str) -> int:
    """Pairs whose forward takes about so long."""
    flops = ms * 1e-3 * TFLOPS[kernel] * 1e12
    return max(64, round(flops / (4 * shape.head_dim * shape.query_heads)))


def long_tail(pairs: int, seed: int) -> list[int]:
    """Documents of the 256K preset with so many causal pairs, the longest with a quarter."""
    longest = max(4, int((pairs / 2) ** 0.5))
    rng = np.random.default_rng(seed)
    lengths: list[int] = []
    while pairs > 0:
        drawn = rng.lognormal(np.log(644), CORPORA["longtail-256k"].sigma)
        length = max(1, min(int(drawn), longest, int((2 * pairs) ** 0.5)))
        lengths.append(length)
        pairs -= length * (length + 1) // 2
    return lengths


def scaled_rows(preset: str, seq_length: int, count: int, seed: int) -> list[list[int]]:
    """Packed sequences of a preset, every length scaled by seq_length / the preset's."""
    ratio = seq_length / CORPORA[preset].seq_length
    rows = packed_corpus(preset, num_sequences=count, seed=seed)
    scaled = [
        np.maximum(1, (np.asarray(rows.lengths(i)) * ratio).astype(int)) for i in range(count)
    ]
    return [row[np.cumsum(row) <= seq_length].tolist() for row in scaled]


def runtime_of(
    world: World, config: LibraConfig, shape: AttentionShape, ranks: Sequence[int] | None = None
) -> PoolRuntime:
    """Runtime of this worker's pool (by default all workers). Collective; groups are shared by
    cases."""
    members = tuple(range(world.num_workers) if ranks is None else ranks)
    if members not in world.kept:
        world.kept[members] = create_pool_groups(
            members, backend=world.backend, plan_ranks=[world.worker]
        )
    key = (members, config.transport, config.kernel, shape.head_dim)
    if key not in world.kept:
        world.kept[key] = pool_runtime(
            world.kept[members],
            config,
            device=world.device,
            dtype=dtype_of(world),
            head_dim=shape.head_dim,
        )
    return replace(world.kept[key], config=config)


def dtype_of(world: World) -> torch.dtype:
    """bfloat16 on GPUs."""
    return torch.bfloat16 if world.on_gpu else torch.float32


class Layer:
    """One attention layer of one worker through the executor. Collective, as libra_attention is."""

    def __init__(
        self,
        plan: PoolPlan,
        worker: int,
        runtime: PoolRuntime,
        world: World,
        *,
        inputs_of: Layer | None = None,
    ) -> None:
        """inputs_of: a layer of the same sizes, whose q, k, v and dout are taken."""
        self.bound: BoundPlan = bind(plan.worker_plan(worker), runtime)
        self._out: torch.Tensor | None = None
        if inputs_of is not None:
            self.leaves, self.dout = inputs_of.leaves, inputs_of.dout
            return
        tokens, shape = plan.seq_length // plan.context_parallel_size, plan.shape
        generator = torch.Generator(world.device).manual_seed(worker)
        q, dout, k, v = (
            torch.randn(
                (tokens, heads, shape.head_dim),
                generator=generator, device=world.device, dtype=dtype_of(world),
            )
            for heads in (*[shape.query_heads] * 2, *[shape.kv_heads] * 2)
        )  # fmt: skip
        self.leaves, self.dout = [x.requires_grad_() for x in (q, k, v)], dout

    def forward(self) -> torch.Tensor:
        """Output with its graph; dropped, it frees what it kept."""
        return libra_attention(*self.leaves, self.bound)

    def backward(self) -> Any:
        """Gradients of one kept forward, as often as it is called."""
        if self._out is None:
            self._out = self.forward()
        return torch.autograd.grad(self._out, self.leaves, self.dout, retain_graph=True)

    def gradients(self, out: torch.Tensor) -> Any:
        """Gradients of an output that is not needed again."""
        return torch.autograd.grad(out, self.leaves, self.dout)

    def both(self) -> Any:
        """Forward, then backward."""
        return self.gradients(self.forward())
