"""Predict the time of a plan. In: a pool's work (PoolWork), a calibration. Out: PoolTime.

    kernel calls of each worker -> seconds by part (call_cost.py)
    + rows gathered around them -> PassCompute
    + bytes between workers, links -> Timeline (timeline.py), forward and backward

A pool's time is that of its slowest worker, forward and backward apart, because the workers meet in
each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.parts import EARLY, LATE
from megatron_libra.simulator.call_cost import KernelCost, PassCost
from megatron_libra.simulator.call_table import PARTS
from megatron_libra.simulator.pool_work import PoolWork
from megatron_libra.simulator.timeline import Links, PassCompute, Timeline, simulate_pass

__all__ = ["CostModel", "PoolTime", "part_seconds", "pass_compute", "predict"]

Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A machine as the simulator sees it; every field is a key of the calibration file."""

    name: str
    """Shown in every output."""
    kernel: str
    """Attention kernel that the costs are of."""
    num_sms: int
    """Streaming multiprocessors of a GPU."""
    kernels: Mapping[int, KernelCost]
    """By head dimension; the nearest one is scaled where one is missing."""
    gather_gb_s: float
    """GB/s, read and written, at which rows are packed for and sorted behind an exchange."""
    intra_node_gb_s: float
    """GB/s that a worker sends (and receives) inside its node."""
    inter_node_gb_s: float
    """GB/s that a worker sends (and receives) between nodes."""
    message_us: float
    """Microseconds of an exchange besides its bytes."""
    overlap_loss: float
    """Share of a hidden transfer by which it slows the computation that hides it."""

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ValueError('kernels is empty; give {"128": {"forward": {...}, ...}}.')
        for name in ("num_sms", "gather_gb_s", "intra_node_gb_s", "inter_node_gb_s"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0.")
        for name in ("message_us", "overlap_loss"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0.")

    def kernel_cost(self, head_dim: int) -> KernelCost:
        """The costs of the nearest head dimension, scaled to this one."""
        nearest = min(self.kernels, key=lambda d: (abs(math.log(d / head_dim)), d))
        found = self.kernels[nearest]
        return found if nearest == head_dim else found.scaled(head_dim / nearest)

    def pass_cost(self, head_dim: int, *, backward: bool) -> PassCost:
        """The costs of one pass."""
        cost = self.kernel_cost(head_dim)
        return cost.backward if backward else cost.forward

    @property
    def links(self) -> Links:
        """What the timeline needs to know of the network."""
        return Links(
            intra_node_gb_s=self.intra_node_gb_s,
            inter_node_gb_s=self.inter_node_gb_s,
            message_us=self.message_us,
            overlap_loss=self.overlap_loss,
        )


@dataclass(frozen=True, slots=True, eq=False)
class PoolTime:
    """Predicted times of one attention layer."""

    forward: Timeline
    forward_compute: PassCompute
    backward: Timeline
    backward_compute: PassCompute

    @property
    def forward_s(self) -> float:
        """Forward of the pool: its slowest worker."""
        return self.forward.seconds

    @property
    def backward_s(self) -> float:
        """Backward of the pool: its slowest worker."""
        return self.backward.seconds

    @property
    def compute_s(self) -> float:
        """The largest computation, forward and backward; the rest of the time is communication."""
        return float(self.forward_compute.total.max() + self.backward_compute.total.max())


def predict(work: PoolWork, model: CostModel, *, refetch: bool = False) -> PoolTime:
    """Times of one layer on a pool; refetch sends Q, O, K and V again in backward."""
    times: list[Timeline | PassCompute] = []
    for backward in (False, True):
        parts = part_seconds(work, model, backward=backward)
        compute = pass_compute(work, parts, model, backward=backward, refetch=refetch)
        traffic = work.traffic(backward=backward, refetch=refetch)
        times += [simulate_pass(compute, traffic, model.links, work.same_node), compute]
    return PoolTime(*times)  # type: ignore[arg-type]


def part_seconds(work: PoolWork, model: CostModel, *, backward: bool) -> Float:
    """(4, W) predicted seconds of the kernel calls of each part (PARTS); of one chunk."""
    cost = model.pass_cost(work.head_dim, backward=backward)
    return _by_part(work, cost.seconds(work.calls, model.num_sms))


def _by_part(work: PoolWork, seconds: Float) -> Float:
    """(4, W) sums of (C,) values."""
    size = work.num_workers
    where = work.calls.part * size + work.calls.worker
    return np.bincount(where, seconds, minlength=len(PARTS) * size).reshape(len(PARTS), size)


def pass_compute(
    work: PoolWork, parts: Float, model: CostModel, *, backward: bool, refetch: bool = False
) -> PassCompute:
    """The computation of a pass: kernel calls, and the rows that are gathered around them.

    Args:
        work: the pool.
        parts: (4, W) seconds of the kernel calls of each part, of one chunk; predicted (see
            part_seconds) or measured.
        model: for the rows, and for the host, which may issue calls slower than the device runs
            them.
    """
    cost = model.pass_cost(work.head_dim, backward=backward)
    host = _by_part(work, np.full(len(work.calls), cost.host_us * 1e-6))
    parts = np.maximum(parts, host)
    moves = work.gathers(backward=backward, refetch=refetch)
    scale = 1 / (model.gather_gb_s * 1e9)
    packed = moves.packed * scale
    return PassCompute(
        early=parts[EARLY] + packed[1:].sum(axis=0) + moves.copied * scale,
        steps=parts[[part for part, _ in work.order]] + moves.sorted * scale,
        names=tuple(f"{PARTS[part]} {chunk}" for part, chunk in work.order),
        late=parts[LATE],
        pack=packed[0],
        gather=moves.gathered * scale,
    )
