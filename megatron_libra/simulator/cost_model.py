"""Predict the time of a plan. In: a pool's work (PoolWork), a calibration. Out: PoolTime.

One worker and one layer's forward, with h heads of a shard and M chunks:

    device   = 4 d h pairs / (full rate * fill) + query rows * h * token time
    compute  = max(device, calls * call time)
    first    = message(Q / M + KV / U)            exposed: nothing to compute yet
    last     = message(O / M)                     exposed: nothing left to compute
    hidden   = message(all that is between)
    time     = first + last + max(compute + overlap loss * hidden, hidden)

fill = min(1, query rows of a call * heads of a call / full_call_rows); U is the number of chunks
that bring new kv heads; message(bytes) = latency + max over the two links of the larger of sent and
received, over that link's bandwidth. Backward is the same with 2.5 times the work, dO in and dQ,
dK, dV out (refetch: Q, O, K, V in again). A pool's time is that of its slowest worker, forward and
backward apart, because the workers meet in each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.pool_work import PoolWork

__all__ = ["CostModel", "KernelRate", "PoolTime", "predict"]

Float = NDArray[np.float64]
BACKWARD_WORK = 2.5
"""FLOPs of FlashAttention's backward over those of its forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRate:
    """Attention throughput at one head dimension, on long sequences."""

    forward_tflops: float
    backward_tflops: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """A machine as the simulator sees it; every field is a key of the calibration file."""

    name: str
    """Shown in every output."""
    kernels: Mapping[int, KernelRate]
    """By head dimension; the nearest one is used."""
    forward_token_ns: float
    """Nanoseconds for each query row and head besides the pairs."""
    backward_token_ns: float
    forward_call_us: float
    """Microseconds that the host needs to issue one varlen call."""
    backward_call_us: float
    full_call_rows: float
    """Query rows * heads from which one forward call runs at full rate."""
    intra_node_gb_s: float
    """GB/s that a worker sends (and receives) inside its node."""
    inter_node_gb_s: float
    """GB/s that a worker sends (and receives) between nodes."""
    message_us: float
    """Least microseconds of one all-to-all."""
    overlap_loss: float
    """Share of a hidden transfer by which it slows the computation that hides it."""

    def __post_init__(self) -> None:
        if not self.kernels:
            raise ValueError('kernels is empty; give {"128": {"forward_tflops": 600, ...}}.')
        for name in POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be above 0.")
        for name in NOT_NEGATIVE:
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 0.")

    def kernel(self, head_dim: int) -> KernelRate:
        """The rates of the nearest head dimension."""
        nearest = min(self.kernels, key=lambda d: (abs(math.log(d / head_dim)), d))
        return self.kernels[nearest]


POSITIVE = ("intra_node_gb_s", "inter_node_gb_s")
NOT_NEGATIVE = (
    "forward_token_ns",
    "backward_token_ns",
    "forward_call_us",
    "backward_call_us",
    "full_call_rows",
    "message_us",
    "overlap_loss",
)


@dataclass(frozen=True, slots=True, eq=False)
class PoolTime:
    """Predicted seconds of one attention layer, by worker (W,)."""

    forward: Float
    forward_compute: Float
    forward_first: Float
    """The exposed first dispatch."""
    forward_last: Float
    """The exposed last return."""
    backward: Float
    backward_compute: Float

    @property
    def forward_s(self) -> float:
        """Forward of the pool: its slowest worker."""
        return float(self.forward.max())

    @property
    def backward_s(self) -> float:
        """Backward of the pool: its slowest worker."""
        return float(self.backward.max())

    @property
    def compute_s(self) -> float:
        """The largest computation, forward and backward; the rest of the time is communication."""
        return float(self.forward_compute.max() + self.backward_compute.max())


def predict(work: PoolWork, model: CostModel, *, refetch: bool = False) -> PoolTime:
    """Times of one layer on a pool; refetch sends Q, O, K and V again in backward."""
    rate = model.kernel(work.head_dim)
    rows_of_call = work.query_rows / np.maximum(work.rounds, 1) * work.heads_per_call
    fill = np.clip(rows_of_call / max(model.full_call_rows, 1e-9), 1e-9, 1.0)
    flops = 4.0 * work.head_dim * work.heads_per_shard * work.pairs
    rows = work.query_rows * work.heads_per_shard
    calls = work.rounds * work.chunks
    forward_compute = np.maximum(
        flops / (rate.forward_tflops * 1e12 * fill) + rows * model.forward_token_ns * 1e-9,
        calls * model.forward_call_us * 1e-6,
    )
    backward_compute = np.maximum(
        BACKWARD_WORK * flops / (rate.backward_tflops * 1e12)
        + rows * model.backward_token_ns * 1e-9,
        calls * model.backward_call_us * 1e-6,
    )
    q, kv = work.query_bytes, work.kv_bytes
    first, last, forward = _pipeline(forward_compute, (q, kv), (q.T, None), work, model)
    sent = (3 * q, kv) if refetch else (q, None)
    backward = _pipeline(backward_compute, sent, (q.T, kv.T), work, model)[2]
    return PoolTime(forward, forward_compute, first, last, backward, backward_compute)


Parts = tuple[NDArray[np.int64], NDArray[np.int64] | None]
"""(W, W) bytes that every chunk carries, and bytes that only chunks with new kv heads carry."""


def _pipeline(
    compute: Float, dispatch: Parts, return_: Parts, work: PoolWork, model: CostModel
) -> tuple[Float, Float, Float]:
    """(first dispatch, last return, whole time) of each worker in the chunk pipeline."""
    dispatched, first = _split(dispatch, work)
    returned, last = _split(return_, work)
    first_s = _message(first, 1, work, model)
    last_s = _message(last, 1, work, model)
    between = dispatched - first + returned - last
    hidden = _message(between, 2 * (work.chunks - 1), work, model)
    middle = np.maximum(compute + model.overlap_loss * hidden, hidden)
    return first_s, last_s, first_s + last_s + middle


def _split(parts: Parts, work: PoolWork) -> tuple[Float, Float]:
    """All bytes of one direction, and those of its exposed chunk."""
    every, some = parts
    total, exposed = every.astype(np.float64), every / work.chunks
    if some is not None:
        total, exposed = total + some, exposed + some / work.kv_pieces
    return total, exposed


def _message(moved: Float, count: int, work: PoolWork, model: CostModel) -> Float:
    """(W,) seconds of `count` all-to-alls that move (W, W) bytes together."""
    inside = np.where(work.same_node, moved, 0.0)
    outside = moved - inside
    seconds = [
        np.maximum(part.sum(axis=1), part.sum(axis=0)) / (bandwidth * 1e9)
        for part, bandwidth in (
            (inside, model.intra_node_gb_s),
            (outside, model.inter_node_gb_s),
        )
    ]
    waits: Float = np.maximum(*seconds) + count * model.message_us * 1e-6
    return waits
