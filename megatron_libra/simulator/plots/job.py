"""What it means for the job: throughput by DP, spread of microbatches. In: Simulation. Out:
figures.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megatron_libra.simulator.plots.style import BEFORE, INK, LIBRA, MUTED, axes, figure, label
from megatron_libra.simulator.simulation import Simulation

__all__ = ["draw_scaling"]


def draw_scaling(simulation: Simulation) -> Any:
    """Left: throughput over DP. Right: forward times of microbatches."""
    fig = figure(9.2, 3.4)
    left, right = axes(fig, 1, 2)
    _throughput(left, simulation)
    _spread(right, simulation)
    return fig


def _throughput(ax: Any, simulation: Simulation) -> None:
    points = simulation.scaling
    sizes = [point.data_parallel_size for point in points]
    ax.plot(sizes, sizes, ":", color=MUTED, label="ideal")
    curves = (
        (simulation.reference_name, [p.reference_scaling for p in points], BEFORE),
        ("libra", [p.scaling for p in points], LIBRA),
    )
    for name, scaling, color in curves:
        ax.plot(sizes, scaling, "o-", color=color, label=name)
        ax.annotate(
            f"{scaling[-1]:.1f}x",
            (sizes[-1], scaling[-1]),
            (-4, 7),
            textcoords="offset points",
            ha="right",
            fontsize=8.5,
            color=color,
        )
    ax.set_xscale("log", base=2)
    ax.set_yscale("log", base=2)
    ax.set_xticks(sizes, [str(size) for size in sizes])
    ax.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    ax.minorticks_off()
    label(ax, "Throughput at a fixed global batch", "DP", "relative to DP = 1")
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK)


def _spread(ax: Any, simulation: Simulation) -> None:
    """Both sets of forward times over the mean of Libra's, as in the paper's Figure 12."""
    mean = float(np.mean(simulation.forward_ms["libra"])) or 1.0
    rows = list(simulation.forward_ms.items())
    rng = np.random.default_rng(0)  # only moves points apart
    for row, (name, times) in enumerate(rows):
        values = np.array(times) / mean
        color = LIBRA if name == "libra" else BEFORE
        ax.scatter(
            values,
            row + rng.uniform(-0.22, 0.22, len(values)),
            s=10,
            color=color,
            alpha=0.55,
            linewidths=0,
        )
        ax.plot([values.mean()] * 2, [row - 0.32, row + 0.32], color=INK, linewidth=1.6)
        ax.annotate(
            f"{values.min():.2f} to {values.max():.2f} x",
            (0.98, row + 0.36),
            xycoords=("axes fraction", "data"),
            ha="right",
            fontsize=8.5,
            color=INK,
        )
    ax.set_yticks(range(len(rows)), [name for name, _ in rows])
    ax.set_ylim(-0.5, len(rows) - 0.3)
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_formatter(lambda value, _: f"{value:.2g}")
    ax.minorticks_off()
    ax.grid(False, axis="y")
    label(ax, "Forward of each microbatch", "time / mean of libra (bar: mean)", "")
