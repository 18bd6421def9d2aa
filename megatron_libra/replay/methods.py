"""The systems that a replay compares (section 6.1). In: a job, choices. Out: Methods, their pools.

Every method is a rule for pools and a LibraConfig for their plans, so that all run through the same
plans, kernels and exchange; what differs is the placement. One optimizer step is a window of GBS
packed sequences; one GA index of it is a microbatch, whose pools run at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from megatron_libra.bench.comparison import ALGORITHM_2, paper_block_size
from megatron_libra.bench.planners.wlb import TOKEN_LIMIT, repack
from megatron_libra.config import CHOICES, LibraConfig, divisors
from megatron_libra.data.rows import LengthRows
from megatron_libra.plan.layout import round_up
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from megatron_libra.plan.vrsp import attention_work, order_window
from megatron_libra.simulator.job import TrainingJob

__all__ = ["FIGURE_13", "METHODS", "Method", "PoolTask", "bound_of", "methods_of", "pools_of"]

SCOPES = tuple(scope for scope in CHOICES["vrsp_scope"] if scope != "auto")
Sequences = tuple[tuple[int, ...], ...]
DISTCA_BLOCKS = 1024
"""Blocks of a packed sequence where tasks are tokens of all heads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """One system."""

    name: str
    title: str
    """As tables print it."""
    config: LibraConfig
    """P, B, H, M, tau and placer of its pools."""
    scope: str = "off"
    """What VRSP balances; off keeps the sampler's order."""
    is_overlapped: bool = True
    """The exchange runs under the computation; else first it, then the computation, then the way
    back."""
    is_repacked: bool = False
    """Documents of the window are packed again (WLB-LLM)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolTask:
    """One pool of one microbatch of a method, before it is planned."""

    method: str
    """Name of the method."""
    window: int
    microbatch: int
    """GA index."""
    pool: int
    """Number of the pool inside the microbatch."""
    sequences: Sequences
    seq_length: int
    job: TrainingJob
    config: LibraConfig

    @property
    def identity(self) -> PoolTask:
        """Equal for tasks with equal plans and nodes, whatever they are for."""
        job = replace(self.job, data_parallel_size=1, global_batch_size=1)
        return replace(self, method="", window=0, microbatch=0, pool=0, job=job)

    def plan(self) -> PoolPlan:
        """The plan of the pool."""
        return plan_pool(
            self.sequences,
            context_parallel_size=self.job.context_parallel_size,
            shape=self.job.shape,
            config=self.config,
            seq_length=self.seq_length,
        )


def ulysses(job: TrainingJob, base: LibraConfig) -> Method:
    """Whole sequences x CP head shards inside each CP group."""
    config = replace(base, pool_size=1, block_size=job.seq_length, head_split=1, placer="ulysses")
    return Method(name="ulysses", title="Ulysses", config=config)


def wlb(job: TrainingJob, base: LibraConfig) -> Method:
    """WLB-LLM's packing without deferral, re-implemented: documents of a whole window, Ulysses
    inside each CP group; like work shares a microbatch, so that outliers slow down one of them.
    """
    config = ulysses(job, base).config
    return Method(name="wlb", title="WLB-LLM (re-implemented)", config=config, is_repacked=True)


def distca(job: TrainingJob, base: LibraConfig) -> Method:
    """DistCA's scope: one pool of all replicas, tiles of all heads as fine as tokens nearly are,
    placed by our placer, with our overlap.
    """
    config = replace(
        base,
        pool_size=job.data_parallel_size,
        block_size=max(1, job.seq_length // DISTCA_BLOCKS),
        head_split=1,
    )
    return Method(name="distca", title="DistCA's scope (P = DP, H 1)", config=config)


def algorithm_2(job: TrainingJob, base: LibraConfig) -> Method:
    """The paper's own choices: Algorithm 2, H 1, tau 0.03, M 4, whole samples' K and V."""
    config = replace(
        base,
        block_size=paper_block_size(job.seq_length),
        head_split=1,
        chunks=4,
        **ALGORITHM_2,
    )
    title = f"Libra as in the paper (Algorithm 2, B {config.block_size} H 1)"
    return Method(name="paper", title=title, config=config, scope="microbatch")


def tap(job: TrainingJob, base: LibraConfig) -> Method:
    """Tiled attention pooling alone: pools in the sampler's order, no overlap."""
    config = replace(base, chunks=1)
    return Method(name="tap", title="Libra TAP", config=config, is_overlapped=False)


def tap_vrsp(job: TrainingJob, base: LibraConfig) -> Method:
    """With Algorithm 1, still no overlap."""
    return replace(tap(job, base), name="tap_vrsp", title="Libra TAP + VRSP", scope="microbatch")


def libra(job: TrainingJob, base: LibraConfig) -> Method:
    """Everything."""
    return Method(name="libra", title="Libra", config=base, scope="microbatch")


METHODS = {each.__name__: each for each in (ulysses, wlb, distca, tap, tap_vrsp, libra)} | {
    "paper": algorithm_2
}
"""By name; `paper` is not in Figure 13 and must be asked for."""
FIGURE_13 = ("ulysses", "wlb", "distca", "tap", "tap_vrsp", "libra")


def methods_of(
    names: Sequence[str], job: TrainingJob, base: LibraConfig, scope: str = "microbatch"
) -> list[Method]:
    """Methods by name, in this order; the scope is that of VRSP where a method uses it.

    Raises:
        ValueError: an unknown name or scope, or P does not divide DP.
    """
    for name in names:
        if name not in METHODS:
            raise ValueError(f"method {name!r} must be one of {', '.join(METHODS)}.")
    if scope not in SCOPES:
        raise ValueError(f"scope ({scope!r}) must be one of {', '.join(SCOPES)}.")
    if job.data_parallel_size % base.pool_size:
        raise ValueError(
            f"pool_size ({base.pool_size}) must divide data_parallel_size "
            f"({job.data_parallel_size}); try one of {divisors(job.data_parallel_size)}."
        )
    found = [METHODS[name](job, base) for name in dict.fromkeys(names)]
    return [each if each.scope == "off" else replace(each, scope=scope) for each in found]


def pools_of(method: Method, window: LengthRows, job: TrainingJob, number: int) -> list[PoolTask]:
    """All pools of a window, GA-major; `number` is the window's."""
    sequences = _repacked(window, job) if method.is_repacked else list(window)
    size = method.config.pool_size
    order = _order(method, sequences, job)
    count = job.data_parallel_size // size
    tasks = []
    for at in range(0, len(order), size):
        members = tuple(sequences[i] for i in order[at : at + size])
        microbatch, pool = divmod(at // size, count)
        tasks.append(
            PoolTask(
                method=method.name,
                window=number,
                microbatch=microbatch,
                pool=pool,
                sequences=members,
                seq_length=_seq_length(members, job),
                job=job,
                config=method.config,
            )
        )
    return tasks


def _order(method: Method, sequences: list[tuple[int, ...]], job: TrainingJob) -> Sequence[int]:
    if method.scope == "off":
        return range(len(sequences))
    return order_window(
        sequences,
        pool_size=method.config.pool_size,
        data_parallel_size=job.data_parallel_size,
        scope=method.scope,
    ).order


def _repacked(window: LengthRows, job: TrainingJob) -> list[tuple[int, ...]]:
    """As many sequences of about equal work, the heaviest ones first."""
    documents = [int(length) for length in window.flat if length]
    packs = repack(documents, len(window), int(TOKEN_LIMIT * job.seq_length))
    return sorted((tuple(pack) for pack in packs), key=attention_work, reverse=True)


def _seq_length(sequences: Sequences, job: TrainingJob) -> int:
    """L, or what a repacked sequence needs above it."""
    longest = max(map(sum, sequences))
    return round_up(max(longest, job.seq_length), 2 * job.context_parallel_size)


def bound_of(window: LengthRows, job: TrainingJob, method: Method) -> tuple[float, float]:
    """(mean, worst) straggler speedup over Ulysses if pools were balanced perfectly and the
    exchange were free: the heaviest sequence of a microbatch over the heaviest pool's mean.
    """
    work = np.array([attention_work(row) for row in window], np.float64)
    before = work.reshape(job.num_microbatches, -1).max(axis=1)
    order = np.array(_order(method, list(window), job))
    pools = work[order].reshape(job.num_microbatches, -1, method.config.pool_size)
    after = pools.mean(axis=2).max(axis=1)
    return float(before.mean() / after.mean()), float(before.max() / after.max())
