"""The pictures of the report by name. In: Simulation. Out: SVG or PNG bytes."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Callable
from typing import Any

from megatron_libra.extras import install_hint
from megatron_libra.simulator.plots.choices import (
    draw_grid,
    draw_pool_sizes,
    draw_time_against_bytes,
)
from megatron_libra.simulator.plots.corpus import draw_distribution, draw_skew
from megatron_libra.simulator.plots.job import draw_scaling
from megatron_libra.simulator.plots.pool import draw_timeline, draw_traffic
from megatron_libra.simulator.simulation import Simulation

__all__ = ["FIGURES", "draw", "require_matplotlib"]

FIGURES: dict[str, Callable[[Simulation], Any]] = {
    "distribution": draw_distribution,
    "skew": draw_skew,
    "pool_sizes": draw_pool_sizes,
    "grid": draw_grid,
    "time_against_bytes": draw_time_against_bytes,
    "timeline": draw_timeline,
    "traffic": draw_traffic,
    "scaling": draw_scaling,
}


def require_matplotlib(pictures: str = "the HTML report") -> None:
    """ValueError if matplotlib is not installed; pictures: what can be left out."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError(
            f"pictures need matplotlib, which is not installed; {install_hint('plots')}, or leave "
            f"{pictures} out."
        )


def draw(simulation: Simulation, name: str, file_format: str = "svg") -> bytes:
    """One picture; the same bytes for the same simulation. ValueError without matplotlib."""
    require_matplotlib()
    from matplotlib import rc_context

    stream = io.BytesIO()
    with rc_context({"svg.hashsalt": name, "font.family": "DejaVu Sans"}):
        metadata = {"Date": None} if file_format == "svg" else None
        FIGURES[name](simulation).savefig(stream, format=file_format, dpi=110, metadata=metadata)
    return stream.getvalue()
