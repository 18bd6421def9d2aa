"""The order of starts, waits and computation in time, with recorded stages and transports."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from megatron_libra.config import LibraConfig
from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.inputs import pool_tensors, worker_tensors
from megatron_libra.executor.kernels import BoundRound
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.executor.pipeliner import run_steps
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.transport import ChunkOf, LoopbackTransport, Mailbox, MailboxRequest
from tests.helpers.cases import plan_of, pool


class Recorder:
    """Stages that write down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def dispatch(self) -> None:
        self.events.append("dispatch")

    def compute_local(self, *, early: bool) -> None:
        self.events.append("early" if early else "late")

    def compute(self, step: int) -> None:
        self.events.append(f"compute {step}")


def test_time_order() -> None:
    recorder = Recorder()
    run_steps(2, recorder)
    assert recorder.events == ["dispatch", "early", "compute 0", "compute 1", "late"]


def test_nothing_is_dispatched_without_steps() -> None:
    recorder = Recorder()
    run_steps(0, recorder)
    assert recorder.events == ["early", "late"]


class RecordingTransport(LoopbackTransport):
    """A worker's place in a pool of two whose peer never answers; it writes down its calls."""

    num_workers = 2

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self.direction, self.events = name, events

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        made = []
        for request in requests:
            shape = (request.num_rows, request.width)
            made.append(request.mailbox(torch.zeros(shape, dtype=request.dtype)))
        return tuple(made)

    def start(self, chunks: Sequence[ChunkOf]) -> Waiting:
        label = f"{self.direction} {len(chunks)} mailboxes, chunk {chunks[0][1]}"
        self.events.append(f"start {label}")
        return Waiting(label, self.events)

    def close(self, mailboxes: Sequence[Mailbox]) -> None:
        self.events.append(f"close {self.direction}")


class Waiting:
    def __init__(self, label: str, events: list[str]) -> None:
        self.label, self.events = label, events

    def wait(self) -> None:
        self.events.append(f"wait {self.label}")


class RecordingKernel(ReferenceKernel):
    """Writes down the heads of its calls."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        r: BoundRound,
        scale: float,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self.events.append(f"call with {q.shape[1]} heads")
        return super().forward(q, k, v, r, scale, **options)


TWO = plan_of(
    pool([[40, 8, 8]], 56, 2, (4, 2, 8), block_size=8, chunks=4, placer="home", head_split=1,
         layout="contiguous")
)  # fmt: skip


def bound_to(
    kernel: ReferenceKernel, dispatch: RecordingTransport, events: list[str], **libra: Any
) -> tuple[Any, ...]:
    """q, k and v of worker 1 of TWO, and its plan."""
    return_ = RecordingTransport("out", events)
    dispatch.worker = return_.worker = 1
    runtime = PoolRuntime(dispatch, return_, kernel, torch.device("cpu"), LibraConfig(**libra))
    tensors = worker_tensors(TWO, 1, pool_tensors(TWO, 0, torch.float64))
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    return *leaves, bind(TWO.worker_plan(1), runtime)


def test_what_a_layer_does_in_time() -> None:
    """All dispatches are under way before anything is computed; local work runs first and last,
    with all heads; K and V come with every other chunk; mailboxes are closed when they are read."""
    events: list[str] = []
    libra_attention(*bound_to(RecordingKernel(events), RecordingTransport("in", events), events))
    assert events == [
        "start in 2 mailboxes, chunk 0",
        "start in 1 mailboxes, chunk 1",
        "start in 2 mailboxes, chunk 2",
        "start in 1 mailboxes, chunk 3",
        "call with 4 heads",
        "wait in 2 mailboxes, chunk 0", "call with 1 heads", "start out 1 mailboxes, chunk 0",
        "wait in 1 mailboxes, chunk 1", "call with 1 heads", "start out 1 mailboxes, chunk 1",
        "wait in 2 mailboxes, chunk 2", "call with 1 heads", "start out 1 mailboxes, chunk 2",
        "wait in 1 mailboxes, chunk 3", "close in",
        "call with 1 heads", "start out 1 mailboxes, chunk 3",
        "call with 4 heads",
        *(f"wait out 1 mailboxes, chunk {chunk}" for chunk in range(4)),
        "close out",
    ]  # fmt: skip


class WatchedTransport(RecordingTransport):
    """Knows the memory of its mailboxes that somebody still holds."""

    def __init__(self, events: list[str]) -> None:
        super().__init__("in", events)
        self.rows: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def open(self, requests: Sequence[MailboxRequest], device: torch.device) -> tuple[Mailbox, ...]:
        made = super().open(requests, device)
        for mailbox in made:
            self.rows.add(mailbox.rows)
        return made


class CountingKernel(ReferenceKernel):
    """Counts the mailboxes of the dispatch that are there when it is called."""

    def __init__(self, transport: WatchedTransport) -> None:
        self.transport, self.counts = transport, []

    def forward(self, *others: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        self.counts.append(len(self.transport.rows))
        return super().forward(*others, **options)

    def backward(self, *others: Any, **options: Any) -> tuple[torch.Tensor, ...]:
        self.counts.append(len(self.transport.rows))
        return super().backward(*others, **options)


@pytest.mark.parametrize(("mode", "sent_again"), [("save", 1), ("refetch", 2)])
def test_the_dispatch_s_mailboxes_are_given_back_when_all_has_arrived(
    mode: str, sent_again: int
) -> None:
    """Not at the end of the layer: the last chunk and the late local work need memory too."""
    transport = WatchedTransport([])
    kernel = CountingKernel(transport)
    *leaves, bound = bound_to(kernel, transport, [], backward_kv=mode)
    out = libra_attention(*leaves, bound)
    assert kernel.counts == [2, 2, 2, 2, 0, 0]
    kernel.counts = []
    out.sum().backward()
    assert kernel.counts == [sent_again] * 4 + [0, 0]


def test_a_pool_that_moves_nothing_makes_no_call_of_a_transport() -> None:
    plan = plan_of(pool([[30, 10], [40]], 40, 1, (4, 2, 8), block_size=8, placer="home"))
    events: list[str] = []
    transport = RecordingTransport("any", events)
    transport.worker = 0
    kernel = RecordingKernel(events)
    runtime = PoolRuntime(transport, transport, kernel, torch.device("cpu"), LibraConfig())
    tensors = worker_tensors(plan, 0, pool_tensors(plan, 0, torch.float64))
    leaves = [tensors[name].requires_grad_() for name in ("q", "k", "v")]
    libra_attention(*leaves, bind(plan.worker_plan(0), runtime)).sum().backward()
    assert events == ["call with 4 heads"]
    assert all(leaf.grad is not None for leaf in leaves)
