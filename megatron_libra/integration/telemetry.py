"""How balanced each iteration was. In: plans of a rank's microbatches. Out: a line an iteration.

Each pool's coordinator (and the last rank, where Megatron logs) keeps six numbers a microbatch.
At every log interval they meet in one small gloo all-gather; the last rank writes them to stdout,
to TensorBoard and W&B if Megatron has them open, and to a file of JSON lines if one was asked
for.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_libra.data.sampler import ReplicaLayout, Window
from megatron_libra.integration.plan_stream import PlannedBatch
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.vrsp import attention_work

if TYPE_CHECKING:
    from megatron_libra.integration.groups import RunGroups

__all__ = ["IterationReport", "Telemetry", "measure", "order_imbalance", "summarize"]

Float64 = NDArray[np.float64]
COARSE = 0.1
"""Imbalance inside pools above which the report says what to change."""
NUM_COLUMNS = 6
TOTAL, LARGEST, LARGEST_AT_HOME, BYTES, PLAN_MS, WAIT_MS = range(NUM_COLUMNS)


@dataclass(frozen=True, slots=True, kw_only=True)
class IterationReport:
    """One iteration of the whole job. Imbalances are max / mean - 1."""

    iteration: int
    inter_pool_imbalance_before: float
    """Over the pools of the iteration, if they were filled in Megatron's sample order."""
    inter_pool_imbalance: float
    """Over the pools of the iteration, as they were filled."""
    step_imbalance: float
    """Over the worker groups: each one's pools, summed over its microbatches."""
    intra_pool_imbalance_before: float
    """Over the workers of a pool, if every tile stayed at home; mean over the pools."""
    intra_pool_imbalance: float
    """Over the workers of a pool, as placed; mean over the pools."""
    exchanged_bytes: int
    """Bytes that left workers in one layer's forward, of one tensor-parallel rank."""
    straggler_pairs: int
    """Pairs of one query head: each microbatch's largest load over all workers, summed. A job waits
    for them whose replicas meet in every microbatch, as experts spread over replicas do."""
    step_straggler_pairs: int
    """Pairs of one query head: the sum of a pool's largest loads over a worker group's
    microbatches, of the slowest group. A job waits for them whose replicas meet at the gradient
    sync only."""
    mean_pairs: int
    """The same for the mean load: what a perfect balance would wait for."""
    plan_ms: float
    """Milliseconds that a plan took to make, in the background; the longest."""
    plan_wait_ms: float
    """Milliseconds that a microbatch waited for its plan; the longest."""
    losses: dict[str, float]
    """Megatron's losses of the iteration; empty unless reports go to a file."""

    def scalars(self) -> dict[str, float]:
        """For TensorBoard and W&B."""
        return {
            name: value for name, value in asdict(self).items() if isinstance(value, int | float)
        }

    def line(self) -> str:
        """For stdout."""
        return (
            f" [libra] iteration {self.iteration:8d} |"
            f" inter-pool imbalance: {self.inter_pool_imbalance_before:.3f}"
            f" -> {self.inter_pool_imbalance:.3f} (of the step {self.step_imbalance:.3f}) |"
            f" intra-pool imbalance: {self.intra_pool_imbalance_before:.3f}"
            f" -> {self.intra_pool_imbalance:.3f} |"
            f" exchanged MB per layer: {self.exchanged_bytes / 1e6:.2f} |"
            f" straggler pairs: {self.straggler_pairs:.4E} (of the step"
            f" {self.step_straggler_pairs:.4E}, mean {self.mean_pairs:.4E}) |"
            f" plan (ms): {self.plan_ms:.1f}, waited: {self.plan_wait_ms:.1f} |"
        )

    def hint(self) -> str | None:
        """What to change if pools stay uneven; None if they do not."""
        if self.intra_pool_imbalance <= COARSE:
            return None
        return (
            f" [libra] pools stay {self.intra_pool_imbalance:.0%} uneven: tiles are coarse for the "
            "longest samples; raise --libra-head-split or lower --libra-block-size "
            "(libra simulate recommends both)."
        )


def measure(plan: PoolPlan, plan_ms: float, wait_ms: float) -> Float64:
    """(6,) numbers of a pool's microbatch. Pairs are of one query head; shards share them."""
    shards = plan.config.head_split
    traffic = plan.traffic_bytes
    row = np.zeros(NUM_COLUMNS)
    row[TOTAL] = plan.loads.sum() / shards
    row[LARGEST] = plan.loads.max() / shards
    row[LARGEST_AT_HOME] = plan.home_loads.max() / shards
    row[BYTES] = traffic.sum() - traffic.trace()
    row[PLAN_MS] = plan_ms
    row[WAIT_MS] = wait_ms
    return row


def order_imbalance(window: Window) -> float:
    """max / mean - 1 of the work of a step's pools, if Megatron's order filled them."""
    by_sample = sorted(zip(window.samples, window.sequences, strict=True))
    work = np.array([attention_work(lengths) for _, lengths in by_sample], np.float64)
    pools = work.reshape(-1, window.layout.pool_size).sum(axis=1)
    return _excess(pools.max(), pools.mean())


def summarize(
    iteration: int,
    rows: Float64,
    num_workers: int,
    imbalance_before: float,
    losses: Mapping[str, float],
) -> IterationReport:
    """One iteration from (pools, microbatches, 6) rows."""
    total = rows[..., TOTAL]
    mean_load = total / num_workers
    of_groups = total.sum(axis=1)
    return IterationReport(
        iteration=iteration,
        inter_pool_imbalance_before=imbalance_before,
        inter_pool_imbalance=_excess(total.max(), total.mean()),
        step_imbalance=_excess(of_groups.max(), of_groups.mean()),
        intra_pool_imbalance_before=_mean_excess(rows[..., LARGEST_AT_HOME], mean_load),
        intra_pool_imbalance=_mean_excess(rows[..., LARGEST], mean_load),
        exchanged_bytes=int(rows[..., BYTES].sum()),
        straggler_pairs=int(rows[..., LARGEST].max(axis=0).sum()),
        step_straggler_pairs=int(rows[..., LARGEST].sum(axis=1).max()),
        mean_pairs=int(total.mean(axis=0).sum() / num_workers),
        plan_ms=float(rows[..., PLAN_MS].max()),
        plan_wait_ms=float(rows[..., WAIT_MS].max()),
        losses=dict(losses),
    )


def _excess(largest: float, mean: float) -> float:
    return float(largest / mean - 1) if mean else 0.0


def _mean_excess(largest: Float64, mean: Float64) -> float:
    pairs = zip(largest.ravel(), mean.ravel(), strict=True)
    return float(np.mean([_excess(*pair) for pair in pairs]))


class Telemetry:
    """Collects on the ranks that report, prints on the last."""

    def __init__(
        self, replicas: ReplicaLayout, context_parallel_size: int, log_file: str | None
    ) -> None:
        self._num_workers = replicas.pool_size * context_parallel_size
        self._num_pools = replicas.data_parallel_size // replicas.pool_size
        self._log_file = Path(log_file) if log_file else None
        self._groups: RunGroups | None = None
        self._windows: Iterator[Window] = iter(())
        self._microbatches: list[Float64] = []
        self._iterations: list[tuple[int, int, Mapping[str, Any]]] = []
        self._rows: list[Float64] = []
        self.has_hinted = False
        """The hint was printed; once a run is enough."""

    def connect(self, groups: RunGroups) -> None:
        """Learn whether this rank reports."""
        self._groups = groups if dist.get_rank() in groups.report_ranks else None

    def watch(self, windows: Iterator[Window]) -> None:
        """The steps to come, on ranks that know the lengths."""
        self._windows = windows

    def observe(self, planned: PlannedBatch) -> None:
        """One more microbatch of the iteration."""
        if self._groups is not None:
            self._microbatches.append(measure(planned.plan, planned.plan_ms, planned.wait_ms))

    def end_iteration(self, iteration: int, losses: Mapping[str, Any]) -> None:
        """The microbatches since the last call were this iteration's. Local.

        Args:
            iteration: number of the iteration, from 1.
            losses: Megatron's loss tensors; empty but on the last pipeline stage.
        """
        if self._groups is None:
            return
        self._iterations.append((iteration, len(self._microbatches), losses))
        self._rows += self._microbatches
        self._microbatches = []

    def flush(self) -> list[IterationReport]:
        """Exchange what was collected. Collective: every rank that reports, at the same iteration.

        Returns:
            The iterations since the last flush on the last rank, none on the others.
        """
        if self._groups is None or not self._iterations:
            return []
        before = [
            order_imbalance(w) if (w := next(self._windows, None)) else 0.0
            for _ in self._iterations
        ]
        mine = np.concatenate([before, *self._rows])
        gathered = _all_gather(mine, self._groups)
        iterations, self._iterations, self._rows = self._iterations, [], []
        if dist.get_rank() != self._groups.report_ranks[-1]:
            return []
        reports = self._summarize(iterations, gathered)
        self._append(reports)
        return reports

    def _summarize(
        self, iterations: Sequence[tuple[int, int, Mapping[str, Any]]], gathered: Float64
    ) -> list[IterationReport]:
        before = gathered[0, : len(iterations)]
        # The last rank is one of a pool whose coordinator is there as well, or is that coordinator.
        rows = gathered[: self._num_pools, len(iterations) :].reshape(
            self._num_pools, -1, NUM_COLUMNS
        )
        reports, start = [], 0
        for (iteration, count, losses), imbalance in zip(iterations, before, strict=True):
            part = rows[:, start : start + count]
            start += count
            # Reading a loss waits for the device, so only the file, which holds it, asks for it.
            values = {} if self._log_file is None else {n: float(x) for n, x in losses.items()}
            reports.append(summarize(iteration, part, self._num_workers, float(imbalance), values))
        return reports

    def _append(self, reports: Sequence[IterationReport]) -> None:
        if self._log_file is not None:
            with self._log_file.open("a", encoding="utf-8") as file:
                file.writelines(json.dumps(asdict(report)) + "\n" for report in reports)


def _all_gather(mine: Float64, groups: RunGroups) -> Float64:
    local = torch.from_numpy(mine)
    if groups.report is None:
        return mine[None]
    everyone = [torch.empty_like(local) for _ in groups.report_ranks]
    dist.all_gather(everyone, local, group=groups.report)
    return torch.stack(everyone).numpy()
