"""The metadata that planners are compared on. In: a preset or a file of lengths. Out: pools.

A preset gives whole optimizer steps: every pool after Algorithm 1, for each seed. A file of
document lengths gives one pool for each seed: shuffled with numpy's default_rng(seed),
concatenated, cut at the sequence length, the first P sequences.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

from megatron_libra.config import AttentionShape
from megatron_libra.data.corpora import packed_corpus
from megatron_libra.data.files import read_lengths
from megatron_libra.data.packing import pack_cut
from megatron_libra.data.rows import Int64, LengthRows
from megatron_libra.plan.vrsp import order_window
from megatron_libra.simulator.job import PRESET_JOBS, TrainingJob

__all__ = ["FILE_JOB", "BenchPool", "BenchSet", "file_set", "load_pools", "preset_set", "upsample"]

LONG = 65_536
"""Tokens from which DistCA's evaluation preset takes a document as long."""
SEEDS = (0, 1, 2, 3)
FILE_JOB = TrainingJob(
    seq_length=262_144,
    context_parallel_size=8,
    data_parallel_size=8,
    global_batch_size=8,
    shape=PRESET_JOBS["longtail-256k"].shape,
)
"""The default job of a file: one pool of 8 sequences of 256K tokens."""


@dataclass(frozen=True, slots=True)
class BenchPool:
    """One pool, as every planner gets it."""

    sequences: tuple[tuple[int, ...], ...]
    """Sample lengths of the P packed sequences."""
    seq_length: int
    context_parallel_size: int
    shape: AttentionShape

    @property
    def num_workers(self) -> int:
        """W = P * CP."""
        return len(self.sequences) * self.context_parallel_size


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSet:
    """A named source of pools."""

    name: str
    """Of its tables."""
    job: TrainingJob
    file: Path | None = None
    """Document lengths or packed sequences; None for a preset."""
    is_upsampled: bool = False
    """Documents as in DistCA's evaluation (upsample)."""
    pool_size: int = 8
    seeds: tuple[int, ...] = SEEDS

    @property
    def arguments(self) -> str:
        """The options of `libra bench plans` that select this set."""
        if self.file is None:
            return f"--corpus {self.name}"
        return f"--lengths {self.file.name}" + " --distca-preset" * self.is_upsampled


def preset_set(name: str) -> BenchSet:
    """A preset corpus with the layout of the paper's microbenchmarks (section 6.3)."""
    if name not in PRESET_JOBS:
        raise ValueError(f"corpus {name!r} must be one of {', '.join(PRESET_JOBS)}.")
    return BenchSet(name=name, job=PRESET_JOBS[name])


def file_set(path: Path, *, is_upsampled: bool = False, job: TrainingJob = FILE_JOB) -> BenchSet:
    """A file of lengths; the job's global batch is one pool."""
    name = path.stem + "-upsampled" * is_upsampled
    size = job.global_batch_size
    return BenchSet(name=name, job=job, file=path, is_upsampled=is_upsampled, pool_size=size)


@lru_cache(maxsize=4)
def load_pools(bench_set: BenchSet) -> tuple[BenchPool, ...]:
    """All pools of a set, the same in every run.

    Raises:
        ValueError: a file cannot be read, or has too few sequences for one pool.
    """
    job = bench_set.job
    lists = [pool for seed in bench_set.seeds for pool in _pools(bench_set, seed)]
    return tuple(
        BenchPool(tuple(pool), job.seq_length, job.context_parallel_size, job.shape)
        for pool in lists
    )


def _pools(bench_set: BenchSet, seed: int) -> list[list[tuple[int, ...]]]:
    if bench_set.file is not None:
        return [_first_sequences(bench_set, bench_set.file, seed)]
    job = bench_set.job
    rows = list(packed_corpus(bench_set.name, num_sequences=job.global_batch_size, seed=seed))
    order = order_window(
        rows, pool_size=bench_set.pool_size, data_parallel_size=job.data_parallel_size
    )
    return [[rows[row] for row in pool] for pool in order.pools]


def _first_sequences(bench_set: BenchSet, path: Path, seed: int) -> list[tuple[int, ...]]:
    rng = np.random.default_rng(seed)
    rows = read_lengths(path)
    if len(rows) < rows.flat.size:
        packed = rows.take(rng.permutation(len(rows)))
    else:
        documents = upsample(rows.flat, rng) if bench_set.is_upsampled else rows.flat
        packed = pack_cut(rng.permutation(documents), bench_set.job.seq_length).rows
    _check_packed(path, packed, bench_set)
    return [packed.lengths(row) for row in range(bench_set.pool_size)]


def _check_packed(path: Path, packed: LengthRows, bench_set: BenchSet) -> None:
    length = bench_set.job.seq_length
    if len(packed) < bench_set.pool_size:
        raise ValueError(
            f"{path} gives {len(packed)} sequences of {length} tokens; a pool needs "
            f"{bench_set.pool_size}; give a longer file or a smaller --seq-length."
        )
    longest = int(packed.row_sums().max())
    if longest > length:
        raise ValueError(
            f"{path}: the longest packed sequence has {longest} tokens, --seq-length is {length}; "
            f"try {longest} or more."
        )


def upsample(lengths: Int64, rng: np.random.Generator) -> Int64:
    """Documents of DistCA's evaluation: 10 % of those under 64K dropped, the others twice, every
    length times 4, cut to multiples of 16 tokens.
    """
    is_long = lengths >= LONG
    kept = lengths[is_long | (rng.random(lengths.size) >= 0.1)]
    longer: Int64 = np.concatenate([kept, lengths[is_long]]) * 4 // 16 * 16
    return longer
