"""Time kernel calls on this machine's device. In: KernelCall. Out: CallSeconds, WorkerSeconds.

Inputs are random; outputs are dropped; a time is the median of several runs (timing.py). On the CPU
it is that of the reference kernel, which says nothing of a GPU and is labelled so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from megatron_libra.config import AttentionShape, divisors
from megatron_libra.executor.kernels import AttentionKernel, bind_round
from megatron_libra.plan.heads import HeadPartition, fits
from megatron_libra.plan.parts import FAR, NEAR
from megatron_libra.replay.calls import KernelCall, call_of
from megatron_libra.replay.timing import issue_seconds, median_seconds
from megatron_libra.simulator.call_table import PARTS, part_weights

__all__ = [
    "MANY_ENTRIES",
    "CallKind",
    "CallSeconds",
    "CallTimer",
    "WorkerSeconds",
    "gather_gb_s",
    "measure_worker",
]

GATHER_ROWS = 1 << 18
GATHER_ELEMENTS = 1024
MANY_ENTRIES = 256
"""Above, a kernel may be another one (FlashAttention-4 searches for entries)."""


class CallKind(NamedTuple):
    """What a kernel may be compiled for."""

    head_dim: int
    query_heads: int
    kv_heads: int
    has_many_entries: bool


@dataclass(frozen=True, slots=True)
class CallSeconds:
    """One call, once."""

    forward: float
    backward: float


@dataclass(frozen=True, slots=True)
class WorkerSeconds:
    """All calls of one worker in a layer."""

    forward: tuple[float, ...]
    """(4,) seconds of each of PARTS, ONE chunk of near and of far work."""
    backward: tuple[float, ...]
    chunks: int
    """M; all chunks have equal shapes, one was run."""

    @property
    def forward_s(self) -> float:
        """All chunks and the local work."""
        return float(part_weights(self.chunks) @ self.forward)

    @property
    def backward_s(self) -> float:
        """The same of backward."""
        return float(part_weights(self.chunks) @ self.backward)


class CallTimer:
    """Runs calls with one kernel on one device. Calls of one shape are run once and remembered."""

    def __init__(
        self,
        kernel: AttentionKernel,
        device: torch.device,
        *,
        dtype: torch.dtype | None = None,
        repeats: int = 5,
        call_budget_s: float = 0.25,
    ) -> None:
        """
        Args:
            kernel: what the executor would call.
            device: where it runs.
            dtype: of the inputs; by default bfloat16, on the CPU float32.
            repeats: timed runs of a pass, of which the median counts; at least 1.
            call_budget_s: fewer runs of a pass once they would take longer than this together.
        """
        self.kernel = kernel
        self.device = device
        self.dtype = dtype or (torch.bfloat16 if device.type == "cuda" else torch.float32)
        self.repeats = repeats
        self.call_budget_s = call_budget_s
        self._inputs: dict[str, torch.Tensor] = {}
        self._known: dict[tuple[bytes, bytes, int, int, int], CallSeconds] = {}

    @property
    def label(self) -> str:
        """What the times are of, for tables: device and kernel."""
        if self.device.type == "cuda":
            return f"{torch.cuda.get_device_name(self.device)}, {self.kernel.name}"
        return f"CPU, {self.kernel.name} kernel (no GPU was measured)"

    def warm_up(self, kinds: Iterable[CallKind]) -> None:
        """Run a small call of every kind, so that kernels are compiled before times count. What
        cannot be run says so when it is measured."""
        for kind in sorted(kinds):
            rows = [1] * (MANY_ENTRIES + 1 if kind.has_many_entries else 2)
            call = call_of(
                rows,
                rows,
                query_heads=kind.query_heads,
                kv_heads=kind.kv_heads,
                head_dim=kind.head_dim,
            )
            with suppress(Exception):
                self.seconds(call)

    def seconds(self, call: KernelCall) -> CallSeconds:
        """Forward and backward of one call, once. Of a local call that the kernel's own index type
        cannot hold, those of the fewest equal parts of its heads that it can, as in the executor.

        Raises:
            ValueError: the kernel cannot hold a chunk's call, or a local call of one head.
        """
        if call.key not in self._known:
            count, part = self._whole_or_part(call)
            once = self._measured(part)
            self._known[call.key] = CallSeconds(count * once.forward, count * once.backward)
        return self._known[call.key]

    def _whole_or_part(self, call: KernelCall) -> tuple[int, KernelCall]:
        """Into how many calls of which shape a call is divided."""
        counts = [1] if call.part in (NEAR, FAR) else divisors(call.query_heads)
        shape = AttentionShape(
            query_heads=call.query_heads, kv_heads=call.kv_heads, head_dim=call.head_dim
        )
        problem = ""
        for count in counts:
            if not fits(shape, 1, count):
                continue
            heads = HeadPartition.of(shape, 1, count)
            part = replace(
                call, query_heads=heads.query_heads_per_chunk, kv_heads=heads.kv_heads_per_chunk
            )
            try:
                self.kernel.check_sizes(call.round, part.query_heads, part.kv_heads, call.head_dim)
            except ValueError as error:
                problem = str(error)
                continue
            return count, part
        raise ValueError(problem)

    def _measured(self, call: KernelCall) -> CallSeconds:
        forward, backward = self._passes(call)
        return CallSeconds(self._median(forward), self._median(backward))

    def host_seconds(self, call: KernelCall) -> CallSeconds:
        """What the host needs to issue the call's passes while the device is busy."""
        forward, backward = self._passes(call)
        return CallSeconds(
            issue_seconds(forward, self.device, repeats=self.repeats),
            issue_seconds(backward, self.device, repeats=self.repeats),
        )

    def _median(self, run: Callable[[], None]) -> float:
        return median_seconds(run, self.device, repeats=self.repeats, budget_s=self.call_budget_s)

    def _passes(self, call: KernelCall) -> tuple[Callable[[], None], Callable[[], None]]:
        """Functions that run forward, and backward of the last forward."""
        each, dim = call.round, call.head_dim
        bound = bind_round(each, self.kernel, self.device)
        query_shape = (each.query_stop, call.query_heads, dim)
        key_shape = (each.key_stop, call.kv_heads, dim)
        q, dout = self._input("q", query_shape), self._input("dout", query_shape)
        k, v = self._input("k", key_shape), self._input("v", key_shape)
        kept: list[torch.Tensor] = []
        scale = dim**-0.5

        def forward() -> None:
            kept[:] = self.kernel.forward(q, k, v, bound, scale)

        def backward() -> None:
            self.kernel.backward(dout, q, k, v, *kept, bound, scale)

        return forward, backward

    def _input(self, name: str, shape: tuple[int, int, int]) -> torch.Tensor:
        """Random rows; one buffer of each name grows and is shared by all calls."""
        size = shape[0] * shape[1] * shape[2]
        if name not in self._inputs or self._inputs[name].numel() < size:
            self._inputs.pop(name, None)
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
            self._inputs[name] = torch.randn(size, device=self.device, dtype=self.dtype)
        return self._inputs[name][:size].view(shape)


def measure_worker(calls: Iterable[KernelCall], timer: CallTimer) -> WorkerSeconds:
    """Run all calls of one worker, one chunk for all M of them."""
    forward, backward, chunks = [0.0] * len(PARTS), [0.0] * len(PARTS), 1
    for call in calls:
        seconds = timer.seconds(call)
        forward[call.part] += seconds.forward
        backward[call.part] += seconds.backward
        chunks = max(chunks, call.repeats)
    return WorkerSeconds(tuple(forward), tuple(backward), chunks)


def gather_gb_s(device: torch.device) -> float:
    """GB/s, read and written, at which rows of 2 KiB are gathered by an index (index_select)."""
    rows = GATHER_ROWS if device.type == "cuda" else GATHER_ROWS // 64
    source = torch.randn(rows, GATHER_ELEMENTS, device=device).to(torch.bfloat16)
    index = torch.randperm(rows, device=device)
    found = torch.empty_like(source)
    seconds = median_seconds(
        lambda: torch.index_select(source, 0, index, out=found), device, repeats=9, budget_s=1.0
    )
    num_bytes: int = 2 * source.numel() * source.element_size()
    return num_bytes / seconds / 1e9
