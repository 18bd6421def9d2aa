"""The configurations that are tried. In: lists of values, or none. Out: candidates.

Defaults: P the divisors of DP up to 32; B three steps of two from L / (16 CP); H 1, 2, 4, 8 as far
as the heads allow; VRSP scope microbatch, and step or pipeline where sums over a step count.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from megatron_libra.config import CHOICES, LibraConfig, divisors
from megatron_libra.plan.heads import fit_chunks, fits
from megatron_libra.simulator.job import TrainingJob

__all__ = ["Candidate", "Grid", "references"]

MAX_POOL_SIZE = 32
NUM_BLOCK_SIZES = 3
HEAD_SPLITS = (1, 2, 4, 8)
SCOPES = ("off", *(scope for scope in CHOICES["vrsp_scope"] if scope != "auto"))


@dataclass(frozen=True, slots=True, order=True)
class Candidate:
    """One configuration; the order is the order of the fields."""

    pool_size: int
    """P."""
    block_size: int
    """B."""
    head_split: int
    """H."""
    chunks: int
    """M."""
    scope: str
    """What VRSP balances: microbatch, step or pipeline; off keeps the sampler's order."""
    placer: str

    def config(self, base: LibraConfig) -> LibraConfig:
        """The LibraConfig of this candidate; other fields as in base."""
        return replace(
            base,
            pool_size=self.pool_size,
            block_size=self.block_size,
            head_split=self.head_split,
            chunks=self.chunks,
            placer=self.placer,
            vrsp_scope="auto" if self.scope == "off" else self.scope,  # type: ignore[arg-type]
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """Values to combine; an empty one means the default of the job."""

    pool_sizes: Sequence[int] = ()
    block_sizes: Sequence[int] = ()
    head_splits: Sequence[int] = ()
    scopes: Sequence[str] = ()
    placers: Sequence[str] = ("home_first",)

    def candidates(self, job: TrainingJob, base: LibraConfig) -> list[Candidate]:
        """Every combination that the job allows, ascending.

        Raises:
            ValueError: a value that was asked for breaks a rule, or nothing is left.
        """
        found = {
            Candidate(
                pool, block, heads, fit_chunks(job.shape, heads, base.most_chunks), scope, placer
            )
            for pool, block, heads, scope, placer in product(
                self._pool_sizes(job),
                self._block_sizes(job),
                self._head_splits(job),
                self._scopes(job),
                self._placers(),
            )
        }
        return sorted(found)

    def _pool_sizes(self, job: TrainingJob) -> list[int]:
        allowed = divisors(job.data_parallel_size)
        for size in self.pool_sizes:
            if size not in allowed:
                raise ValueError(
                    f"pool_size ({size}) must divide data_parallel_size "
                    f"({job.data_parallel_size}); try {allowed}."
                )
        return list(self.pool_sizes) or [size for size in allowed if size <= MAX_POOL_SIZE]

    def _block_sizes(self, job: TrainingJob) -> list[int]:
        for size in self.block_sizes:
            if size < 1:
                raise ValueError(f"block_size ({size}) must be at least 1 token; try 4096.")
        smallest = max(1, job.seq_length // (16 * job.context_parallel_size))
        return list(self.block_sizes) or [smallest << step for step in range(NUM_BLOCK_SIZES)]

    def _head_splits(self, job: TrainingJob) -> list[int]:
        for heads in self.head_splits:
            LibraConfig(head_split=heads, chunks=1).check_shape(job.shape)
        return list(self.head_splits) or [h for h in HEAD_SPLITS if fits(job.shape, h, 1)]

    def _scopes(self, job: TrainingJob) -> list[str]:
        for scope in self.scopes:
            if scope not in SCOPES:
                raise ValueError(f"scope ({scope!r}) must be one of {', '.join(SCOPES)}.")
        if self.scopes and set(self.scopes) == {"off"}:
            raise ValueError(
                "scope off keeps the sampler's order, which is here for comparison only; add "
                "scope microbatch."
            )
        return list(self.scopes) or _default_scopes(job)

    def _placers(self) -> list[str]:
        for placer in self.placers:
            if placer not in CHOICES["placer"]:
                raise ValueError(
                    f"placer ({placer!r}) must be one of {', '.join(CHOICES['placer'])}."
                )
        return list(self.placers)


def _default_scopes(job: TrainingJob) -> list[str]:
    if job.lockstep or job.num_microbatches == 1:
        return ["microbatch"]
    return ["microbatch", "step" if job.pipeline_parallel_size == 1 else "pipeline"]


def references(job: TrainingJob, base: LibraConfig) -> dict[str, Candidate]:
    """What candidates are compared with, on the sampler's order and pools of one sequence.

    ulysses (left out where CP does not divide the query heads) and home, the context parallelism
    that gathers K and V; the first entry is the one that speedups refer to.
    """
    found: dict[str, Candidate] = {}
    size = job.context_parallel_size
    whole = max(1, job.seq_length // (2 * size))
    if fits(job.shape, size, 1):
        chunks = fit_chunks(job.shape, size, base.most_chunks)
        found["ulysses"] = Candidate(1, whole, size, chunks, "off", "ulysses")
    chunks = fit_chunks(job.shape, 1, base.most_chunks)
    found["home"] = Candidate(1, whole, 1, chunks, "off", "home")
    return found
