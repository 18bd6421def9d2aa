"""The figures that a replay fills. In: a job, choices. Out: their series; tables of results.

13: all methods. 14: pool sizes, computation against communication. 15: block sizes and head splits,
overlap off, in pools of one CP group's neighbours as the paper has them. 11: throughput by DP at a
fixed global batch. Figure 5 is of single calls (throughput.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from megatron_libra.bench.table import Cell, Column
from megatron_libra.config import LibraConfig
from megatron_libra.plan.heads import fits
from megatron_libra.replay.methods import FIGURE_13, Method, libra, methods_of, tap_vrsp
from megatron_libra.replay.replay import Replay, Series
from megatron_libra.replay.report import Summary, source_of
from megatron_libra.simulator.job import TrainingJob

__all__ = ["FIGURES", "Choices", "Figure", "FigureTable", "OTHER_SHARES", "scaling"]

POOL_SIZES = (2, 4, 8, 16, 32)
HEAD_SPLITS = (1, 2, 4, 8, 16)
NUM_BLOCK_SIZES = 4
DATA_PARALLEL = (1, 2, 4, 8, 16)
OTHER_SHARES = (0.0, 0.4)
"""Time besides core attention over all time of a microbatch at DP 1; it scales perfectly."""
PAPER_13 = {
    ("ulysses", 262_144): (1.0, 1.0),
    ("wlb", 262_144): (2.45, 1.0),
    ("distca", 262_144): (1.35, 1.13),
    ("libra", 262_144): (2.91, 3.14),
    ("ulysses", 1_048_576): (1.0, 1.0),
    ("wlb", 1_048_576): (1.49, 1.0),
    ("distca", 1_048_576): (2.37, 2.67),
    ("libra", 1_048_576): (2.57, 2.90),
}
"""Mean and worst speedup by method and L; those of WLB-LLM and DistCA from Libra's reductions."""
UNPOOLED = ("ulysses", "wlb")
"""Their pools of one sequence have nothing to balance: no bound above 1."""
PAPER_11 = {262_144: {16: (7.63, 13.66)}, 1_048_576: {16: (4.42, 11.25)}}
"""By L and DP: scaling of Ulysses and Libra, end to end."""


TIMES = Column("times")
"""Where the times of a row are from, see source_of."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choices:
    """What a user chose for the methods."""

    base: LibraConfig
    scope: str = "microbatch"
    methods: tuple[str, ...] = FIGURE_13


@dataclass(frozen=True, slots=True)
class FigureTable:
    """Numbers of a figure, a row for each point."""

    title: str
    key_title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, tuple[Cell, ...]], ...]
    short: tuple[str, ...] = ()
    """Keys for a narrow terminal; empty: the same."""
    optional: tuple[str, ...] = ()
    """Titles of columns to leave out there, the least important first."""


Found = Sequence[Summary]


@dataclass(frozen=True, slots=True)
class Figure:
    """What a figure needs, and what it shows."""

    number: str
    series: Callable[[TrainingJob, Choices], list[Series]]
    table: Callable[[Replay, Found], FigureTable]


def _series(method: Method, job: TrainingJob, suffix: str = "") -> Series:
    return Series(name=method.name + suffix, method=method, job=job)


def _series_13(job: TrainingJob, choices: Choices) -> list[Series]:
    names = dict.fromkeys(("ulysses", *choices.methods))
    methods = methods_of(tuple(names), job, choices.base, choices.scope)
    return [_series(method, job) for method in methods]


def _table_13(replay: Replay, found: Found) -> FigureTable:
    columns = (
        TIMES, Column("mean ms", ".1f"), Column("worst ms", ".1f"), Column("mean", ".2f"),
        Column("worst", ".2f"), Column("mean, paper", ".2f"), Column("worst, paper", ".2f"),
        Column("mean, bound", ".2f"), Column("worst, bound", ".2f"), Column("max / mean", ".3f"),
        Column("GB pool", ".0f"), Column("GB worker", ".1f"), Column("between nodes", ".1f"),
    )  # fmt: skip
    rows = []
    for each, series in zip(found, replay.series, strict=True):
        mean, worst = PAPER_13.get((each.name, series.job.seq_length), (None, None))
        has_bound = each.name not in UNPOOLED
        rows.append((each.title, (
            each.times, each.mean_ms, each.worst_ms, each.speedup_mean, each.speedup_worst,
            mean, worst,
            each.bound_mean if has_bound else None, each.bound_worst if has_bound else None,
            1 + each.imbalance, each.pool_gb, each.worker_gb, each.worker_inter_gb,
        )))  # fmt: skip
    title = "Core attention of a layer, forward and backward; speedups over Ulysses"
    optional = ("GB pool", "between nodes", "worst, paper", "mean, paper", "GB worker",
                "max / mean", "worst ms")  # fmt: skip
    names = tuple(each.name for each in found)
    return FigureTable(title, "method", columns, tuple(rows), names, optional)


def _series_14(job: TrainingJob, choices: Choices) -> list[Series]:
    found = [_series(*_ulysses(job, choices))]
    for size in POOL_SIZES:
        if job.data_parallel_size % size == 0:
            base = replace(choices.base, pool_size=size)
            methods = methods_of(("tap", "tap_vrsp", "libra"), job, base, choices.scope)
            found += [_series(method, job, f" P {size}") for method in methods]
    return found


def _ulysses(job: TrainingJob, choices: Choices) -> tuple[Method, TrainingJob]:
    base = replace(choices.base, pool_size=1)
    return methods_of(("ulysses",), job, base)[0], job


def _table_14(replay: Replay, found: Found) -> FigureTable:
    base = found[0].mean_ms
    columns = (
        TIMES, Column("P", "d"), Column("computation", ".3f"),
        Column("exposed communication", ".3f"), Column("total", ".3f"), Column("hidden", ".0%"),
        Column("GB worker", ".1f"),
    )  # fmt: skip
    open_share = {
        series.method.config.pool_size: (each.mean_ms - each.compute_ms) / base
        for each, series in zip(found, replay.series, strict=True)
        if series.method.name == "tap_vrsp"
    }
    rows = []
    for each, series in zip(found, replay.series, strict=True):
        size = series.method.config.pool_size
        exposed = max(0.0, (each.mean_ms - each.compute_ms) / base)
        alone = open_share.get(size, 0.0)
        hidden = 1 - exposed / alone if series.method.name == "libra" and alone > 0 else None
        share = each.compute_ms / base
        cells = size, share, exposed, share + exposed, hidden, each.worker_gb
        rows.append((each.title, (each.times, *cells)))
    title = "The straggler by pool size, over the mean of Ulysses"
    names = tuple(series.method.name for series in replay.series)
    return FigureTable(title, "variant", columns, tuple(rows), names, ("GB worker",))


def _series_15(job: TrainingJob, choices: Choices) -> list[Series]:
    """One pool of P = DP replicas in a microbatch: 8, or 4 where CP is above 8."""
    size = 8 if job.context_parallel_size <= 8 else 4
    job = replace(job, data_parallel_size=min(size, job.data_parallel_size))
    found = [_series(*_ulysses(job, choices))]
    first = max(1, job.seq_length // (16 * job.context_parallel_size))
    for block in (first << step for step in range(NUM_BLOCK_SIZES)):
        for heads in HEAD_SPLITS:
            if fits(job.shape, heads, 1):
                base = replace(
                    choices.base,
                    pool_size=job.data_parallel_size,
                    block_size=block,
                    head_split=heads,
                )
                method = replace(tap_vrsp(job, base), scope=choices.scope)
                found.append(_series(method, job, f" B {block} H {heads}"))
    return found


def _table_15(replay: Replay, found: Found) -> FigureTable:
    columns = (
        TIMES, Column("B", "d"), Column("H", "d"), Column("speedup", ".2f"), Column("bound", ".2f"),
        Column("max / mean", ".3f"), Column("computation ms", ".1f"), Column("layer ms", ".1f"),
        Column("GB worker", ".1f"),
    )  # fmt: skip
    rows = []
    for each, series in list(zip(found, replay.series, strict=True))[1:]:
        config = series.method.config
        rows.append((f"{config.block_size} x {config.head_split}", (
            each.times, config.block_size, config.head_split, each.speedup_mean, each.bound_mean,
            1 + each.imbalance, each.compute_ms, each.mean_ms, each.worker_gb,
        )))  # fmt: skip
    title = "Mean straggler speedup over Ulysses by B and H, overlap off"
    return FigureTable(title, "B x H", columns, tuple(rows), optional=("B", "H", "GB worker"))


def _series_11(job: TrainingJob, choices: Choices) -> list[Series]:
    found = []
    for size in DATA_PARALLEL:
        if job.global_batch_size % size == 0:
            sized = replace(job, data_parallel_size=size)
            base = replace(choices.base, pool_size=min(choices.base.pool_size, size))
            method = replace(libra(sized, base), scope=choices.scope)
            found.append(_series(*_ulysses(sized, choices), f" DP {size}"))
            found.append(_series(method, sized, f" DP {size}"))
    return found


def _table_11(replay: Replay, found: Found) -> FigureTable:
    columns = [TIMES, Column("step ms, Ulysses", ".0f"), Column("step ms, Libra", ".0f")]
    for share in OTHER_SHARES:
        name = "attention alone" if not share else f"{share:.0%} other work"
        columns += [Column(f"Ulysses, {name}", ".2f"), Column(f"Libra, {name}", ".2f")]
    columns += [Column("Ulysses, paper", ".2f"), Column("Libra, paper", ".2f")]
    steps = _steps(replay, found)
    sizes = sorted({size for _, size in steps})
    curves = [scaling(replay, found, share) for share in OTHER_SHARES]
    paper = PAPER_11.get(replay.series[0].job.seq_length, {})
    rows = []
    for size in sizes:
        of_size = zip(found, replay.series, strict=True)
        times = source_of([s for s, each in of_size if each.job.data_parallel_size == size])
        cells: list[Cell] = [times, *(steps[name, size] for name in ("ulysses", "libra"))]
        cells += [curve[name][size] for curve in curves for name in ("ulysses", "libra")]
        rows.append((f"DP {size}", (*cells, *paper.get(size, (None, None)))))
    title = "Throughput over that of DP 1 at a fixed global batch; the ideal is DP"
    optional = ("Ulysses, paper", "Libra, paper")
    return FigureTable(title, "", tuple(columns), tuple(rows), optional=optional)


def _steps(replay: Replay, found: Found) -> dict[tuple[str, int], float]:
    return {
        (series.method.name, series.job.data_parallel_size): each.step_ms
        for each, series in zip(found, replay.series, strict=True)
    }


def scaling(replay: Replay, found: Found, other_share: float) -> dict[str, dict[int, float]]:
    """By method and DP: throughput over its own at the smallest DP. Other work takes the same time
    in every microbatch, other_share of all time of Ulysses at that DP.
    """
    steps = _steps(replay, found)
    sizes = sorted({size for _, size in steps})
    batch = replay.series[0].job.global_batch_size
    first = steps["ulysses", sizes[0]]
    other = other_share / (1 - other_share) * first * sizes[0] / batch  # ms of a microbatch

    def seconds(name: str, size: int) -> float:
        return steps[name, size] + other * batch / size

    return {
        name: {size: seconds(name, sizes[0]) / seconds(name, size) for size in sizes}
        for name in ("ulysses", "libra")
    }


FIGURES = {
    each.number: each
    for each in (
        Figure("11", _series_11, _table_11),
        Figure("13", _series_13, _table_13),
        Figure("14", _series_14, _table_14),
        Figure("15", _series_15, _table_15),
    )
}
"""Figures of pools, by number."""
