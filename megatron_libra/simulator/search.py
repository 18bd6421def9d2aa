"""Simulate a corpus. In: corpus, job, grid, cost model. Out: Simulation.

    all steps       VRSP for every (P, scope)                             exact
    a few steps     a plan of every pool for every candidate              screening
    more steps      the same for the fastest candidates                   finalists
    the winner      DP scaling, one pool to look at

The steps that are planned are drawn at random, the same ones for every candidate and for the
references, so candidates are compared on equal data; a simulation says what it sampled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from megatron_libra.config import LibraConfig
from megatron_libra.data.summary import summarize_lengths, summarize_skew
from megatron_libra.simulator.candidates import Candidate, Grid, references
from megatron_libra.simulator.corpus import Corpus, LengthHistogram
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.example import example_pool
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.metrics import CandidateResult, evaluate
from megatron_libra.simulator.processes import TaskPool
from megatron_libra.simulator.replay import ReplayTask, WindowReplay, replay_window
from megatron_libra.simulator.scaling import (
    ScalingPoint,
    scaling_points,
    scaling_sizes,
    scaling_task,
)
from megatron_libra.simulator.simulation import Sampling, Simulation
from megatron_libra.simulator.skew import PoolSkew, measure_windows, pool_skew, skew_tasks
from megatron_libra.simulator.tune import recommend

__all__ = ["Effort", "Progress", "simulate"]

Progress = Callable[[str, int, int], None]
"""Called with a stage's name, its finished tasks and all its tasks."""
SKEW_TASKS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much is planned."""

    screened_windows: int = 1
    """Steps on which every candidate is planned."""
    planned_windows: int = 4
    """Steps on which the finalists are planned."""
    finalists: int = 8
    """Fastest candidates of the screening; the fastest of each P are added."""
    max_kv_gib: float | None = None
    """Most K and V of a layer that a worker may hold, in GiB."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("screened_windows", "planned_windows", "finalists"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} ({getattr(self, name)}) must be at least 1; try 1.")
        if self.max_kv_gib is not None and not self.max_kv_gib > 0:
            raise ValueError(f"max_kv_gib ({self.max_kv_gib:g}) must be above 0; leave it out.")


def simulate(
    corpus: Corpus,
    job: TrainingJob,
    *,
    grid: Grid,
    base: LibraConfig,
    model: CostModel,
    effort: Effort,
    tasks: TaskPool,
    progress: Progress = lambda stage, finished, total: None,
) -> Simulation:
    """Replay VRSP and plans over a corpus and recommend a configuration.

    Args:
        corpus: packed sequences in sampler order.
        job: parallel sizes and heads.
        grid: the candidates.
        base: choices that are not searched: tau, M, kv_fetch, layout, backward_kv.
        model: predicts times.
        effort: how many steps are planned.
        tasks: the processes that work.
        progress: told about finished tasks.

    Raises:
        ValueError: the corpus is shorter than a step, or the grid breaks a rule of the job.
    """
    run = _Run(corpus, job, base, model, effort, tasks, progress)
    candidates = grid.candidates(job, base)
    skew = run.skew(candidates)
    known = references(job, base)
    run.replay("references", list(known.values()), run.sampling.planned_windows)
    run.replay("screening", candidates, run.sampling.screened_windows)
    screened = run.results(candidates, run.sampling.screened_windows)
    finalists = _finalists(screened, effort.finalists)
    run.replay("finalists", finalists, run.sampling.planned_windows)
    results = run.results(finalists, run.sampling.planned_windows)
    return run.simulation(skew, known, screened, results)


class _Run:
    """Inputs, and the replays so far by (candidate, window)."""

    def __init__(
        self,
        corpus: Corpus,
        job: TrainingJob,
        base: LibraConfig,
        model: CostModel,
        effort: Effort,
        tasks: TaskPool,
        progress: Progress,
    ) -> None:
        self.corpus, self.job, self.base, self.model = corpus, job, base, model
        self.effort, self.tasks, self.progress = effort, tasks, progress
        self.replays: dict[Candidate, dict[int, WindowReplay]] = {}
        self.reference = next(iter(references(job, base).values()))
        count = corpus.num_windows(job.global_batch_size)
        drawn = np.random.default_rng(effort.seed).permutation(count).tolist()
        planned = tuple(drawn[: max(effort.planned_windows, effort.screened_windows)])
        self.sampling = Sampling(
            count, planned[: effort.screened_windows], planned, 0, 0, effort.seed
        )

    def skew(self, candidates: list[Candidate]) -> list[PoolSkew]:
        """VRSP on all windows for every (P, scope)."""
        keys = tuple(sorted({(each.pool_size, each.scope) for each in candidates}))
        per_task = -(-self.sampling.num_windows // SKEW_TASKS)
        parts = skew_tasks(self.corpus.rows, self.job, keys, per_task)
        return pool_skew(self.tasks.run(measure_windows, parts, self._told("VRSP")), keys)

    def task(self, candidate: Candidate, window: int) -> ReplayTask:
        rows = self.corpus.window(window, self.job.global_batch_size)
        return ReplayTask(rows, self.job, candidate, self.base, self.model)

    def replay(self, stage: str, candidates: list[Candidate], windows: tuple[int, ...]) -> None:
        """Plan candidates on windows, but never twice."""
        missing = [
            (candidate, window)
            for window in windows
            for candidate in candidates
            if window not in self.replays.get(candidate, {})
        ]
        found = self.tasks.run(
            replay_window, [self.task(*each) for each in missing], self._told(stage)
        )
        for (candidate, window), each in zip(missing, found, strict=True):
            self.replays.setdefault(candidate, {})[window] = each

    def results(
        self, candidates: list[Candidate], windows: tuple[int, ...]
    ) -> list[CandidateResult]:
        """Fastest step first; all on the same windows, and so is the reference."""
        other = [self.replays[self.reference][window] for window in windows]
        found = [
            evaluate(each, [self.replays[each][window] for window in windows], other, self.job)
            for each in candidates
        ]
        return sorted(found, key=lambda r: (r.step_ms, r.candidate))

    def simulation(
        self,
        skew: list[PoolSkew],
        known: dict[str, Candidate],
        screened: list[CandidateResult],
        finalists: list[CandidateResult],
    ) -> Simulation:
        """Recommend, look closer at the recommended candidate, and collect everything."""
        windows = self.sampling.planned_windows
        references = {name: self.results([known[name]], windows)[0] for name in known}
        name = next(iter(known))
        chosen = recommend(
            finalists,
            screened,
            skew,
            references[name],
            windows=windows,
            max_kv_gib=self.effort.max_kv_gib,
        )
        best, rows = chosen.result.candidate, self.corpus.rows
        return Simulation(
            corpus_name=self.corpus.name,
            packing=self.corpus.packing,
            lengths=summarize_lengths(rows.flat),
            histogram=LengthHistogram.of(rows.flat, self.job.seq_length),
            sequences=summarize_skew(rows, self.job.seq_length),
            job=self.job,
            base=self.base,
            model=self.model,
            sampling=replace(
                self.sampling, num_candidates=len(screened), num_finalists=len(finalists)
            ),
            skew=tuple(skew),
            references=references,
            finalists=tuple(finalists),
            screened=tuple(screened),
            recommendation=chosen,
            scaling=self._scaling(best),
            forward_ms={name: self._forward_ms(self.reference), "libra": self._forward_ms(best)},
            example=example_pool(
                self.task(best, windows[0]), self.task(self.reference, windows[0])
            ),
            window=self.corpus.window(windows[0], self.job.global_batch_size),
        )

    def _scaling(self, best: Candidate) -> tuple[ScalingPoint, ...]:
        windows = self.sampling.planned_windows
        sizes = scaling_sizes(self.job)
        asked = [
            scaling_task(self.task(best, window), size) for size in sizes for window in windows
        ]
        found = self.tasks.run(replay_window, asked, self._told("DP scaling"))
        replays = {
            size: found[at * len(windows) : (at + 1) * len(windows)]
            for at, size in enumerate(sizes)
        }
        slow = [self.replays[self.reference][window] for window in windows]
        return scaling_points(self.job, best.pool_size, slow, replays)

    def _forward_ms(self, candidate: Candidate) -> tuple[float, ...]:
        replays = self.replays[candidate].values()
        return tuple(np.concatenate([each.forward_s.ravel() for each in replays]) * 1e3)

    def _told(self, stage: str) -> Callable[[int, int], None]:
        return lambda finished, total: self.progress(stage, finished, total)


def _finalists(screened: list[CandidateResult], count: int) -> list[Candidate]:
    """The fastest candidates, and the fastest of each (P, scope, placer)."""
    ranked = [result.candidate for result in screened]
    fastest = {(each.pool_size, each.scope, each.placer): each for each in reversed(ranked)}
    return sorted({*ranked[:count], *fastest.values()})
