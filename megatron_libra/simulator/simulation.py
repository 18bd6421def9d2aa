"""Everything a simulation found, as data. Made by search.py, read by tune.py and report.py."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_libra.config import LibraConfig
from megatron_libra.data.rows import LengthRows
from megatron_libra.data.summary import LengthSummary, SkewSummary
from megatron_libra.simulator.corpus import LengthHistogram
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.example import ExamplePool
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.metrics import CandidateResult
from megatron_libra.simulator.scaling import ScalingPoint
from megatron_libra.simulator.skew import PoolSkew

__all__ = ["Recommendation", "Sampling", "Simulation"]


@dataclass(frozen=True, slots=True)
class Sampling:
    """What was computed on all optimizer steps, and what on a sample of them."""

    num_windows: int
    """Whole optimizer steps of the corpus; VRSP ran on all of them."""
    screened_windows: tuple[int, ...]
    """Steps on which every candidate was planned."""
    planned_windows: tuple[int, ...]
    """Steps on which the finalists were planned; begins with the screened ones."""
    num_candidates: int
    num_finalists: int
    seed: int
    """Of the choice of windows."""

    @property
    def sentence(self) -> str:
        """For every output."""
        if len(self.screened_windows) == self.num_windows:
            return f"VRSP and every plan on all {self.num_windows} steps; nothing is sampled."
        return (
            f"VRSP on all {self.num_windows} steps. Plans on a sample, drawn with seed "
            f"{self.seed}: all {self.num_candidates} candidates on "
            f"{_steps(len(self.screened_windows))}, the {self.num_finalists} fastest and most "
            f"different on {_steps(len(self.planned_windows))}."
        )


@dataclass(frozen=True, slots=True)
class Recommendation:
    """The configuration to train with."""

    result: CandidateResult
    reasons: tuple[str, ...]
    """Plain sentences; warnings last."""


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """The answer of `libra simulate`."""

    corpus_name: str
    packing: str
    lengths: LengthSummary
    histogram: LengthHistogram
    sequences: SkewSummary
    job: TrainingJob
    base: LibraConfig
    model: CostModel
    sampling: Sampling
    skew: tuple[PoolSkew, ...]
    """By (P, scope), over all steps."""
    references: dict[str, CandidateResult]
    """The first one is what speedups refer to; on all planned steps."""
    finalists: tuple[CandidateResult, ...]
    """Fastest step first, on all planned steps."""
    screened: tuple[CandidateResult, ...]
    """Every candidate, fastest step first, on the screened steps only."""
    recommendation: Recommendation
    scaling: tuple[ScalingPoint, ...]
    forward_ms: dict[str, tuple[float, ...]]
    """Forward of one layer of every planned microbatch: of the reference, and recommended."""
    example: ExamplePool
    window: LengthRows
    """Packed sequences of the first planned step, for pictures."""

    @property
    def reference_name(self) -> str:
        """What speedups refer to: ulysses, or home where Ulysses cannot split the heads."""
        return next(iter(self.references))

    def skew_of(self, pool_size: int, scope: str) -> PoolSkew:
        """The skew of one (P, scope)."""
        return next(s for s in self.skew if (s.pool_size, s.scope) == (pool_size, scope))


def _steps(count: int) -> str:
    return f"{count} step" + "s" * (count != 1)
