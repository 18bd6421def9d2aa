"""What `libra simulate` shows. In: a Simulation. Out: a table on stdout."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from megatron_libra.simulator.report import COLUMNS, columns_of, headings, model_sentence
from megatron_libra.simulator.run_file import NOTHING
from megatron_libra.simulator.simulation import Simulation

__all__ = ["show_simulation"]

NARROW = ("P", "B", "H", "scope", "pools", "GB worker", "tile/C", "step ms", "step")
"""Columns for a terminal below WIDE columns."""
WIDE = 150
TEXTS = ("scope", "placer")


def show_simulation(simulation: Simulation) -> None:
    """Print the finalists, and below them the recommendation with its reasons."""
    console = Console(highlight=False, markup=False, emoji=False)
    shown = NARROW if console.width < WIDE else tuple(COLUMNS)
    table = Table(
        title=f"{simulation.corpus_name}: {simulation.sequences.sequences:,} packed sequences, "
        f"{simulation.packing}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        collapse_padding=True,
        pad_edge=False,
    )
    table.add_column("", no_wrap=True)
    heading = headings(simulation)
    for name in shown:
        table.add_column(
            heading[name], justify="left" if name in TEXTS else "right", overflow="fold"
        )
    best = simulation.recommendation.result
    named = list(simulation.references.items()) + [("", each) for each in simulation.finalists]
    for name, result in named:
        cells = dict(zip(COLUMNS, columns_of(result, simulation), strict=True))
        mark = name or ("*" if result.candidate == best.candidate else "")
        style = "bold" if mark == "*" and best.is_faster else None
        table.add_row(mark, *(cells[name] for name in shown), style=style)
    console.print(table)
    c = best.candidate
    if not best.is_faster:
        console.print(f"{NOTHING} The best choice is slower than {simulation.reference_name}.")
    title = "Recommended (*)" if best.is_faster else "Best of those tried (*)"
    console.print(
        f"{title}: P = {c.pool_size}, B = {c.block_size}, H = {c.head_split}, "
        f"M = {c.chunks}, scope {c.scope}, placer {c.placer}"
    )
    for reason in simulation.recommendation.reasons:
        console.print(f"- {reason}")
    console.print(f"\n{simulation.sampling.sentence}")
    console.print(model_sentence(simulation))
