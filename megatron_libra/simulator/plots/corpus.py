"""How long samples are, and how unequal packed sequences. In: Simulation. Out: figures."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.plots.style import (
    ACCENT,
    BEFORE,
    INK,
    LIBRA,
    PAPER,
    axes,
    figure,
    label,
    tokens_text,
)
from megatron_libra.simulator.replay import pools_of
from megatron_libra.simulator.simulation import Simulation

__all__ = ["draw_distribution", "draw_skew"]

Float = NDArray[np.float64]


def draw_distribution(simulation: Simulation) -> Any:
    """Share of samples, tokens and attention work by sample length."""
    histogram, half = simulation.histogram, simulation.lengths.half_work_length
    fig = figure(9.2, 3.1)
    (ax,) = axes(fig)
    for name, count, color in (
        ("samples", histogram.samples, BEFORE),
        ("tokens", histogram.tokens, LIBRA),
        ("attention work (length squared)", histogram.work, ACCENT),
    ):
        share = count / count.sum() * 100
        ax.stairs(share, histogram.edges, color=color, alpha=0.18, fill=True)
        ax.stairs(share, histogram.edges, color=color, linewidth=1.6, label=name)
    ax.axvline(half, color=ACCENT, linewidth=1, linestyle=":")
    ax.set_xscale("log", base=2)
    ax.set_xticks([2.0**power for power in range(0, simulation.job.seq_length.bit_length(), 2)])
    ax.xaxis.set_major_formatter(lambda value, _: tokens_text(value))
    ax.minorticks_off()
    ax.set_ylim(0, ax.get_ylim()[1] * 1.12)
    ax.annotate(
        f"half of the work is in samples\nof at least {half:,} tokens",
        (half, ax.get_ylim()[1]),
        (-6, -4),
        textcoords="offset points",
        ha="right",
        va="top",
        fontsize=8.5,
        color=ACCENT,
    )
    label(ax, "Few samples carry the attention work", "tokens of a sample", "share, %")
    ax.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left")
    return fig


def draw_skew(simulation: Simulation) -> Any:
    """Loads of one step before and after: by microbatch, and summed over the step."""
    candidate, job = simulation.recommendation.result.candidate, simulation.job
    squares = [sum(x * x for x in lengths) for lengths in simulation.window]
    work = np.array(squares, np.float64) / np.mean(squares)
    pools = pools_of(simulation.window, candidate, job)
    placed = np.array([work[pool].mean() for pool in pools])
    fig = figure(9.2, 3.2)
    left, right = axes(fig, 1, 2, sharey=True)
    _bars(left, work, placed)
    label(left, "One microbatch", "packed sequences, sampler order", "attention work / mean")
    microbatches = job.num_microbatches
    _bars(
        right,
        work.reshape(microbatches, -1).mean(axis=0),
        placed.reshape(microbatches, -1).mean(axis=0),
    )
    label(right, f"Whole step (sum of {microbatches} microbatches)", "replicas", "")
    left.set_ylim(0, work.max() * 1.45)
    left.legend(frameon=False, fontsize=8.5, labelcolor=INK, loc="upper left", ncols=3)
    return fig


def _bars(ax: Any, before: Float, after: Float) -> None:
    """Bars of sequences, and over them one line segment for each pool of several sequences."""
    ax.bar(np.arange(len(before)), before, width=0.9, color=BEFORE, label="each on its own")
    width = len(before) / len(after)
    edges = np.arange(len(after) + 1) * width - 0.5
    ax.stairs(after, edges, color=LIBRA, linewidth=2.2, baseline=None, label="pools after VRSP")
    ax.axhline(1, color=ACCENT, linewidth=0.9, linestyle=":", label="mean")
    ax.set_xlim(-0.5, len(before) - 0.5)
    at = int(before.argmax())
    ax.annotate(
        f"{before[at]:.2f}x",
        (at, before[at]),
        (0, 3),
        textcoords="offset points",
        fontsize=8.5,
        color=INK,
        ha="right" if at > len(before) * 0.9 else "center",
    )
    ax.text(
        0.99,
        0.85,
        f"heaviest pool {after.max():.3f}x",
        transform=ax.transAxes,
        ha="right",
        va="top",
        fontsize=8.5,
        color=LIBRA,
        bbox={"facecolor": PAPER, "alpha": 0.8, "linewidth": 0, "pad": 1},
    )
