"""Which jobs `libra simulate` can replay. In: a job, its candidates. Out: a refusal, or nothing.

Limits are those of one plan, as for POOL.json, and of a corpus that is made.
"""

from __future__ import annotations

from collections.abc import Sequence

from megatron_libra.cli.pool_size import (
    MAX_CELLS,
    MAX_TILES,
    MAX_WORKERS,
    blocks_of,
    check_tokens,
    check_workers,
    pieces_of,
)
from megatron_libra.config import MAX_INTEGER
from megatron_libra.simulator.candidates import Candidate
from megatron_libra.simulator.corpus import PRESET_STEPS
from megatron_libra.simulator.job import TrainingJob

__all__ = ["MAX_COUNT", "check_candidates", "check_preset"]

MAX_COUNT = 100_000
"""Of steps, finalists, layers: a choice of more means nothing but hours."""
MAX_SEQUENCES = 2**18
"""Packed sequences that are made of a preset: 20 s before the first plan."""


def check_preset(global_batch_size: int, num_sequences: int | None) -> None:
    """Refuse a preset corpus that takes hours to make.

    Args:
        global_batch_size: GBS.
        num_sequences: what --sequences says; None: PRESET_STEPS global batches.

    Raises:
        ValueError: too many packed sequences.
    """
    count = num_sequences or PRESET_STEPS * global_batch_size
    if count > MAX_SEQUENCES and num_sequences is None:
        raise ValueError(
            f"--gbs ({global_batch_size}) x {PRESET_STEPS} steps are {count} packed sequences; at "
            f"most {MAX_SEQUENCES} are made of a preset; try --gbs "
            f"{MAX_SEQUENCES // PRESET_STEPS}."
        )
    if count > MAX_SEQUENCES:
        raise ValueError(
            f"--sequences ({count}) must be at most {MAX_SEQUENCES}; try {MAX_SEQUENCES}, or leave "
            "it out."
        )


def check_candidates(job: TrainingJob, candidates: Sequence[Candidate]) -> None:
    """Refuse pools that take minutes and gigabytes to plan.

    Args:
        job: that is simulated.
        candidates: all that shall be tried.

    Raises:
        ValueError: too many workers, tokens, tiles or cells of a pool.
    """
    # the largest first: what its refusal suggests then holds for all
    for candidate in sorted(candidates, key=lambda c: (-c.pool_size, -c.head_split, c)):
        _check_pool(job, candidate)


def _check_pool(job: TrainingJob, candidate: Candidate) -> None:
    size, cp = candidate.pool_size, job.context_parallel_size
    workers, tokens = size * cp, size * job.seq_length
    check_workers(workers, f"P = {size} sequences x --cp ({cp})", _smaller(MAX_WORKERS // cp))
    check_tokens(
        tokens,
        f"P = {size} sequences of --seq-length ({job.seq_length})",
        _smaller(MAX_INTEGER // job.seq_length),
    )
    blocks = blocks_of(size, job.seq_length, candidate.block_size, cp)
    most = min(MAX_TILES // candidate.head_split, MAX_CELLS // workers)
    if blocks <= most:
        return
    pieces = pieces_of(most, size, cp)
    way_out = f"try {job.seq_length // pieces + 1}" if pieces > 0 else "use a smaller --cp or P"
    raise ValueError(
        f"--block-sizes ({candidate.block_size}) makes about {blocks} blocks of a pool of P = "
        f"{size} on {workers} workers; at most {most} are planned with H = "
        f"{candidate.head_split}; {way_out}."
    )


def _smaller(limit: int) -> str:
    """A way out: sizes of P up to a limit."""
    return f"try --pool-sizes {limit} or less" if limit > 0 else "use a smaller --seq-length"
