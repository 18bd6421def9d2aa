"""Planners side by side, on the same pools. In: BenchSet. Out: tables `planners` and `targets`.

Max / mean is of the workers' pairs; GB are 1e9 bytes of one layer's forward, rank GB those of the
most loaded worker, the larger of sent and received; ms are CPU milliseconds of one core for a whole
plan, the median over pools (the re-implemented rules in NumPy, as our own).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_libra.bench.floor import byte_floor
from megatron_libra.bench.outcome import Outcome
from megatron_libra.bench.planners import distca, equal_chunks, wlb
from megatron_libra.bench.planners.libra import plan_tiles
from megatron_libra.bench.pools import BenchPool, BenchSet, load_pools
from megatron_libra.bench.table import Cell, Column, RowTask, TableSpec

__all__ = ["ALGORITHM_2", "OURS", "paper_block_size", "planner_table", "target_table"]

Plan = Callable[[BenchPool], Outcome]
OURS: dict[str, Any] = {
    "placer": "home_first",
    "block_size": 2048,
    "head_split": 16,
    "load_slack": 0.01,
}
"""The default placer, with tiles that can balance a pool to 1 %."""
ALGORITHM_2: dict[str, Any] = {"placer": "paper", "kv_fetch": "group", "load_slack": 0.03}
"""The paper's placer and its tau; whole samples' K and V."""
TARGETS = {
    "lengths_wlbllm-upsampled": (90.0, 6.0),
    "lengths_prolong": (21.0, 3.0),
    "lengths_mooncake_conversation": (62.0, 4.0),
    "longtail-256k": (60.0, 6.0),
    "longtail-1m": (380.0, 9.0),
}
"""Most GB and rank GB that our plans shall move at a max / mean of at most 1.01."""
CHOICES = ((4096, 16), (2048, 16), (1024, 16), (2048, 32))
"""(B, H) of the targets' table."""
HEAVIEST = 4
"""Algorithm 1 puts the heaviest sequences of a global batch into its first pools."""


def planner_table(bench_set: BenchSet) -> TableSpec:
    """Every planner on every pool of a set."""
    return TableSpec(
        name=f"planners {bench_set.name}",
        command=f"libra bench plans --table planners {bench_set.arguments}",
        key_title="planner",
        columns=(
            Column("max / mean", ".3f"),
            Column("worst pool", ".3f"),
            Column("GB", ".0f"),
            Column("rank GB", ".1f"),
            Column("fullest sequence / L", ".2f"),
            Column("ms", ".1f", is_timing=True),
        ),
        rows=tuple(
            RowTask(name, _planner_row, (bench_set, plan))
            for name, plan in _planners(bench_set).items()
        ),
    )


def paper_block_size(seq_length: int) -> int:
    """B of the paper for a packed sequence of so many tokens."""
    return 4096 if seq_length <= 262_144 else 8192


def _planners(bench_set: BenchSet) -> dict[str, Plan]:
    """By name; block sizes of Algorithm 2 are the paper's for the length of a sequence."""
    block = paper_block_size(bench_set.job.seq_length)
    algorithm_2 = partial(plan_tiles, **ALGORITHM_2, block_size=block)
    ours = partial(plan_tiles, **OURS)
    return {
        "Ulysses": partial(plan_tiles, placer="ulysses", block_size=block),
        "K/V gathered at the homes": partial(plan_tiles, placer="home", block_size=block),
        "WLB-LLM's packing without deferral, re-implemented": wlb.plan,
        "DistCA's rule, re-implemented, tolerance 0.10": partial(distca.plan, tolerance=0.10),
        "DistCA's rule, re-implemented, tolerance 0.03": partial(distca.plan, tolerance=0.03),
        "equal chunks (MagiAttention's scope), re-implemented, 8 a worker": partial(
            equal_chunks.plan, chunks_per_worker=8
        ),
        "equal chunks (MagiAttention's scope), re-implemented, 16 a worker": partial(
            equal_chunks.plan, chunks_per_worker=16
        ),
        f"Algorithm 2, B {block} H 1 (the paper's tiles)": partial(algorithm_2, head_split=1),
        f"Algorithm 2, B {block} H 4": partial(algorithm_2, head_split=4),
        "ours, B 2048 H 16, tau 0.03": partial(ours, load_slack=0.03),
        "ours, B 2048 H 16, tau 0.01": ours,
    }


def _planner_row(bench_set: BenchSet, plan: Plan) -> tuple[Cell, ...]:
    outcomes, seconds = _plan_all(bench_set, plan)
    balance = [outcome.max_over_mean for outcome in outcomes]
    return (
        float(np.mean(balance)),
        max(balance),
        float(np.mean([outcome.total_bytes for outcome in outcomes])) / 1e9,
        float(np.mean([outcome.worker_bytes for outcome in outcomes])) / 1e9,
        max(outcome.fullest for outcome in outcomes),
        float(np.median(seconds)) * 1e3,
    )


def _plan_all(
    bench_set: BenchSet, plan: Plan, first_pools: int | None = None
) -> tuple[list[Outcome], list[float]]:
    """Outcomes and CPU seconds of all pools, or of the first ones of each seed."""
    outcomes, seconds = [], []
    for number, pool in enumerate(load_pools(bench_set)):
        if first_pools and number % _pools_of_a_seed(bench_set) >= first_pools:
            continue
        start = time.process_time()
        outcomes.append(plan(pool))
        seconds.append(time.process_time() - start)
    return outcomes, seconds


def target_table(bench_set: BenchSet) -> TableSpec:
    """Our plans against the target of a set, where it has one, and against the floor."""
    target = TARGETS.get(bench_set.name)
    first = (RowTask("at most", _cells, (1.01, *target)),) if target else ()
    ours = [
        RowTask(f"ours, B {block} H {heads}", _target_row, (bench_set, block, heads))
        for block, heads in CHOICES
    ]
    if _pools_of_a_seed(bench_set) > HEAVIEST:
        arguments = (bench_set, OURS["block_size"], OURS["head_split"], HEAVIEST)
        ours.append(
            RowTask("the same, B 2048 H 16, pools 1 to 4 of a step", _target_row, arguments)
        )
    return TableSpec(
        name=f"targets {bench_set.name}",
        command=f"libra bench plans --table targets {bench_set.arguments}",
        key_title="plan",
        columns=(
            Column("worst max / mean", ".3f"),
            Column("GB", ".1f"),
            Column("rank GB", ".2f"),
            Column("Q and O", ".1f"),
            Column("K/V inside a CP group", ".1f"),
            Column("K/V between groups", ".1f"),
            Column("holds"),
            Column("ms, median", ".1f", is_timing=True),
            Column("ms, worst", ".1f", is_timing=True),
        ),
        rows=(*first, *ours, RowTask("floor", _floor_row, (bench_set,))),
    )


def _cells(worst: float, total: float, rank: float) -> tuple[Cell, ...]:
    return (worst, total, rank, *[None] * 6)


def _pools_of_a_seed(bench_set: BenchSet) -> int:
    return bench_set.job.global_batch_size // bench_set.pool_size


def _target_row(
    bench_set: BenchSet, block: int, heads: int, first_pools: int | None = None
) -> tuple[Cell, ...]:
    plan = partial(plan_tiles, **OURS | {"block_size": block, "head_split": heads})
    outcomes, seconds = _plan_all(bench_set, plan, first_pools)
    inside = _inside(bench_set)
    worst = max(outcome.max_over_mean for outcome in outcomes)
    total, rank, queries, keys, near = np.mean(
        [
            (
                outcome.total_bytes,
                outcome.worker_bytes,
                2 * outcome.query_bytes.sum(),
                outcome.kv_bytes.sum(),
                outcome.kv_bytes[inside].sum(),
            )
            for outcome in outcomes
        ],
        axis=0,
    ).tolist()
    target = TARGETS.get(bench_set.name)
    holds = target and worst <= 1.01 and total <= target[0] * 1e9 and rank <= target[1] * 1e9
    return (
        worst,
        total / 1e9,
        rank / 1e9,
        queries / 1e9,
        near / 1e9,
        (keys - near) / 1e9,
        None if target is None else "yes" if holds else "no",
        float(np.median(seconds)) * 1e3,
        max(seconds) * 1e3,
    )


def _inside(bench_set: BenchSet) -> NDArray[np.bool_]:
    """(W, W) whether two workers are of one CP group."""
    size = bench_set.job.context_parallel_size
    group = np.arange(bench_set.pool_size * size) // size
    inside: NDArray[np.bool_] = group[:, None] == group
    return inside


def _floor_row(bench_set: BenchSet) -> tuple[Cell, ...]:
    """The floor's K/V inside CP groups is that of workers below C; the rest of it has no split."""
    floors = [byte_floor(pool, OURS["load_slack"]) for pool in load_pools(bench_set)]
    total, rank, queries, home = np.mean(
        [(f.total_bytes, f.worker_bytes, f.query_bytes, f.home_kv_bytes) for f in floors], axis=0
    ).tolist()
    return (1.01, total / 1e9, rank / 1e9, queries / 1e9, home / 1e9, *[None] * 4)
