"""One look for all pictures. In: sizes and values. Out: figures, axes, colours."""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = [
    "ACCENT",
    "BEFORE",
    "INK",
    "LIBRA",
    "MUTED",
    "PAPER",
    "WARM",
    "axes",
    "figure",
    "label",
    "pool_colors",
    "tokens_text",
]

INK = "#1f2933"
MUTED = "#7b8794"
PAPER = "#ffffff"
GRID = "#e4e7eb"
BEFORE = "#9aa5b1"
"""The state without Libra."""
LIBRA = "#0f766e"
"""The recommended configuration."""
ACCENT = "#d9480f"
"""The one thing to look at."""
WARM = "#f4a261"
"""Communication."""
SEQUENTIAL = ("#dbe9f6", "#08306b")


def figure(width: float, height: float) -> Any:
    """An empty figure of a size in inches."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), facecolor=PAPER, layout="constrained")


def axes(fig: Any, rows: int = 1, columns: int = 1, **options: Any) -> list[Any]:
    """Flat list of axes without a box and with a quiet grid."""
    grid = fig.subplots(rows, columns, squeeze=False, **options)
    for each in grid.ravel():
        for side in ("top", "right"):
            each.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            each.spines[side].set_color(MUTED)
        each.tick_params(colors=INK, labelsize=8.5, length=3)
        each.grid(True, color=GRID, linewidth=0.7)
        each.set_axisbelow(True)
    return list(grid.ravel())


def label(ax: Any, title: str, x: str, y: str) -> None:
    """Title at the left, axis names in muted ink."""
    ax.set_title(title, loc="left", fontsize=10, color=INK, fontweight="bold")
    ax.set_xlabel(x, fontsize=9, color=INK)
    ax.set_ylabel(y, fontsize=9, color=INK)


def tokens_text(count: float) -> str:
    """Tokens in binary thousands: 512, 4K, 1M."""
    for unit, size in (("M", 2**20), ("K", 2**10)):
        if count >= size:
            return f"{count / size:g}{unit}"
    return f"{count:g}"


def pool_colors(count: int) -> list[Any]:
    """Colours for `count` things in order, light to dark."""
    from matplotlib.colors import LinearSegmentedColormap

    ramp = LinearSegmentedColormap.from_list("libra", SEQUENTIAL)
    return [ramp(x) for x in np.linspace(0.15, 1.0, count)]
