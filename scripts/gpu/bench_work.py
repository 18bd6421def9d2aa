"""Pools to measure, and the parts of a layer without the executor around them.

In: lengths, a plan, a runtime. Out: a layer's forward and backward; the bare kernel calls of one
worker on prebuilt views; its exchanges with nothing computed.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from megatron_libra.executor.kernels import AttentionKernel, BoundRound, bind_round
from megatron_libra.executor.runtime import PoolRuntime, pool_runtime
from megatron_libra.executor.steps import Step
from megatron_libra.executor.transport import (
    ChunkOf,
    LoopbackTransport,
    Mailbox,
    MailboxRequest,
    Transport,
)
from megatron_libra.plan.worker_plan import Round, WorkerPlan

__all__ = [
    "HEADS",
    "Exchange",
    "KernelCalls",
    "Layer",
    "StillTransport",
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


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    tensors: tuple[torch.Tensor, ...]
    """q, k, v, dout, out of the call; views."""
    lse: torch.Tensor
    bound_round: BoundRound


class KernelCalls:
    """The kernel calls of one worker's layer, nothing else: same kernel, rounds and head chunks."""

    def __init__(self, plan: WorkerPlan, kernel: AttentionKernel, world: World) -> None:
        self.kernel, self.scale = kernel, plan.shape.head_dim**-0.5
        heads, local = plan.heads, plan.local
        self.calls: list[_Call] = []
        for part, _ in itertools.product(plan.exchanged, range(heads.chunks)):
            self._add(
                part.rounds, part.query.num_rows, part.kv.num_rows,
                (heads.query_heads_per_chunk, heads.kv_heads_per_chunk), plan, world,
            )  # fmt: skip
        self._add(
            local.rounds, local.query.num_rows, local.kv.num_rows,
            (heads.query_heads, heads.kv_heads), plan, world,
        )  # fmt: skip

    def _add(
        self,
        rounds: Sequence[Round],
        query_rows: int,
        kv_rows: int,
        num_heads: tuple[int, int],
        plan: WorkerPlan,
        world: World,
    ) -> None:
        """One part, or one chunk of it."""
        make = partial(torch.randn, device=world.device, dtype=dtype_of(world))
        query_size = (query_rows, num_heads[0], plan.shape.head_dim)
        kv_size = (kv_rows, num_heads[1], plan.shape.head_dim)
        q, k, v, dout = make(query_size), make(kv_size), make(kv_size), make(query_size)
        for r in rounds:
            bound = bind_round(r, self.kernel, world.device)
            rows, keys = bound.queries, bound.keys
            out, lse = self.kernel.forward(q[rows], k[keys], v[keys], bound, self.scale)
            self.calls.append(_Call((q[rows], k[keys], v[keys], dout[rows], out), lse, bound))

    def forward(self) -> None:
        """All forward calls."""
        for call in self.calls:
            q, k, v, _, _ = call.tensors
            self.kernel.forward(q, k, v, call.bound_round, self.scale)

    def backward(self) -> None:
        """All backward calls."""
        for call in self.calls:
            q, k, v, dout, out = call.tensors
            self.kernel.backward(dout, q, k, v, out, call.lse, call.bound_round, self.scale)

    def both(self) -> None:
        """Forward, then backward."""
        self.forward()
        self.backward()


class StillTransport(LoopbackTransport):
    """A worker's place in a pool in which nothing is transferred: what arrives is whatever the
    memory held."""

    def __init__(self, worker: int, num_workers: int) -> None:
        super().__init__()
        self.worker, self.num_workers = worker, num_workers

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        return tuple(
            r.mailbox(torch.empty(r.num_rows, r.width, dtype=r.dtype, device=device))
            for r in requests
        )

    def start(self, chunks: Sequence[ChunkOf]) -> Any:
        return self

    def wait(self) -> None:
        pass

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        pass


class Exchange:
    """The exchanges of one layer without packing and without compute: all of the dispatch, then all
    of the return, as a layer that overlaps nothing would wait for them. Collective."""

    def __init__(self, plan: WorkerPlan, runtime: PoolRuntime, world: World) -> None:
        heads, head_dim, dtype = plan.heads, plan.shape.head_dim, dtype_of(world)
        self.bound, self.device = bind(plan, runtime), world.device
        width, kv_width = (
            heads.query_heads_per_chunk * head_dim,
            2 * heads.kv_heads_per_chunk * head_dim,
        )
        query, kv = self.bound.query, self.bound.kv
        self.queries = query.dispatch_request(width, dtype)
        self.results = query.return_request(width, dtype)
        self.keys = kv.dispatch_request(kv_width, dtype)
        self.sums = kv.return_request(kv_width, dtype)

    def forward(self) -> None:
        """Q, K, V out; O back."""
        runtime = self.bound.runtime
        self._move(runtime.dispatch, [self.queries, self.keys], lambda step: step.brings_kv)
        self._move(runtime.return_, [self.results], lambda step: False)

    def backward(self) -> None:
        """dO out; dQ, dK, dV back (backward_kv = save)."""
        runtime = self.bound.runtime
        self._move(runtime.dispatch, [self.queries], lambda step: False)
        self._move(runtime.return_, [self.results, self.sums], lambda step: step.finishes_kv)

    def _move(
        self,
        transport: Transport,
        requests: list[MailboxRequest],
        with_kv: Callable[[Step], bool],
    ) -> None:
        if not self.bound.steps:
            return
        mailboxes = transport.open(requests, self.device)
        pending = []
        for number, step in enumerate(self.bound.steps):
            parts = [(mailboxes[0], number)]
            if with_kv(step):
                parts.append((mailboxes[1], step.kv_segment))
            pending.append(transport.start(parts))
        for exchange in pending:
            exchange.wait()
        transport.close(mailboxes)
