"""Balance by pool size and by tile size. In: presets. Out: tables `figure-14` and `figure-15`.

The balance part of the paper's figures: the pairs of the slowest worker at each GA index, averaged
over the indices, against those of Ulysses on the same global batches in the sampler's order. Time
would add kernels and communication; bytes of the most loaded worker stand beside it instead.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_libra.bench.comparison import ALGORITHM_2, OURS
from megatron_libra.bench.planners.libra import make_plan
from megatron_libra.bench.pools import BenchPool
from megatron_libra.bench.table import Cell, Column, RowTask, TableSpec
from megatron_libra.data.corpora import packed_corpus
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.tiles import causal_pairs
from megatron_libra.plan.vrsp import order_window
from megatron_libra.simulator.job import PRESET_JOBS, TrainingJob

__all__ = ["figure_14", "figure_15"]

Float = NDArray[np.float64]
SETS = {"256K": "longtail-256k", "1M": "longtail-1m"}
BLOCKS = {"256K": (2048, 4096, 8192, 16384), "1M": (4096, 8192, 16384, 32768)}
HEADS = (1, 2, 4, 8)
PAPER_TILES = {"256K": 4096, "1M": 8192}
"""B of the paper's microbenchmarks, with H = 1."""
SIZES = {"256K": (2, 4, 8, 16, 32), "1M": (2, 4, 8, 16)}
FIGURE_14 = {
    ("256K", 4): (None, None, 0.07),
    ("256K", 8): (0.25, 0.19, 0.17),
    ("256K", 16): (None, None, 0.47),
    ("256K", 32): (None, 0.19, 0.77),
    ("1M", 2): (None, None, 0.03),
    ("1M", 4): (0.51, 0.33, 0.03),
    ("1M", 8): (None, None, 0.17),
    ("1M", 16): (None, None, 0.26),
}
"""Computation (TAP, TAP + VRSP) and communication, as far as the text of 6.4 gives numbers."""
FIGURE_15 = {
    ("256K", 2048, 1): "1.76",
    ("256K", 8192, 4): "1.89",
    ("256K", 8192, 1): "1.28",
    ("256K", 16384, 2): "1.43",
    ("256K", 16384, 1): "0.81",
    ("1M", 4096, 1): "1.62 to 1.63",
    ("1M", 8192, 2): "1.62 to 1.63",
    ("1M", 16384, 4): "1.62 to 1.63",
}
"""Speedup over Ulysses, overlap off, as far as the text of 6.6 gives numbers."""


@dataclass(frozen=True, slots=True)
class _Steps:
    """Global batches of a job."""

    name: str
    job: TrainingJob
    pool_size: int
    seeds: tuple[int, ...]

    def pools(self, *, is_placed: bool) -> list[list[BenchPool]]:
        """By GA index of every batch: its pools, after Algorithm 1 or in the sampler's order."""
        return [index for seed in self.seeds for index in self._batch(seed, is_placed)]

    def _batch(self, seed: int, is_placed: bool) -> list[list[BenchPool]]:
        job, size = self.job, self.pool_size
        rows = _rows(SETS[self.name], job.global_batch_size, seed)
        order: tuple[int, ...] = tuple(range(len(rows)))
        if is_placed:
            order = order_window(
                rows, pool_size=size, data_parallel_size=job.data_parallel_size
            ).order
        pools = [
            BenchPool(
                tuple(rows[i] for i in order[at : at + size]),
                job.seq_length,
                job.context_parallel_size,
                job.shape,
            )
            for at in range(0, len(order), size)
        ]
        count = job.data_parallel_size // size
        return [pools[at : at + count] for at in range(0, len(pools), count)]

    def ulysses(self) -> float:
        """Pairs of the slowest worker, the mean over GA indices; of one query head in h_q / CP."""
        return float(np.mean([work.max() for work in self._sequence_work()]))

    def ideal(self) -> float:
        """The same where every pool is perfectly balanced after Algorithm 1."""
        found = [
            max(sum(map(_pairs, pool.sequences)) for pool in index)
            for index in self.pools(is_placed=True)
        ]
        return float(np.mean(found)) / self.pool_size / self.job.context_parallel_size

    def _sequence_work(self) -> list[Float]:
        work = [
            [_pairs(row) for pool in index for row in pool.sequences]
            for index in self.pools(is_placed=False)
        ]
        return [np.array(index) / self.job.context_parallel_size for index in work]


def _pairs(lengths: tuple[int, ...]) -> int:
    values = np.array(lengths, np.int64)
    return int(causal_pairs(np.zeros_like(values), values).sum())


@lru_cache(maxsize=16)
def _rows(preset: str, count: int, seed: int) -> list[tuple[int, ...]]:
    return list(packed_corpus(preset, num_sequences=count, seed=seed))


def _straggler(indices: list[list[BenchPool]], **choices: Any) -> tuple[float, float, float]:
    """Means over GA indices: pairs of the slowest worker, GB of the most loaded one; and over
    pools: the heaviest tile over the mean load.
    """
    heads = choices.get("head_split", 1)
    slowest, moved, heaviest = [], [], []
    for pools in indices:
        plans = [make_plan(pool, **choices) for pool in pools]
        slowest.append(max(int(plan.loads.max()) for plan in plans) / heads)
        moved.append(max(_worker_bytes(plan) for plan in plans) / 1e9)
        heaviest += [plan.max_tile_over_mean for plan in plans]
    return float(np.mean(slowest)), float(np.mean(moved)), float(np.mean(heaviest))


def _worker_bytes(plan: PoolPlan) -> int:
    moved = plan.traffic_bytes
    return int(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def figure_14() -> TableSpec:
    """The slowest worker by P, over Ulysses, in the layouts of section 6.3."""
    return TableSpec(
        name="figure-14",
        command="libra bench plans --table figure-14",
        key_title="set, P",
        columns=(
            Column("TAP, paper", ".2f"),
            Column("TAP, Algorithm 2", ".3f"),
            Column("TAP + VRSP, paper", ".2f"),
            Column("TAP + VRSP, Algorithm 2", ".3f"),
            Column("TAP + VRSP, ours", ".3f"),
            Column("perfect balance", ".3f"),
            Column("communication, paper", ".2f"),
            Column("rank GB, Algorithm 2", ".1f"),
            Column("rank GB, ours", ".1f"),
        ),
        rows=tuple(
            RowTask(f"{name}, {size}", _figure_14_row, (name, size))
            for name, sizes in SIZES.items()
            for size in sizes
        ),
    )


def _figure_14_row(name: str, pool_size: int) -> tuple[Cell, ...]:
    steps = _Steps(name, PRESET_JOBS[SETS[name]], pool_size, seeds=(0, 1, 2, 3))
    tap, both, communication = FIGURE_14.get((name, pool_size), (None, None, None))
    algorithm_2 = ALGORITHM_2 | {"block_size": PAPER_TILES[name]}
    given, placed = steps.pools(is_placed=False), steps.pools(is_placed=True)
    base = steps.ulysses()
    first, *_ = _straggler(given, **algorithm_2)
    second, paper_gb, _ = _straggler(placed, **algorithm_2)
    ours, our_gb, _ = _straggler(placed, **OURS)
    limit = steps.ideal() / base
    shares = (tap, first / base, both, second / base, ours / base, limit)
    return (*shares, communication, paper_gb, our_gb)


def figure_15() -> TableSpec:
    """Speedup of the slowest worker over Ulysses by B and H, in the layouts of section 6.6."""
    return TableSpec(
        name="figure-15",
        command="libra bench plans --table figure-15",
        key_title="set, B, H",
        columns=(
            Column("tiles of a sequence", ".0f"),
            Column("heaviest tile / mean load", ".2f"),
            Column("speedup, paper (time)"),
            Column("speedup, Algorithm 2", ".2f"),
            Column("speedup, ours", ".2f"),
            Column("perfect balance", ".2f"),
            Column("rank GB, Algorithm 2", ".1f"),
            Column("rank GB, ours", ".1f"),
        ),
        rows=tuple(
            RowTask(f"{name}, {block}, {heads}", _figure_15_row, (name, block, heads))
            for name, blocks in BLOCKS.items()
            for block in blocks
            for heads in HEADS
        ),
    )


def _figure_15_row(name: str, block: int, heads: int) -> tuple[Cell, ...]:
    size = {"256K": 8, "1M": 4}[name]
    job = replace(PRESET_JOBS[SETS[name]], data_parallel_size=size)
    steps = _Steps(name, job, size, seeds=(0,))
    tiles: dict[str, Any] = {"block_size": block, "head_split": heads}
    placed = steps.pools(is_placed=True)
    base, limit = steps.ulysses(), steps.ideal()
    theirs, paper_gb, heaviest = _straggler(placed, **ALGORITHM_2 | tiles)
    ours, our_gb, _ = _straggler(placed, **OURS | tiles)
    return (
        job.seq_length // block * heads,
        heaviest,
        FIGURE_15.get((name, block, heads)),
        base / theirs,
        base / ours,
        base / limit,
        paper_gb,
        our_gb,
    )
