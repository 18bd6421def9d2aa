"""Pictures of replays. In: Replay, Summaries. Out: figures; matplotlib is imported when one is
drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from megatron_libra.replay.figures import OTHER_SHARES, PAPER_11, scaling
from megatron_libra.replay.replay import Replay
from megatron_libra.replay.report import Summary
from megatron_libra.replay.throughput import ThroughputGrid
from megatron_libra.simulator.plots.style import (
    ACCENT,
    BEFORE,
    INK,
    LIBRA,
    MUTED,
    WARM,
    axes,
    figure,
    label,
    tokens_text,
)

__all__ = ["DRAWINGS", "draw_throughput"]

Found = Sequence[Summary]


def _draw_13(replay: Replay, found: Found, times: str) -> Any:
    """Left: mean straggler, computation and exposed communication. Right: the worst."""
    fig = figure(9.6, 3.6)
    left, right = axes(fig, 1, 2)
    names = [each.title for each in found]
    colors = [LIBRA if each.name == "libra" else BEFORE for each in found]
    for ax, values, speedups, title in (
        (left, [each.mean_ms for each in found], [each.speedup_mean for each in found], "Mean"),
        (right, [each.worst_ms for each in found], [each.speedup_worst for each in found], "Worst"),
    ):
        ax.barh(names, values, color=colors, height=0.7)
        if ax is left:
            compute = np.array([min(each.compute_ms, each.mean_ms) for each in found])
            rest = np.array(values) - compute
            ax.barh(names, rest, left=compute, color=WARM, height=0.7, label="not computing")
            ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="lower right")
        for at, (value, speedup) in enumerate(zip(values, speedups, strict=True)):
            ax.text(value, at, f" {speedup:.2f}x", va="center", fontsize=8.5, color=INK)
        ax.invert_yaxis()
        ax.grid(False, axis="y")
        ax.margins(x=0.14)
        label(ax, f"{title} straggler, {times}", "ms of one attention layer", "")
    right.set_yticklabels([])
    return fig


def _draw_14(replay: Replay, found: Found, times: str) -> Any:
    fig = figure(9.2, 3.4)
    (ax,) = axes(fig)
    base = found[0].mean_ms
    sizes = sorted({s.method.config.pool_size for s in replay.series[1:]})
    variants = ("tap", "tap_vrsp", "libra")
    colors = dict(zip(variants, (BEFORE, MUTED, LIBRA), strict=True))
    for each, series in list(zip(found, replay.series, strict=True))[1:]:
        name = series.method.name
        at = sizes.index(series.method.config.pool_size) + 0.26 * (variants.index(name) - 1)
        compute = each.compute_ms / base
        exposed = max(0.0, each.mean_ms / base - compute)
        ax.bar(at, compute, 0.24, color=colors[name])
        ax.bar(at, exposed, 0.24, bottom=compute, color=WARM)
        ax.text(at, compute + exposed, f"{compute + exposed:.2f}", ha="center", va="bottom",
                fontsize=7.5, color=INK)  # fmt: skip
    ax.set_xticks(range(len(sizes)), [f"P {size}" for size in sizes])
    titles = {"tap": "TAP", "tap_vrsp": "TAP + VRSP", "libra": "Libra"}
    for name in variants:
        ax.bar(0, 0, color=colors[name], label=f"{titles[name]}, computation")
    ax.bar(0, 0, color=WARM, label="exposed communication")
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, ncols=2)
    label(ax, f"Straggler by pool size, {times}", "", "over the mean of Ulysses")
    return fig


def _draw_15(replay: Replay, found: Found, times: str) -> Any:
    cells = {
        (series.method.config.head_split, series.method.config.block_size): each.speedup_mean
        for each, series in list(zip(found, replay.series, strict=True))[1:]
    }
    heads, blocks = (sorted(set(values)) for values in zip(*cells, strict=True))
    grid = np.array([[cells[h, b] for b in blocks] for h in heads])
    fig = figure(5.2, 3.6)
    (ax,) = axes(fig)
    _heat_map(ax, grid, heads, blocks, ".2f")
    label(ax, f"Speedup over Ulysses, {times}", "block size B", "head split H")
    return fig


def _heat_map(
    ax: Any, grid: np.ndarray[Any, Any], heads: Sequence[int], blocks: Sequence[int], form: str
) -> None:
    ax.imshow(grid, cmap="GnBu", aspect="auto", origin="lower")
    ax.grid(False)
    ax.set_xticks(range(len(blocks)), [tokens_text(block) for block in blocks])
    ax.set_yticks(range(len(heads)), [str(count) for count in heads])
    limit = grid.min() + 0.7 * (grid.max() - grid.min())
    for row, column in np.ndindex(*grid.shape):
        value = grid[row, column]
        ax.text(column, row, format(value, form), ha="center", va="center", fontsize=9,
                color="white" if value > limit else INK)  # fmt: skip


def _draw_11(replay: Replay, found: Found, times: str) -> Any:
    fig = figure(9.2, 3.6)
    panels = axes(fig, 1, len(OTHER_SHARES), sharey=True)
    paper = PAPER_11.get(replay.series[0].job.seq_length, {})
    for ax, share in zip(panels, OTHER_SHARES, strict=True):
        curves = scaling(replay, found, share)
        sizes = list(curves["libra"])
        ax.plot(sizes, sizes, ":", color=MUTED, label="ideal")
        ax.plot(sizes, list(curves["libra"].values()), "o-", color=LIBRA, label="Libra")
        ax.plot(sizes, list(curves["ulysses"].values()), "s-", color=BEFORE, label="Ulysses")
        for size, values in paper.items():
            ax.plot([size, size], values, "x", color=ACCENT, label="paper, end to end")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log", base=2)
        ax.set_xticks(sizes, [str(size) for size in sizes])
        ax.set_yticks(sizes, [str(size) for size in sizes])
        name = f"{share:.0%} other work at DP 1" if share else "attention alone"
        label(ax, f"{name}, {times}", "DP", "throughput over DP 1")
    panels[0].legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return fig


def draw_throughput(grid: ThroughputGrid) -> Any:
    """Figure 5: forward at the left, backward at the right, TFLOP/s."""
    fig = figure(9.6, 3.4)
    for ax, values, name in zip(
        axes(fig, 1, 2), (grid.forward, grid.backward), ("Forward", "Backward"), strict=True
    ):
        _heat_map(ax, values, grid.heads, grid.blocks, ".0f")
        title = f"{name} TFLOP/s, {tokens_text(grid.num_keys)} keys, {grid.label}"
        label(ax, title, "block of queries", "query heads of a call")
        ax.title.set_fontsize(8.5)
    return fig


DRAWINGS: dict[str, Callable[[Replay, Found, str], Any]] = {
    "11": _draw_11,
    "13": _draw_13,
    "14": _draw_14,
    "15": _draw_15,
}
"""By figure: replay, summaries, and whether times are predicted or measured."""
