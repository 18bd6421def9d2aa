"""The predicted tables of docs/results/replay.md. In: prepared replays. Out: their rows as text.

test_document.py computes some rows again and compares. All of them are written from the files that
the commands of the document make with --prepare FOLDER/NAME.npz, by the names in FILES:

    python -m tests.replay.document_tables FOLDER
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from megatron_libra.bench.document import replace_table
from megatron_libra.bench.table import markdown_table
from megatron_libra.cli.replay_request import linked
from megatron_libra.cli.replay_tables import LOSS_TITLES
from megatron_libra.replay.archive import load_replay
from megatron_libra.replay.figures import FIGURES
from megatron_libra.replay.replay import Replay
from megatron_libra.replay.report import Summary, summaries
from megatron_libra.replay.throughput import ThroughputGrid, predicted_grid
from megatron_libra.replay.times import LOSSES, pool_times, predicted
from megatron_libra.simulator.calibration import built_in
from megatron_libra.simulator.cost_model import CostModel, KernelCost
from megatron_libra.simulator.job import PRESET_JOBS

DOCUMENT = Path(__file__).resolve().parent.parent.parent / "docs" / "results" / "replay.md"
MODEL = linked(built_in("h200-fa4"), {"inter_node_gb_s": 50.0})
MORE_SEEDS = (0, 1, 2)
MORE_STEPS = {"256K": 10, "1M": 40}
"""Optimizer steps of each seed."""
FILES = ("13_256k", "13_1m", "more_256k", "more_1m", "14", "15", "11")

Rows = dict[str, list[str]]


@dataclass(frozen=True)
class Text:
    """A table of the document."""

    titles: Sequence[str]
    rows: Rows

    def markdown(self) -> str:
        """Without its comments."""
        return markdown_table(self.titles, ([key, *row] for key, row in self.rows.items()))


def found_of(replay: Replay, model: CostModel = MODEL) -> tuple[Summary, ...]:
    """Summaries by a model; nothing is measured."""
    return summaries(replay, pool_times(replay, predicted(replay, model), model))


def picked(replay: Replay, found: Sequence[Summary], titles: Sequence[str]) -> Rows:
    """Some columns of what `libra replay` prints, by title, as it prints them."""
    table = FIGURES[replay.figure].table(replay, found)
    columns = {column.title: n for n, column in enumerate(table.columns)}
    return {
        key: [table.columns[n].text(cells[n]) for n in (columns[title] for title in titles)]
        for key, cells in table.rows
    }


def figure_13(replay: Replay) -> Text:
    """A row for each method."""
    titles = ("mean ms", "worst ms", "mean", "worst", "mean, bound", "worst, bound", "GB worker")
    return Text(("method", *titles), picked(replay, found_of(replay), titles))


def losses(of_256k: Replay, of_1m: Replay) -> Text:
    """Where Libra's time goes, a row for each corpus; milliseconds."""
    shown = [name for name in LOSSES if name != "slowed"]  # nothing, without an overlap loss
    titles = ("", "mean ms", "all alike", "pool over mean", *(LOSS_TITLES[name] for name in shown))
    rows: Rows = {}
    for size, replay in (("256K", of_256k), ("1M", of_1m)):
        for each in found_of(replay):
            if each.name == "libra":
                whole = (each.mean_ms, each.perfect_ms, each.between_ms)
                lost = (each.losses_ms[name] for name in shown)
                rows[size] = [f"{ms:.1f}" for ms in (*whole, *lost)]
    return Text(titles, rows)


def _lasting(cost: KernelCost) -> KernelCost:
    """Every call at the clock of lasting load."""
    return KernelCost(
        forward=replace(cost.forward, clock_ms=0.001),
        backward=replace(cost.backward, clock_ms=0.001),
    )


NCCL = {"intra_node_gb_s": 284.0, "message_us": 24.0, "overlap_loss": 0.68}
MODELS: Mapping[str, CostModel] = {
    "as in Figure 13": MODEL,
    "`--overlap-loss 0.25`, all traffic": linked(MODEL, {"overlap_loss": 0.25}),
    "`--overlap-loss 0.68`, all traffic": linked(MODEL, {"overlap_loss": 0.68}),
    "NCCL everywhere: `--intra-node-gb-s 284 --message-us 24 --overlap-loss 0.68`": linked(
        MODEL, NCCL
    ),
    "`--inter-node-gb-s 40`, the model's own": linked(MODEL, {"inter_node_gb_s": 40.0}),
    "`--inter-node-gb-s 25`": linked(MODEL, {"inter_node_gb_s": 25.0}),
    "every call at the clock of lasting load (`clock_ms` 0.001 in a copy of the model)": replace(
        MODEL, kernels={dim: _lasting(cost) for dim, cost in MODEL.kernels.items()}
    ),
}
"""What the exchange and the clock could change."""


def sensitivity(of_256k: Replay, of_1m: Replay, changes: Sequence[str] = tuple(MODELS)) -> Text:
    """Libra's speedups, a row for each change; the replays have at least Ulysses and Libra."""
    titles = ("", "256K, mean", "256K, worst", "1M, mean", "1M, worst")
    rows = {
        change: [
            text
            for replay in (of_256k, of_1m)
            for text in picked(replay, found_of(replay, MODELS[change]), ("mean", "worst"))["Libra"]
        ]
        for change in changes
    }
    return Text(titles, rows)


def more_steps(of_256k: Replay, of_1m: Replay) -> Text:
    """A row for each method, all seeds together, then of Libra for each seed."""
    titles = ("mean", "worst", "mean, bound", "worst, bound")
    rows: Rows = {}
    for size, replay in (("256K", of_256k), ("1M", of_1m)):
        for key, cells in picked(replay, found_of(replay), titles).items():
            rows.setdefault(key, []).extend(cells)
        for number, seed in enumerate(MORE_SEEDS):
            start = number * MORE_STEPS[size]
            of_seed = of_windows(replay, start, start + MORE_STEPS[size])
            for key, cells in one_seed(of_seed, seed).items():
                rows.setdefault(key, []).extend(cells)
    return Text(("method", *(f"{size}, {each}" for size in MORE_STEPS for each in titles)), rows)


def one_seed(replay: Replay, seed: int) -> Rows:
    """Libra's speedups on the steps of one seed, without bounds."""
    found = picked(replay, found_of(replay), ("mean", "worst"))
    return {f"Libra, seed {seed} alone": [*found["Libra"], "", ""]}


def of_windows(replay: Replay, start: int, stop: int) -> Replay:
    """Some windows alone; the bounds stay those of all."""
    rows = replay.rows[(replay.rows[:, 1] >= start) & (replay.rows[:, 1] < stop)]
    used, rows[:, 4] = np.unique(rows[:, 4], return_inverse=True)
    rows[:, 1] -= start
    works = tuple(replay.works[index] for index in used)
    corpus = replace(replay.corpus, num_windows=stop - start)
    return replace(replay, rows=rows, works=works, corpus=corpus)


def figure_14(replay: Replay) -> Text:
    """A row for each P; the methods' columns are computation + exposed communication."""
    titles = ("P", "TAP alone", "TAP and VRSP", "Libra", "hidden", "GB of the most loaded worker")
    table = FIGURES["14"].table(replay, found_of(replay))
    columns = {column.title: n for n, column in enumerate(table.columns)}
    text = [
        {title: table.columns[n].text(cells[n]) for title, n in columns.items()}
        for _, cells in table.rows
    ]
    rows: Rows = {}
    for row in text[1:]:
        shares = f"{row['computation']} + {row['exposed communication']}"
        rows.setdefault(row["P"], []).append(shares)
        if row["hidden"]:
            rows[row["P"]] += [row["hidden"], row["GB worker"]]
    return Text(titles, rows)


def figure_15(replay: Replay) -> Text:
    """A row for each B, a column for each H."""
    cells: dict[str, dict[str, str]] = {}
    for block, heads, speedup in picked(replay, found_of(replay), ("B", "H", "speedup")).values():
        cells.setdefault(block, {})[heads] = speedup
    titles = [f"H {heads}" for heads in next(iter(cells.values()))]
    return Text(("B", *titles), {block: list(row.values()) for block, row in cells.items()})


def figure_11(replay: Replay) -> Text:
    """A row for each DP."""
    titles = (
        "step ms, Ulysses", "step ms, Libra", "Ulysses, attention alone", "Libra, attention alone",
        "Ulysses, 40% other work", "Libra, 40% other work",
    )  # fmt: skip
    return Text(("DP", *titles), picked(replay, found_of(replay), titles))


def figure_5() -> dict[str, Text]:
    """Forward and backward."""
    job = PRESET_JOBS["longtail-256k"]
    grid: ThroughputGrid = predicted_grid(job.shape, job.seq_length, MODEL)
    titles = ("heads", *(f"B {block}" for block in grid.blocks))
    return {
        name: Text(
            titles,
            {
                str(heads): [format(value, ".0f") for value in row]
                for heads, row in zip(grid.heads, values, strict=True)
            },
        )
        for name, values in (("forward", grid.forward), ("backward", grid.backward))
    }


def tables(load: Callable[[str], Replay]) -> Iterator[tuple[str, Text]]:
    """(name, table) of everything, given a replay by its name in FILES."""
    yield "figure-13 longtail-256k", figure_13(load("13_256k"))
    yield "figure-13 longtail-1m", figure_13(load("13_1m"))
    yield "figure-13 losses", losses(load("13_256k"), load("13_1m"))
    yield "sensitivity", sensitivity(load("13_256k"), load("13_1m"))
    yield "more-steps", more_steps(load("more_256k"), load("more_1m"))
    yield "figure-14", figure_14(load("14"))
    yield "figure-15", figure_15(load("15"))
    yield "figure-11", figure_11(load("11"))
    for name, text in figure_5().items():
        yield f"figure-5 {name}", text


def main() -> None:
    """Write every table into the document."""
    folder, text = Path(sys.argv[1]), DOCUMENT.read_text(encoding="ascii")
    for name, table in tables(lambda file: load_replay(folder / f"{file}.npz")):
        text = replace_table(text, name, table.markdown())
    DOCUMENT.write_text(text, encoding="ascii")


if __name__ == "__main__":
    main()
