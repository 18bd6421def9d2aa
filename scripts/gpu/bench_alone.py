"""Parts of a layer without the rest of the executor. In: a worker's plan, a runtime. Out: its bare
kernel calls on prebuilt views; its exchanges with nothing computed; transports that move nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from bench_common import World
from bench_work import dtype_of

from megatron_libra.executor.bind import bind
from megatron_libra.executor.kernels import AttentionKernel, BoundRound, bind_round
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.steps import Step
from megatron_libra.executor.transport import (
    ChunkOf,
    LoopbackTransport,
    Mailbox,
    MailboxRequest,
    Transport,
)
from megatron_libra.executor.transport.symmetric import SymmetricTransport
from megatron_libra.plan.worker_plan import Round, WorkerPlan

__all__ = [
    "Exchange",
    "KernelCalls",
    "StillTransport",
    "copies_rows",
    "signals_alone",
    "without_transfers",
]


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
        ratio = heads.query_heads // heads.kv_heads
        for rounds, kv_heads in local.halves(heads.kv_heads):
            self._add(
                rounds, local.query.num_rows, local.kv.num_rows,
                (ratio * len(kv_heads), len(kv_heads)), plan, world,
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
    """A worker's place in a pool in which nothing is transferred. What arrives is random, as values
    of a layer are: kernels are faster on zeros, which take less power."""

    def __init__(self, worker: int, num_workers: int) -> None:
        super().__init__()
        self.worker, self.num_workers = worker, num_workers
        self._memory: dict[tuple[int, torch.dtype], torch.Tensor] = {}

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        return tuple(
            request.mailbox(self._rows(place, request, device))
            for place, request in enumerate(requests)
        )

    def start(self, chunks: Sequence[ChunkOf]) -> Any:
        return self

    def wait(self) -> None:
        pass

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        pass

    def _rows(self, place: int, request: MailboxRequest, device: torch.device) -> torch.Tensor:
        size, key = request.num_rows * request.width, (place, request.dtype)
        held = self._memory.pop(key, None)
        if held is None or len(held) < size:
            held = torch.randn(size, dtype=request.dtype, device=device)
        self._memory[key] = held
        return held[:size].view(request.num_rows, request.width)


def without_transfers(runtime: PoolRuntime) -> PoolRuntime:
    """The same with transports that move nothing, one for each direction."""
    place = runtime.dispatch
    still = [StillTransport(place.worker, place.num_workers) for _ in range(2)]
    return replace(runtime, dispatch=still[0], return_=still[1])


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

    def both(self) -> None:
        """Forward, then backward."""
        self.forward()
        self.backward()

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


def copies_rows(runtime: PoolRuntime) -> bool:
    """Whether signals_alone can be asked for: the pool is of one node, whose members write into
    each other's heaps."""
    return isinstance(runtime.dispatch, SymmetricTransport)


@contextmanager
def signals_alone(runtime: PoolRuntime) -> Iterator[None]:
    """What is enqueued here waits and signals as ever, but copies no rows."""
    with ExitStack() as stack:
        for transport in (runtime.dispatch, runtime.return_):
            assert isinstance(transport, SymmetricTransport)
            stack.enter_context(mock.patch.object(transport.peers, "push", lambda copies: None))
        yield
