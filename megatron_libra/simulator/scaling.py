"""Throughput against DP at a fixed global batch (section 6.2). In: replays. Out: ScalingPoints.

Each curve is relative to its own DP = 1, where a pool is one sequence and nothing is exchanged
between replicas. P is the recommended one, or as much of it as divides a smaller DP.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.metrics import step_seconds
from megatron_libra.simulator.replay import ReplayTask, WindowReplay

__all__ = ["ScalingPoint", "scaling_points", "scaling_sizes", "scaling_task"]


@dataclass(frozen=True, slots=True)
class ScalingPoint:
    """One DP size."""

    data_parallel_size: int
    pool_size: int
    reference_step_ms: float
    step_ms: float
    reference_scaling: float
    """Throughput over that of DP = 1; the ideal is DP."""
    scaling: float


def scaling_sizes(job: TrainingJob) -> list[int]:
    """Powers of two that divide GBS, up to DP, and DP."""
    size = job.data_parallel_size
    powers = [1 << power for power in range(size.bit_length())]
    return sorted({p for p in powers if p <= size and job.global_batch_size % p == 0} | {size})


def scaling_task(task: ReplayTask, data_parallel_size: int) -> ReplayTask:
    """The same candidate and window with another DP."""
    pool_size = math.gcd(task.candidate.pool_size, data_parallel_size)
    return replace(
        task,
        job=replace(task.job, data_parallel_size=data_parallel_size),
        candidate=replace(task.candidate, pool_size=pool_size),
    )


def scaling_points(
    job: TrainingJob,
    pool_size: int,
    reference: Sequence[WindowReplay],
    replays: dict[int, list[WindowReplay]],
) -> tuple[ScalingPoint, ...]:
    """Points by ascending DP.

    Args:
        job: of the simulation.
        pool_size: the recommended P.
        reference: replays of pools of one sequence in the sampler's order; their times do not
            depend on DP, only which of them meet does.
        replays: the recommended candidate by DP, on the same windows.
    """
    steps: dict[int, tuple[float, float]] = {}
    for size in sorted(replays):
        sized = replace(job, data_parallel_size=size)
        steps[size] = (
            _mean(_step(each, size, sized) for each in reference),
            _mean(_step(each, size // math.gcd(pool_size, size), sized) for each in replays[size]),
        )
    first = steps[min(steps)]
    return tuple(
        ScalingPoint(
            data_parallel_size=size,
            pool_size=math.gcd(pool_size, size),
            reference_step_ms=slow * 1e3,
            step_ms=fast * 1e3,
            reference_scaling=first[0] / slow if slow else 1.0,
            scaling=first[1] / fast if fast else 1.0,
        )
        for size, (slow, fast) in steps.items()
    )


def _step(replay: WindowReplay, num_groups: int, job: TrainingJob) -> float:
    """Seconds of a step whose pools are dealt to this many worker groups, GA-major."""
    forward = replay.forward_s.reshape(-1, num_groups)
    return step_seconds(forward, replay.backward_s.reshape(-1, num_groups), job)


def _mean(values: Iterable[float]) -> float:
    listed = list(values)
    return sum(listed) / len(listed)
