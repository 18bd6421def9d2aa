"""One pool's plan: who computes what and when, and who sends to whom. In: Simulation. Out:
figures.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_libra.simulator.plots.style import (
    ACCENT,
    BEFORE,
    INK,
    MUTED,
    WARM,
    axes,
    figure,
    label,
    pool_colors,
)
from megatron_libra.simulator.simulation import Simulation

__all__ = ["draw_timeline", "draw_traffic"]


def draw_timeline(simulation: Simulation) -> Any:
    """Gantt chart of one layer's forward: the reference at the left, the plan at the right."""
    example, job = simulation.example, simulation.job
    workers = np.arange(len(example.reference))
    colors = _slot_colors(example.slot_pairs.sum(axis=0))
    fig = figure(9.2, min(9.0, max(3.6, 1.6 + 0.075 * len(workers))))
    left, right = axes(fig, 1, 2, sharex=True, sharey=True)
    slot = workers // job.context_parallel_size
    left.barh(workers, example.reference * 1e3, height=0.86, color=[colors[s] for s in slot])
    _plan_bars(right, simulation, colors)
    for ax in (left, right):
        ax.grid(False, axis="y")
        for edge in range(1, len(example.sequences)):
            ax.axhline(edge * job.context_parallel_size - 0.5, color=MUTED, linewidth=0.5)
    left.set_yticks(workers[:: job.context_parallel_size])
    left.set_ylim(len(workers) - 0.5, -0.5)
    label(
        left,
        f"{simulation.reference_name}: {example.reference.max() * 1e3:.0f} ms",
        "ms of one layer's forward",
        "worker, by CP group",
    )
    label(right, f"libra: {example.time.forward_s * 1e3:.0f} ms", "ms of one layer's forward", "")
    fig.legend(
        handles=_legend(colors),
        frameon=False,
        fontsize=8.5,
        labelcolor=INK,
        ncols=2,
        loc="outside lower center",
    )
    return fig


def _plan_bars(ax: Any, simulation: Simulation, colors: list[Any]) -> None:
    """The computation by slot, what transfers add to it, and idle time: for the first dispatch,
    between chunks, for the last return."""
    example = simulation.example
    timeline, pairs = example.time.forward, example.slot_pairs
    workers = np.arange(len(pairs))
    compute = example.time.forward_compute.total
    slowed = timeline.end - timeline.wait - compute
    share = pairs / np.maximum(pairs.sum(axis=1, keepdims=True), 1)
    bars = [(timeline.first_wait, WARM)]
    bars += [(share[:, slot] * compute, color) for slot, color in enumerate(colors)]
    bars += [(slowed + timeline.middle_wait, BEFORE), (timeline.last_wait, WARM)]
    left = np.zeros(len(pairs))
    for seconds, color in bars:
        ax.barh(workers, seconds * 1e3, left=left, color=color, height=0.86, linewidth=0)
        left = left + seconds * 1e3


def _slot_colors(work: Any) -> list[Any]:
    """The heaviest sequence stands out, the others are shades from light to heavy."""
    ramp = pool_colors(max(2, len(work)))
    colors = [ramp[rank] for rank in np.argsort(np.argsort(work, kind="stable"), kind="stable")]
    colors[int(np.argmax(work))] = ACCENT
    return colors


def _legend(colors: list[Any]) -> list[Any]:
    from matplotlib.patches import Patch

    entries = [
        (ACCENT, "heaviest packed sequence"),
        (pool_colors(3)[1], "other sequences, darker is heavier"),
        (WARM, "exposed first dispatch, last return"),
        (BEFORE, "slowed by, or waiting for, transfers"),
    ]
    return [Patch(color=color, label=name) for color, name in entries]


def draw_traffic(simulation: Simulation) -> Any:
    """Bytes from every worker to every other in one layer's forward."""
    from matplotlib.colors import LogNorm

    example, job = simulation.example, simulation.job
    moved = example.work.traffic_bytes / 1e6
    fig = figure(9.2, 4.4)
    left, right = axes(fig, 1, 2, width_ratios=(1.15, 1))
    shown = np.ma.masked_less_equal(moved, 0)
    top = float(moved.max()) or 1.0
    image = left.imshow(shown, cmap="YlGnBu", norm=LogNorm(max(top / 1e3, 1e-3), top))
    left.grid(False)
    for edge in range(1, len(example.sequences)):
        at = edge * job.context_parallel_size - 0.5
        left.axhline(at, color=MUTED, linewidth=0.6)
        left.axvline(at, color=MUTED, linewidth=0.6)
    bar = fig.colorbar(image, ax=left, shrink=0.85, pad=0.02)
    bar.set_label("MB", fontsize=9, color=INK)
    bar.ax.tick_params(labelsize=8, colors=INK)
    label(left, "Who sends to whom (lines: CP groups)", "receiving worker", "sending worker")
    workers = np.arange(len(moved))
    right.barh(workers, -moved.sum(axis=1) / 1e3, height=0.9, color=ACCENT, label="sent")
    right.barh(
        workers, moved.sum(axis=0) / 1e3, height=0.9, color=pool_colors(3)[1], label="received"
    )
    right.axvline(0, color=INK, linewidth=0.8)
    right.xaxis.set_major_formatter(lambda value, _: f"{abs(value):g}")
    right.set_ylim(len(workers) - 0.5, -0.5)
    right.grid(False, axis="y")
    label(right, "Each worker", "GB", "")
    right.legend(frameon=False, fontsize=8.5, labelcolor=INK)
    return fig
