"""Pictures of the quickstart. In: Skew, RunResults. Out: PNG files."""

from __future__ import annotations

from pathlib import Path

import matplotlib
import numpy as np
from settings import BASELINE, LIBRA, SEQ_LENGTH
from skew import Skew
from train import RunResult

matplotlib.use("Agg")
from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.ticker import MaxNLocator  # noqa: E402

__all__ = ["plot_losses", "plot_skew"]

COLORS = {"before": "#c44e52", "after": "#2a7f62"}
RUN_COLORS = ["#c44e52", "#dd8d29", "#2a7f62"]
FLOAT32_STEP = 2.0**-23
STYLE = {
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.grid": True,
    "grid.alpha": 0.25,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
}


def plot_skew(skew: Skew, path: Path) -> None:
    """Document lengths, and the load of every worker before and after."""
    with plt.rc_context(STYLE):
        figure, (lengths, loads) = plt.subplots(1, 2, figsize=(11, 4.2))
        _draw_lengths(lengths, skew)
        _draw_loads(loads, skew)
        figure.savefig(path, dpi=150)
        plt.close(figure)


def _draw_lengths(axes: Axes, skew: Skew) -> None:
    edges = np.geomspace(8, max(skew.documents.max(), SEQ_LENGTH) + 1, 40)
    axes.hist(skew.documents, edges, color="#4c72b0", alpha=0.85, label="documents")
    axes.set_xscale("log")
    axes.axvline(SEQ_LENGTH, color="black", linewidth=1, linestyle=":")
    axes.annotate(
        "sequence length", (SEQ_LENGTH, 0.97), xycoords=("data", "axes fraction"),
        xytext=(4, 0), textcoords="offset points", va="top", fontsize=9,
    )  # fmt: skip
    axes.set(title="A long tail of documents", xlabel="tokens of a document", ylabel="documents")


def _draw_loads(axes: Axes, skew: Skew) -> None:
    """Sorted loads: a flat line at 1 is perfect balance."""
    for name, label, loads in (
        ("before", "each replica computes its own sequence", skew.before),
        ("after", f"sequence pools of {LIBRA.pool_size}, placed by libra", skew.after),
    ):
        ordered = np.sort(loads / loads.mean(axis=2, keepdims=True), axis=None)
        share = np.linspace(0, 100, len(ordered))
        imbalance = (loads.max(axis=2) / loads.mean(axis=2) - 1).mean()
        axes.plot(
            share, ordered, color=COLORS[name], linewidth=2,
            label=f"{label} (imbalance {imbalance:.1%})",
        )  # fmt: skip
    axes.axhline(1, color="black", linewidth=1, linestyle=":")
    axes.set(
        title="Attention load of a worker", xlabel="workers of all microbatches, sorted (%)",
        ylabel="load / mean load of its microbatch", ylim=(0, None),
    )  # fmt: skip
    axes.legend(loc="lower right", fontsize=9)


def plot_losses(runs: list[RunResult], path: Path) -> None:
    """Loss curves on top of each other, their difference, and the slowest worker."""
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 3, figsize=(14, 4))
        loss, difference, load = panels
        baseline = next(run for run in runs if run.name == BASELINE)
        for index, run in enumerate(runs):
            style = {"color": RUN_COLORS[index % len(RUN_COLORS)], "label": run.name}
            iterations = run.column("iteration")
            # Wide below narrow: equal curves stay visible.
            loss.plot(iterations, run.losses, linewidth=2 + 2 * (len(runs) - 1 - index), **style)
            gap = np.abs(np.array(run.losses) / np.array(baseline.losses) - 1) / FLOAT32_STEP
            if run is not baseline:
                difference.plot(iterations, gap, "o", markersize=8 - 2 * index, **style)
            slowest = np.array(run.column("straggler_pairs")) / np.array(run.column("mean_pairs"))
            load.plot(iterations, slowest, marker="o", markersize=3, **style)
        difference.axhspan(0, 1, color="black", alpha=0.06)
        difference.set_ylim(0, max(2.0, difference.get_ylim()[1]))
        load.axhline(1, color="black", linewidth=1, linestyle=":")
        loss.set(title="Loss", ylabel="language-model loss")
        difference.set(
            title=f"Difference from {BASELINE}", ylabel="relative, in float32 roundings (1.2e-7)"
        )
        load.set(title="Attention load", ylabel="slowest worker / mean")
        for axes in panels:
            axes.set_xlabel("iteration")
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.legend()
        figure.savefig(path, dpi=150)
        plt.close(figure)
