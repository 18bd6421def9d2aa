"""Which pools `libra bench plans` can plan. In: the job of --lengths. Out: a refusal, or nothing.

Limits are those of one plan, as for POOL.json, with the finest tiles of the tables.
"""

from __future__ import annotations

from megatron_libra.bench.comparison import CHOICES
from megatron_libra.cli.pool_size import (
    MAX_TILES,
    MAX_WORKERS,
    blocks_of,
    check_tiles,
    check_tokens,
    check_workers,
    pieces_of,
)
from megatron_libra.config import MAX_INTEGER
from megatron_libra.simulator.job import TrainingJob

__all__ = ["check_job"]


def check_job(job: TrainingJob) -> None:
    """Refuse pools that take minutes and gigabytes to plan.

    Args:
        job: its global batch is one pool.

    Raises:
        ValueError: too many workers, tokens or tiles of the pool.
    """
    size, cp, length = job.global_batch_size, job.context_parallel_size, job.seq_length
    fitting = MAX_WORKERS // cp
    check_workers(
        size * cp,
        f"--pool-size ({size}) x --context-parallel-size ({cp})",
        f"try --pool-size {fitting}" if fitting else "try a smaller --context-parallel-size",
    )
    tiles, most = _tiles_and_most(job)
    way_out = (
        f"try --seq-length {min(most, MAX_INTEGER // size) // (2 * cp) * 2 * cp}"
        if most >= 2 * cp
        else "use a smaller --pool-size"
    )
    of_tokens = f"--pool-size ({size}) sequences of --seq-length ({length})"
    check_tokens(size * length, of_tokens, way_out)
    check_tiles(tiles, f"--seq-length ({length})", way_out, f"a pool of --pool-size ({size})")


def _tiles_and_most(job: TrainingJob) -> tuple[int, int]:
    """Tiles of the pool where there are most, and the most tokens of a sequence then."""
    size, cp = job.global_batch_size, job.context_parallel_size
    found = []
    for block, heads in CHOICES:
        pieces = pieces_of(MAX_TILES // heads, size, cp)
        tiles = blocks_of(size, job.seq_length, block, cp) * heads
        found.append((tiles, (pieces + 1) * block - 1))
    return max(tiles for tiles, _ in found), min(tokens for _, tokens in found)
