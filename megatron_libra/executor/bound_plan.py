"""A plan on its device: what every layer's forward and backward read. Made by `bind`.

In: index tensors, rounds, steps. Out: BoundPlan.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from megatron_libra.executor.bound_route import BoundRoute, HomeSum
from megatron_libra.executor.kernels import BoundRound
from megatron_libra.executor.local_calls import LocalCalls
from megatron_libra.executor.local_rows import LocalRows
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.steps import Step
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.worker_plan import WorkerPlan

__all__ = ["BoundLocal", "BoundPlan"]


@dataclass(frozen=True, slots=True, eq=False)
class BoundLocal:
    """The local part on the device: rows of this worker's own tensors, never exchanged."""

    rows: LocalRows
    calls: LocalCalls
    gaps: tuple[tuple[int, int], ...]
    """Ranges of home tokens whose results are not computed in place: exchanged, or padding."""
    unread: tuple[tuple[int, int], ...]
    """Ranges of home tokens that no round in place reads as keys."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundPlan:
    """One worker's plan on its device. Used by forward, backward and activation recompute of every
    layer."""

    plan: WorkerPlan
    runtime: PoolRuntime
    steps: tuple[Step, ...]
    """What is exchanged, in time order, alike on all workers; empty if nothing is."""
    query: BoundRoute
    kv: BoundRoute
    query_rows_at_home: torch.Tensor
    """(T * H * M,) int32 where each returned row of a home token stands in the return's mailbox;
    the zero row for padding, and for local rows, which do not come from there."""
    kv_sum: HomeSum
    rounds: tuple[tuple[BoundRound, ...], ...]
    """By exchanged part, for each chunk."""
    local: BoundLocal

    @property
    def heads(self) -> HeadPartition:
        """How the heads are cut into shards, chunks and pieces."""
        return self.plan.heads
