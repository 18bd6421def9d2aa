"""Tables of the quickstart. In: Skew, RunResults. Out: rich tables."""

from __future__ import annotations

import numpy as np
from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from settings import BASELINE, CONTEXT_PARALLEL, DATA_PARALLEL, SEQ_LENGTH
from skew import BIN_EDGES, Skew
from train import RunResult

__all__ = ["TOLERANCE", "comparison", "largest_difference", "skew_tables"]

TOLERANCE = 1e-5
"""Relative difference of two losses that summing in another order in float32 may cause."""
BAR = 18
CAPTION = f"""\
loss diff  relative: divided by {BASELINE}' loss; largest without its sign
slowest    load of the slowest worker / mean load (1 is balance)
imbalance  mean over the iterations of: slowest - 1
straggler  query-key pairs that the job waits for, all iterations
moved      bytes exchanged by all workers in one layer's forward, an iteration"""


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 else "right", no_wrap=number > 0)
    return table


def skew_tables(skew: Skew) -> RenderableType:
    """Document lengths as a histogram, and how uneven the sequences' attention is."""
    return Group(_length_table(skew), _skew_table(skew))


def _length_table(skew: Skew) -> Table:
    lengths = skew.documents
    title = (
        f"{len(lengths)} documents, {lengths.sum() / 1e6:.1f} M tokens: median "
        f"{np.median(lengths):.0f}, 90 % below {np.percentile(lengths, 90):.0f}, "
        f"longest {lengths.max()}"
    )
    table = Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("tokens", justify="right")
    table.add_column("documents", no_wrap=True)
    table.add_column("attention, after packing", no_wrap=True)
    documents = np.histogram(lengths, BIN_EDGES)[0]
    pairs = skew.samples * (skew.samples + 1) / 2
    work = np.histogram(skew.samples, BIN_EDGES, weights=pairs)[0]
    for low, high, count, part in zip(
        BIN_EDGES, BIN_EDGES[1:], documents / documents.sum(), work / work.sum(), strict=False
    ):
        name = f"{low} - {high - 1}" if high < 2**30 else f"{low} and more"
        table.add_row(name, _bar(count, documents / documents.sum()), _bar(part, work / work.sum()))
    return table


def _bar(share: float, shares: np.ndarray) -> str:
    return f"{'#' * round(BAR * share / shares.max()):<{BAR}} {100 * share:5.1f} %"


def _skew_table(skew: Skew) -> Table:
    table = _table(
        f"Attention / mean: sequences of {SEQ_LENGTH} tokens, and a step's slowest worker",
        *("", "least", "10 %", "median", "90 %", "most"),
    )
    for name, values in (
        ("a sequence", skew.sequence_work),
        ("slowest worker, own sequences", skew.before.max(axis=2).mean(axis=1)),
        ("slowest worker, libra", skew.after.max(axis=2).mean(axis=1)),
    ):
        numbers = np.percentile(values, [0, 10, 50, 90, 100])
        table.add_row(name, *(f"{number:.2f}" for number in numbers))
    return table


def largest_difference(run: RunResult, baseline: RunResult) -> float:
    """Largest relative difference of two runs' losses."""
    return float(np.max(np.abs(_differences(run, baseline))))


def _differences(run: RunResult, baseline: RunResult) -> np.ndarray:
    """Relative, by iteration."""
    ours, theirs = np.array(run.losses), np.array(baseline.losses)
    return (ours - theirs) / np.abs(theirs)


def comparison(runs: list[RunResult]) -> Table:
    """The one table: losses, slowest worker, and what was moved for it."""
    baseline = next(run for run in runs if run.name == BASELINE)
    others = [run for run in runs if run is not baseline]
    table = _table(
        f"The same training, {len(runs)} plans (DP {DATA_PARALLEL} x CP {CONTEXT_PARALLEL})",
        *("", f"loss\n{baseline.name}", *(f"loss diff\n{run.name}" for run in others)),
        *(f"slowest\n{run.name}" for run in runs),
    )
    table.caption, table.caption_justify = CAPTION, "left"
    for index, record in enumerate(baseline.records):
        table.add_row(
            f"iter {record['iteration']}",
            f"{baseline.losses[index]:.6f}",
            *(f"{_differences(run, baseline)[index]:+.1e}" for run in others),
            *(f"{_slowest(run)[index]:.3f}" for run in runs),
        )
    table.add_section()
    differences = [f"{largest_difference(run, baseline):.1e}" for run in others]
    table.add_row("largest", "", *differences, *(f"{_slowest(run).max():.3f}" for run in runs))
    for name, values in _totals(runs).items():
        table.add_row(name, *[""] * (1 + len(others)), *values)
    return table


def _slowest(run: RunResult) -> np.ndarray:
    return np.array(run.column("straggler_pairs")) / np.array(run.column("mean_pairs"))


def _totals(runs: list[RunResult]) -> dict[str, list[str]]:
    """Rows under the iterations: sums and means of each run."""
    return {
        "imbalance": [f"{_slowest(run).mean() - 1:.3f}" for run in runs],
        "straggler": [f"{sum(run.column('straggler_pairs')) / 1e6:.1f} M" for run in runs],
        "moved": [f"{np.mean(run.column('exchanged_bytes')) / 1e6:.2f} MB" for run in runs],
    }
