"""docs/results/replay.md holds what the planner and the model give today: some rows of every
predicted table are computed again, from the corpus on. Of the table of more steps that is Libra on
the ten steps of one seed; everything else there takes minutes.
"""

from __future__ import annotations

import pytest

from megatron_libra.bench.document import read_rows
from megatron_libra.cli.replay_request import base_choices, read_windows
from megatron_libra.replay.figures import FIGURES, Choices
from megatron_libra.replay.replay import Replay, prepare
from megatron_libra.simulator.job import PRESET_JOBS
from megatron_libra.simulator.processes import TaskPool
from tests.replay import document_tables
from tests.replay.document_tables import DOCUMENT, MODELS, Rows

SIZES = {"256k": "longtail-256k", "1m": "longtail-1m"}


class Remembering(TaskPool):
    """Plans pools here and keeps their work: figures share many."""

    def __init__(self):
        super().__init__(1)
        self.works = {}

    def run(self, function, tasks, done=None):
        for task in tasks:
            if task.identity not in self.works:
                self.works[task.identity] = function(task)
        return [self.works[task.identity] for task in tasks]


@pytest.fixture(scope="module")
def plans():
    return Remembering()


@pytest.fixture(scope="module")
def replay_of(plans):
    """The replay of some series of a figure."""

    def replayed(size, figure, names, seeds=(0, 1, 2, 3), steps=1) -> Replay:
        job = PRESET_JOBS[SIZES[size]]
        corpus, windows = read_windows(SIZES[size], job, seeds=seeds, steps=steps, pack="auto")
        series = FIGURES[figure].series(job, Choices(base=base_choices(job, {})))
        chosen = [each for each in series if each.name in names]
        assert len(chosen) == len(names)
        return prepare(figure, corpus, windows, chosen, plans)

    return replayed


def written(name: str) -> Rows:
    return read_rows(DOCUMENT.read_text(encoding="ascii"), name)


def check(name: str, rows: Rows, columns: slice = slice(None)) -> None:
    """Compare computed rows with the same rows, or some of their cells, of the document."""
    table = written(name)
    assert rows
    assert {key: table[key][columns] for key in rows} == rows


METHODS = ("ulysses", "wlb", "distca", "tap", "tap_vrsp", "libra")


@pytest.mark.parametrize("size", SIZES)
def test_figure_13(replay_of, size):
    rows = document_tables.figure_13(replay_of(size, "13", METHODS)).rows
    assert list(rows) == list(written(f"figure-13 {SIZES[size]}"))
    check(f"figure-13 {SIZES[size]}", rows)


def test_where_libras_time_goes(replay_of):
    check(
        "figure-13 losses",
        document_tables.losses(*(replay_of(size, "13", ("libra",)) for size in SIZES)).rows,
    )


def test_sensitivity(replay_of):
    replays = [replay_of(size, "13", ("ulysses", "libra")) for size in SIZES]
    changes = list(MODELS)
    assert list(written("sensitivity")) == changes
    check("sensitivity", document_tables.sensitivity(*replays, [changes[2], changes[-1]]).rows)


def test_one_seed_of_more_steps(replay_of):
    replay = replay_of("256k", "13", ("ulysses", "libra"), seeds=(0,), steps=10)
    check("more-steps", document_tables.one_seed(replay, 0), slice(4))


def test_two_pool_sizes_of_figure_14(replay_of):
    names = [f"{method} P {size}" for size in (8, 32) for method in ("tap", "tap_vrsp", "libra")]
    check("figure-14", document_tables.figure_14(replay_of("256k", "14", ["ulysses", *names])).rows)


@pytest.mark.parametrize(("block", "heads"), [(16384, 1), (2048, 16)])
def test_a_cell_of_figure_15(replay_of, block, heads):
    replay = replay_of("256k", "15", ("ulysses", f"tap_vrsp B {block} H {heads}"))
    table = document_tables.figure_15(replay)
    place = (1, 2, 4, 8, 16).index(heads)
    assert table.titles == ("B", f"H {heads}")
    check("figure-15", table.rows, slice(place, place + 1))


def test_the_ends_of_figure_11(replay_of):
    names = [f"{method} DP {size}" for size in (1, 16) for method in ("ulysses", "libra")]
    check("figure-11", document_tables.figure_11(replay_of("256k", "11", names)).rows)


def test_figure_5():
    for name, table in document_tables.figure_5().items():
        check(f"figure-5 {name}", table.rows)
        assert written(f"figure-5 {name}") == table.rows


def test_the_document_is_whole():
    """Every table has its rows and no cell too few; blank are only bounds that there are not."""
    assert list(written("figure-14")) == ["2", "4", "8", "16", "32"]
    assert list(written("figure-15")) == ["2048", "4096", "8192", "16384"]
    assert list(written("figure-11")) == [f"DP {size}" for size in (1, 2, 4, 8, 16)]
    seeds = [f"Libra, seed {seed} alone" for seed in document_tables.MORE_SEEDS]
    assert list(written("more-steps")) == [*written("figure-13 longtail-1m"), *seeds]
    for name, width in (("figure-14", 5), ("figure-15", 5), ("figure-11", 6), ("more-steps", 8)):
        assert {len(cells) for cells in written(name).values()} == {width}, name
    for name in ("figure-14", "figure-15", "figure-11", "sensitivity"):
        assert all(cell for cells in written(name).values() for cell in cells), name
