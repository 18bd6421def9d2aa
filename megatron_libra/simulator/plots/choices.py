"""Which P, B and H. In: Simulation. Out: figures."""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_libra.simulator.metrics import CandidateResult
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
    pool_colors,
)
from megatron_libra.simulator.simulation import Simulation

__all__ = ["draw_grid", "draw_pool_sizes", "draw_time_against_bytes"]

FLOOR = 1e-4
"""Imbalances below are drawn here, on a logarithmic axis."""
STEP_TICKS = (1, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 16)
MARKERS = {"microbatch": "o", "step": "D", "pipeline": "^", "off": "s"}


def draw_pool_sizes(simulation: Simulation) -> Any:
    """Left: imbalance between pools by P. Right: the best step of each P."""
    fig = figure(9.2, 3.4)
    left, right = axes(fig, 1, 2)
    _imbalances(left, simulation)
    _steps(right, simulation)
    return fig


def _imbalances(ax: Any, simulation: Simulation) -> None:
    for scope in sorted({each.scope for each in simulation.skew}):
        rows = sorted((s for s in simulation.skew if s.scope == scope), key=lambda s: s.pool_size)
        sizes = [s.pool_size for s in rows]
        if not ax.lines:
            before = [max(FLOOR, s.before.mean()) for s in rows]
            ax.plot(sizes, before, "s--", color=BEFORE, label="pools, sampler order")
        if scope == "microbatch":
            after = [max(FLOOR, s.after.mean()) for s in rows]
            ax.plot(sizes, after, "o-", color=LIBRA, label="pools, scope microbatch")
        elif scope != "off":
            after = [max(FLOOR, s.step_after.mean()) for s in rows]
            ax.plot(sizes, after, "D-", color=ACCENT, label=f"step sums, scope {scope}")
    _pool_axis(ax, [s.pool_size for s in simulation.skew])
    ax.set_yscale("log")
    label(ax, "Imbalance of all steps", "pool size P", "max / mean - 1")
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def _steps(ax: Any, simulation: Simulation) -> None:
    """Bars of the reference and of the fastest finalist of each P, in units of the reference."""
    reference = simulation.references[simulation.reference_name]
    chosen = simulation.recommendation.result
    best: dict[int, CandidateResult] = {}
    for result in simulation.finalists:
        best.setdefault(result.candidate.pool_size, result)
    best[chosen.candidate.pool_size] = chosen
    rows = [reference, *(best[size] for size in sorted(best))]
    names = [simulation.reference_name, *(f"P={size}" for size in sorted(best))]
    total = np.array([row.step_ms for row in rows]) / reference.step_ms
    compute = total * [row.compute_share for row in rows]
    colors = [BEFORE] + [LIBRA] * (len(rows) - 1)
    ax.bar(names, compute, color=colors, width=0.68)
    ax.bar(
        names,
        total - compute,
        bottom=compute,
        color=WARM,
        width=0.68,
        label="communication not hidden",
    )
    for at, row in enumerate(rows):
        is_chosen = row is chosen
        ax.text(
            at,
            total[at] + 0.015,
            f"{row.speedup_step:.2f}x",
            ha="center",
            fontsize=8.5,
            color=ACCENT if is_chosen else INK,
            fontweight="bold" if is_chosen else "normal",
        )
    ax.set_ylim(0, max(1.0, total.max()) * 1.12)
    ax.grid(False, axis="x")
    label(ax, "Predicted step, best B and H of each P", "", f"time / {simulation.reference_name}")
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper right")


def draw_grid(simulation: Simulation) -> Any:
    """Heat map over B and H at the recommended P, scope and placer."""
    chosen = simulation.recommendation.result.candidate
    rows = [
        each
        for each in simulation.screened
        if (each.candidate.pool_size, each.candidate.scope, each.candidate.placer)
        == (chosen.pool_size, chosen.scope, chosen.placer)
    ]
    blocks = sorted({each.candidate.block_size for each in rows})
    heads = sorted({each.candidate.head_split for each in rows})
    by_cell = {(each.candidate.head_split, each.candidate.block_size): each for each in rows}
    fastest = min(each.step_ms for each in rows)
    ratio = np.array([[by_cell[h, b].step_ms / fastest for b in blocks] for h in heads])
    fig = figure(9.2, 0.9 + 0.62 * len(heads))
    (ax,) = axes(fig)
    image = ax.imshow(ratio, cmap="YlOrBr", aspect="auto", vmin=1, vmax=max(1.1, ratio.max()))
    ax.grid(False)
    for y, h in enumerate(heads):
        for x, b in enumerate(blocks):
            cell = by_cell[h, b]
            is_chosen = (h, b) == (chosen.head_split, chosen.block_size)
            strong = ratio[y, x] > 1 + 0.6 * (image.norm.vmax - 1)
            ax.text(
                x,
                y,
                f"{ratio[y, x]:.2f}x   tile {cell.tile_over_target:.2f} C   "
                f"{cell.worker_bytes / 1e9:.2f} GB",
                ha="center",
                va="center",
                fontsize=9,
                color="white" if strong else INK,
                fontweight="bold" if is_chosen else "normal",
            )
            if is_chosen:
                ax.add_patch(_frame(x, y))
    ax.set_xticks(range(len(blocks)), [f"{b:,}" for b in blocks])
    ax.set_yticks(range(len(heads)), [str(h) for h in heads])
    label(
        ax,
        f"Step over the fastest, heaviest tile, bytes of the most loaded worker "
        f"(P = {chosen.pool_size}, scope {chosen.scope}, {chosen.placer})",
        "block size B, tokens",
        "head shards H",
    )
    return fig


def _frame(x: int, y: int) -> Any:
    from matplotlib.patches import Rectangle

    return Rectangle((x - 0.49, y - 0.47), 0.98, 0.94, fill=False, edgecolor=LIBRA, linewidth=2.5)


def draw_time_against_bytes(simulation: Simulation) -> Any:
    """Every screened candidate: bytes of the most loaded worker, and the step."""
    chosen = simulation.recommendation.result.candidate
    rows = simulation.screened
    sizes = sorted({each.candidate.pool_size for each in rows})
    colors = dict(zip(sizes, pool_colors(len(sizes)), strict=True))
    fastest = rows[0].step_ms
    fig = figure(9.2, 3.8)
    (ax,) = axes(fig)
    for scope, marker in MARKERS.items():
        for size in sizes:
            group = [r for r in rows if (r.candidate.scope, r.candidate.pool_size) == (scope, size)]
            if group:
                ax.scatter(
                    [r.worker_bytes / 1e9 for r in group],
                    [r.step_ms / fastest for r in group],
                    s=30,
                    marker=marker,
                    color=colors[size],
                    alpha=0.85,
                    linewidths=0,
                    label=f"P={size} {scope}",
                )
    front = _front(list(rows))
    ax.plot(
        [r.worker_bytes / 1e9 for r in front],
        [r.step_ms / fastest for r in front],
        color=MUTED,
        linewidth=1,
        linestyle="--",
        zorder=1,
        label="nothing is better in both",
    )
    mine = next(r for r in rows if r.candidate == chosen)
    ax.scatter(
        [mine.worker_bytes / 1e9],
        [mine.step_ms / fastest],
        s=190,
        marker="*",
        color=ACCENT,
        edgecolors="white",
        zorder=5,
        label="recommended",
    )
    ax.set_yscale("log", base=2)
    ticks = [tick for tick in STEP_TICKS if tick <= rows[-1].step_ms / fastest * 1.05]
    ax.set_yticks(ticks, [f"{tick:g}x" for tick in ticks])
    ax.minorticks_off()
    ax.set_xlim(left=0)
    label(
        ax,
        "Time against bytes, all candidates",
        "most loaded worker, GB in one layer's forward (the larger of sent and received)",
        "step / fastest",
    )
    fig.legend(
        *ax.get_legend_handles_labels(),
        frameon=False,
        fontsize=8,
        labelcolor=INK,
        loc="outside right upper",
    )
    return fig


def _front(rows: list[CandidateResult]) -> list[CandidateResult]:
    """Candidates that no other beats in both time and bytes, by bytes."""
    front: list[CandidateResult] = []
    for row in sorted(rows, key=lambda r: (r.worker_bytes, r.step_ms, r.candidate)):
        if not front or row.step_ms < front[-1].step_ms:
            front.append(row)
    return front


def _pool_axis(ax: Any, sizes: list[int]) -> None:
    ax.set_xscale("log", base=2)
    ax.set_xticks(sorted(set(sizes)), [str(size) for size in sorted(set(sizes))])
    ax.minorticks_off()
