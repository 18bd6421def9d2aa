"""VRSP beyond the paper: whole steps. In: preset corpora. Out: tables `steps` and `order-time`.

Without pipeline stages, a worker group is as slow as the sum of its pools over the GA indices of a
step: step imbalance is max / mean - 1 over these sums.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

from megatron_libra.bench.grouping import NUM_SEQUENCES, SEEDS, SETS
from megatron_libra.bench.table import Cell, Column, RowTask, TableSpec
from megatron_libra.data.corpora import packed_corpus
from megatron_libra.data.rows import LengthRows
from megatron_libra.plan.vrsp import WindowOrder, attention_work, order_window

__all__ = ["order_time_table", "steps_table"]

BATCH_SIZES = {"256K": 128, "1M": 32}
LAYOUTS = (
    ("256K", 1, 8), ("256K", 2, 4), ("256K", 4, 4), ("256K", 8, 4),
    ("1M", 1, 8), ("1M", 2, 4), ("1M", 4, 2), ("1M", 8, 2),
)  # fmt: skip
"""(set, P, GA)."""
SCOPES = ("microbatch", "pipeline", "step")
"""Algorithm 1, and what goes beyond it."""
TARGETS = {("256K", 2, 4): 0.014, ("1M", 2, 4): 0.0025, ("256K", 1, 8): 0.014}
"""Most step imbalance that scope step shall leave."""


def steps_table() -> TableSpec:
    """Scope step against Algorithm 1."""
    return TableSpec(
        name="steps",
        command="libra bench plans --table steps",
        key_title="set, P, GA",
        columns=(
            Column("sampler's order", ".4f"),
            Column("Algorithm 1", ".4f"),
            Column("scope pipeline", ".4f"),
            Column("scope step", ".4f"),
            Column("at most", ".4f"),
            Column("worst step, Algorithm 1", ".4f"),
            Column("worst step, scope step", ".4f"),
            Column("steps where Algorithm 1 leaves less", ".1%"),
        ),
        rows=tuple(
            RowTask(f"{name}, {size}, {steps}", _steps_row, (name, size, steps))
            for name, size, steps in LAYOUTS
        ),
    )


def _steps_row(name: str, pool_size: int, num_steps: int) -> tuple[Cell, ...]:
    degree = BATCH_SIZES[name] // num_steps
    left: dict[str, list[float]] = {scope: [] for scope in SCOPES}
    given = []
    for rows in map(list, _windows(name)):
        work = np.array([attention_work(row) for row in rows], np.float64)
        groups = work.reshape(num_steps, -1, pool_size).sum(axis=(0, 2))
        given.append(float(groups.max() / groups.mean()) - 1)
        for scope in SCOPES:
            left[scope].append(_order(rows, pool_size, degree, scope).step_imbalance)
    first, dealt, second = (np.array(left[scope]) for scope in SCOPES)
    return (
        float(np.mean(given)),
        float(first.mean()),
        float(dealt.mean()),
        float(second.mean()),
        TARGETS.get((name, pool_size, num_steps)),
        float(first.max()),
        float(second.max()),
        float((first < second - 1e-12).mean()),
    )


def _order(rows: Sequence[Any], size: int, degree: int, scope: str) -> WindowOrder:
    return order_window(rows, pool_size=size, data_parallel_size=degree, scope=scope)


@lru_cache(maxsize=2)
def _windows(name: str) -> list[LengthRows]:
    size = BATCH_SIZES[name]
    parts = [
        packed_corpus(SETS[name], num_sequences=NUM_SEQUENCES[SETS[name]], seed=seed)
        for seed in SEEDS
    ]
    rows = LengthRows.concatenate(parts)
    return [rows.take(np.arange(at, at + size)) for at in range(0, len(rows), size)]


def order_time_table() -> TableSpec:
    """CPU milliseconds of ordering one global batch, with lengths as arrays."""
    return TableSpec(
        name="order-time",
        command="libra bench plans --table order-time",
        key_title="GBS (256K, P 8, DP 32)",
        columns=(
            Column("samples", ",d"),
            Column("ms, Algorithm 1", ".1f", is_timing=True),
            Column("ms, scope step", ".1f", is_timing=True),
        ),
        rows=tuple(RowTask(str(size), _time_row, (size,)) for size in (128, 256, 512, 1024)),
    )


def _time_row(batch_size: int) -> tuple[Cell, ...]:
    rows = packed_corpus(SETS["256K"], num_sequences=batch_size, seed=0)
    sequences = [np.array(lengths) for lengths in rows]
    times = []
    for scope in ("microbatch", "step"):
        taken = []
        for _ in range(5):
            start = time.process_time()
            _order(sequences, 8, 32, scope)
            taken.append(time.process_time() - start)
        times.append(float(np.median(taken)) * 1e3)
    return (int(rows.flat.size), *times)
