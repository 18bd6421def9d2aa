"""How evenly pools weigh. In: preset corpora. Out: tables `table-1`, `figure-4`, `figure-8`.

Work of a packed sequence is the sum of its squared sample lengths (Eq. 4); imbalance is max / mean
- 1 over the pools of a global batch, the mean over all batches of the corpora of three seeds.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from megatron_libra.bench.table import Cell, Column, RowTask, TableSpec
from megatron_libra.data.corpora import packed_corpus
from megatron_libra.plan.swaps import swap
from megatron_libra.plan.vrsp import exact_cardinality_lpt

__all__ = [
    "eq_3",
    "figure_4",
    "figure_8",
    "lpt_with_swap",
    "mean_imbalance",
    "pool_imbalance",
    "swap",
    "table_1",
    "windows",
    "zigzag",
    "zigzag_with_swap",
]

Float = NDArray[np.float64]
Groups = list[list[int]]
NUM_SEQUENCES = {"longtail-256k": 5120, "longtail-1m": 1280}
SEEDS = (0, 1, 2)
NUM_GROUPINGS = 20
"""Random groupings of each global batch (Figure 4)."""
SETS = {"256K": "longtail-256k", "1M": "longtail-1m"}

TABLE_1: dict[tuple[str, int], dict[int, tuple[float, float]]] = {
    ("256K", 128): {
        2: (3.4617, 2.3059),
        4: (1.9776, 0.6635),
        8: (1.0770, 0.0050),
        16: (0.5616, 0.0006),
        32: (0.2548, 0.0002),
    },
    ("256K", 256): {
        2: (3.9431, 2.3012),
        4: (2.2960, 0.6610),
        8: (1.2895, 0.0042),
        16: (0.7059, 0.0006),
        32: (0.3534, 0.0001),
    },
    ("1M", 32): {
        2: (1.8732, 1.0069),
        4: (1.0476, 0.1078),
        8: (0.5247, 0.0066),
        16: (0.2000, 0.0009),
        32: (0.0000, 0.0000),
    },
    ("1M", 64): {
        2: (2.1719, 0.9853),
        4: (1.3098, 0.0650),
        8: (0.7294, 0.0055),
        16: (0.3641, 0.0008),
        32: (0.1301, 0.0001),
    },
}
"""(set, GBS): P: (before, after)."""
FIGURE_4 = {("256K", 8): 1.08, ("1M", 8): 0.90, ("256K", 64): 0.09, ("1M", 64): 0.08}
"""Random grouping at GBS 128, as far as the text (sections 3.2 and 4.2) gives numbers."""
FIGURE_8 = {("256K", 8): "below 0.007", ("1M", 8): "below 0.007"}
"""VRSP at GBS 128, from the text of section 4.2."""


def table_1() -> TableSpec:
    """Before and after Algorithm 1, by P and global batch."""
    columns = [
        Column(f"{stage}, {who}", ".4f")
        for stage in ("before", "after")
        for who in ("paper", "here")
    ]
    return TableSpec(
        name="table-1",
        command="libra bench plans --table table-1",
        key_title="set, GBS, P",
        columns=tuple(columns),
        rows=tuple(
            RowTask(f"{name}, {batch}, {size}", _table_1_row, (name, batch, size))
            for (name, batch), sizes in TABLE_1.items()
            for size in sizes
        ),
    )


def _table_1_row(name: str, batch_size: int, pool_size: int) -> tuple[Cell, ...]:
    before, after = TABLE_1[name, batch_size][pool_size]
    given = mean_imbalance(name, batch_size, pool_size, _in_order)
    placed = mean_imbalance(name, batch_size, pool_size, exact_cardinality_lpt)
    return before, given, after, placed


def figure_4() -> TableSpec:
    """Random grouping against Eq. 3 at GBS 128."""
    return TableSpec(
        name="figure-4",
        command="libra bench plans --table figure-4",
        key_title="set, P",
        columns=(
            Column("paper (random)", ".2f"),
            Column("random, mean", ".3f"),
            Column("random, 5 % to 95 %"),
            Column("Eq. 3", ".3f"),
        ),
        rows=tuple(
            RowTask(f"{name}, {size}", _figure_4_row, (name, size))
            for name in SETS
            for size in (1, 2, 4, 8, 16, 32, 64)
        ),
    )


def _figure_4_row(name: str, pool_size: int) -> tuple[Cell, ...]:
    rng = np.random.default_rng(0)
    found = [
        pool_imbalance(work[rng.permutation(len(work))], pool_size)
        for work in windows(name, 128)
        for _ in range(NUM_GROUPINGS)
    ]
    low, high = np.percentile(found, [5, 95])
    every = np.concatenate([_work(SETS[name], seed) for seed in SEEDS])
    variation = float(every.std() / every.mean())
    return (
        FIGURE_4.get((name, pool_size)),
        float(np.mean(found)),
        f"{low:.3f} to {high:.3f}",
        eq_3(variation, 128, pool_size),
    )


def eq_3(variation: float, batch_size: int, pool_size: int) -> float:
    """Expected max / mean - 1 of random pools of P out of D (Eq. 3); CV of one sequence's work."""
    return variation * math.sqrt(2 * math.log(batch_size / pool_size) / pool_size)


def figure_8() -> TableSpec:
    """Placement rules at GBS 128."""
    return TableSpec(
        name="figure-8",
        command="libra bench plans --table figure-8",
        key_title="set, P",
        columns=(
            Column("sampler's order", ".4f"),
            Column("zigzag", ".4f"),
            Column("zigzag with swap", ".4f"),
            Column("VRSP, paper"),
            Column("VRSP (Algorithm 1)", ".4f"),
            Column("Algorithm 1, then swaps", ".4f"),
            Column("outlier bound", ".4f"),
        ),
        rows=tuple(
            RowTask(f"{name}, {size}", _figure_8_row, (name, size))
            for name in SETS
            for size in (2, 4, 8, 16, 32)
        ),
    )


def _figure_8_row(name: str, pool_size: int) -> tuple[Cell, ...]:
    rules = (_in_order, zigzag, zigzag_with_swap, exact_cardinality_lpt, lpt_with_swap)
    given, dealt, swapped, placed, both = (
        mean_imbalance(name, 128, pool_size, rule) for rule in rules
    )
    bound = np.mean([_outlier_bound(work, pool_size) for work in windows(name, 128)])
    return given, dealt, swapped, FIGURE_8.get((name, pool_size)), placed, both, float(bound)


def _outlier_bound(work: NDArray[np.int64], pool_size: int) -> float:
    """Imbalance if the heaviest sequence were alone in its pool."""
    return max(0.0, float(work.max() / (work.mean() * pool_size)) - 1)


def _in_order(work: list[int], num_pools: int) -> Groups:
    return np.arange(len(work)).reshape(num_pools, -1).tolist()


def zigzag(work: list[int], num_pools: int) -> Groups:
    """Deal sequences, heaviest first, to the pools forward, then backward, and so on."""
    ranks = np.array(sorted(range(len(work)), key=lambda i: (-work[i], i)))
    rounds = ranks.reshape(-1, num_pools)
    rounds[1::2] = rounds[1::2, ::-1].copy()
    return rounds.T.tolist()


def zigzag_with_swap(work: list[int], num_pools: int) -> Groups:
    """Zigzag, then swaps."""
    return swap(work, zigzag(work, num_pools))


def lpt_with_swap(work: list[int], num_pools: int) -> Groups:
    """Algorithm 1, then swaps; beyond the paper."""
    return swap(work, exact_cardinality_lpt(work, num_pools))


def mean_imbalance(
    name: str, batch_size: int, pool_size: int, rule: Callable[[list[int], int], Groups]
) -> float:
    """The mean over all global batches of a set."""
    found = []
    for work in windows(name, batch_size):
        pools = rule(work.tolist(), batch_size // pool_size)
        found.append(pool_imbalance(work[list(chain.from_iterable(pools))], pool_size))
    return float(np.mean(found))


def pool_imbalance(work: NDArray[np.int64], pool_size: int) -> float:
    """max / mean - 1 over contiguous pools."""
    pools = work.reshape(-1, pool_size).sum(axis=1)
    return float(pools.max() / pools.mean()) - 1


def windows(name: str, batch_size: int) -> Iterator[NDArray[np.int64]]:
    """The work of each global batch of a set, all seeds."""
    for seed in SEEDS:
        yield from _work(SETS[name], seed).reshape(-1, batch_size)


@lru_cache(maxsize=6)
def _work(preset: str, seed: int) -> NDArray[np.int64]:
    rows = packed_corpus(preset, num_sequences=NUM_SEQUENCES[preset], seed=seed)
    return rows.row_sums(rows.flat**2)
