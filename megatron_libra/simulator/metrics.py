"""What a candidate achieves. In: replays of some windows. Out: CandidateResult, plain numbers.

A straggler is the slowest pool at one GA index. A step is as slow as its slowest worker group,
whose microbatches run one after the other, or through PP stages by 1F1B. In lockstep all groups are
one that takes the longest microbatch at each GA index.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.candidates import Candidate
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.pipeline import pipeline_seconds
from megatron_libra.simulator.replay import WindowReplay

__all__ = ["CandidateResult", "Spread", "Straggler", "evaluate", "step_seconds", "straggler"]

Float = NDArray[np.float64]
FORWARD_SHARE = 1 / 3
"""Of the time besides core attention; backward of a matrix product is two of them."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Microbatch forward times over their mean; without a pipeline stall all are 1."""

    least: float
    p5: float
    p95: float
    most: float
    mean_ms: float
    """Milliseconds of one attention layer's forward."""


@dataclass(frozen=True, slots=True)
class Straggler:
    """Seconds of one attention layer, forward and backward."""

    mean_s: float
    """The slowest pool of a GA index, on average."""
    worst_s: float
    """The slowest pool of a step, averaged over steps."""
    step_s: float
    """Of a whole step: all microbatches, layers of a stage, and the time besides attention."""


@dataclass(frozen=True, slots=True)
class CandidateResult:
    """One candidate on the windows it was planned on; bytes are of one layer's forward."""

    candidate: Candidate
    num_windows: int
    num_pools: int
    intra_imbalance: float
    """max / mean - 1 of the workers' pairs inside a pool, on average."""
    worst_intra_imbalance: float
    pool_bytes: float
    """Bytes between the workers of a pool, on average."""
    sequence_bytes: float
    """The same for each packed sequence: pools of different size compare."""
    worker_bytes: float
    """Of the most loaded worker of a pool, the larger of sent and received, on average."""
    inter_node_share: float
    """Share of the bytes that leave their node."""
    tile_over_target: float
    """The heaviest tile over C, the worst pool."""
    resident_kv_bytes: float
    """K and V of the worker that holds most, the worst pool."""
    compute_share: float
    """Computation over time of a pool, on average; the rest is exposed communication."""
    layer_ms: float
    """Mean straggler of one attention layer, forward and backward."""
    worst_layer_ms: float
    step_ms: float
    speedup_mean: float
    """Mean straggler of Ulysses over this one's, on the same windows."""
    speedup_worst: float
    speedup_step: float
    spread: Spread

    @property
    def is_faster(self) -> bool:
        """Whether a predicted step is no slower than the reference's; else nothing is gained."""
        return self.speedup_step >= 1


def evaluate(
    candidate: Candidate,
    replays: Sequence[WindowReplay],
    reference: Sequence[WindowReplay],
    job: TrainingJob,
) -> CandidateResult:
    """Summarize replays; the reference's are of the same windows."""

    def gather(name: str) -> Float:
        return np.concatenate([getattr(replay, name).ravel() for replay in replays])

    own, other = straggler(replays, job), straggler(reference, job)
    total = gather("total_bytes")
    layer = gather("forward_s") + gather("backward_s")
    return CandidateResult(
        candidate=candidate,
        num_windows=len(replays),
        num_pools=len(total),
        intra_imbalance=float(gather("imbalance").mean()),
        worst_intra_imbalance=float(gather("imbalance").max()),
        pool_bytes=float(total.mean()),
        sequence_bytes=float(total.mean()) / candidate.pool_size,
        worker_bytes=float(gather("worker_bytes").mean()),
        inter_node_share=float(gather("inter_node_bytes").sum()) / max(1.0, float(total.sum())),
        tile_over_target=float(gather("tile_over_target").max()),
        resident_kv_bytes=float(gather("resident_kv_bytes").max()),
        compute_share=_over(float(gather("compute_s").sum()), float(layer.sum())),
        layer_ms=own.mean_s * 1e3,
        worst_layer_ms=own.worst_s * 1e3,
        step_ms=own.step_s * 1e3,
        speedup_mean=_over(other.mean_s, own.mean_s),
        speedup_worst=_over(other.worst_s, own.worst_s),
        speedup_step=_over(other.step_s, own.step_s),
        spread=_spread(gather("forward_s")),
    )


def straggler(replays: Sequence[WindowReplay], job: TrainingJob) -> Straggler:
    """Averages over windows."""
    slowest = [replay.layer_s.max(axis=1) for replay in replays]
    return Straggler(
        mean_s=float(np.mean([each.mean() for each in slowest])),
        worst_s=float(np.mean([each.max() for each in slowest])),
        step_s=float(
            np.mean([step_seconds(replay.forward_s, replay.backward_s, job) for replay in replays])
        ),
    )


def step_seconds(forward_s: Float, backward_s: Float, job: TrainingJob) -> float:
    """Seconds of a step from the (GA, groups) times of one layer."""
    other = job.other_ms * 1e-3
    forward = forward_s * job.stage_layers + other * FORWARD_SHARE
    backward = backward_s * job.stage_layers + other * (1 - FORWARD_SHARE)
    if job.lockstep:
        forward, backward = forward.max(axis=1, keepdims=True), backward.max(axis=1, keepdims=True)
    return float(pipeline_seconds(forward, backward, job.pipeline_parallel_size).max())


def _spread(forward_s: Float) -> Spread:
    mean = float(forward_s.mean())
    least, p5, p95, most = np.percentile(forward_s, [0, 5, 95, 100]) / (mean or 1.0)
    return Spread(float(least), float(p5), float(p95), float(most), mean * 1e3)


def _over(number: float, base: float) -> float:
    return number / base if base else 1.0
