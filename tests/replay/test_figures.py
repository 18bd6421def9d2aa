"""Each figure on a small job: its series, its table, its picture."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.rows import LengthRows
from megatron_libra.replay.figures import FIGURES, Choices, scaling
from megatron_libra.replay.replay import Corpus, Replay, prepare
from megatron_libra.replay.report import Summary, summaries
from megatron_libra.replay.throughput import grid_calls, predicted_grid, throughput_grid
from megatron_libra.replay.times import pool_times, predicted
from megatron_libra.simulator.calibration import built_in
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.processes import TaskPool

JOB = TrainingJob(
    seq_length=64,
    context_parallel_size=2,
    data_parallel_size=4,
    global_batch_size=8,
    shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
    workers_per_node=2,
)
CHOICES = Choices(base=LibraConfig(pool_size=2, block_size=8, head_split=2))
WINDOW = LengthRows.from_rows([[64], [8] * 8, [8] * 8, [64], *[[4] * 16] * 4])
CORPUS = Corpus(name="small", packing="by hand", seeds=(0,), num_windows=1)
MODEL = built_in("h200-fa4")


def filled(number: str, job: TrainingJob = JOB) -> tuple[Replay, tuple[Summary, ...]]:
    series = FIGURES[number].series(job, CHOICES)
    with TaskPool(1) as tasks:
        replay = prepare(number, CORPUS, [WINDOW], series, tasks)
    return replay, summaries(replay, pool_times(replay, predicted(replay, MODEL), MODEL))


@pytest.mark.parametrize("number", FIGURES)
def test_tables_have_a_cell_for_each_column(number):
    table = FIGURES[number].table(*filled(number))
    assert table.rows
    for key, cells in table.rows:
        assert key
        texts = [column.text(cell) for column, cell in zip(table.columns, cells, strict=True)]
        assert any(texts)


@pytest.mark.parametrize("number", FIGURES)
def test_pictures_are_drawn(number, tmp_path):
    pytest.importorskip("matplotlib")
    from megatron_libra.replay.drawings import DRAWINGS

    path = tmp_path / "figure.png"
    DRAWINGS[number](*filled(number), "predicted").savefig(path)
    assert path.read_bytes()[:4] == b"\x89PNG"


def test_figure_13_always_has_what_speedups_refer_to():
    names = [each.name for each in FIGURES["13"].series(JOB, replace(CHOICES, methods=("libra",)))]
    assert names == ["ulysses", "libra"]


def test_figure_14_has_the_sizes_that_divide_dp():
    replay, found = filled("14")
    sizes = {series.method.config.pool_size for series in replay.series[1:]}
    assert sizes == {2, 4}
    rows = FIGURES["14"].table(replay, found).rows
    assert rows[0][0] == "Ulysses"
    for (_, cells), each in zip(rows, found, strict=True):
        total = each.mean_ms / found[0].mean_ms
        assert cells[0] == "predicted"
        assert cells[2] + cells[3] == pytest.approx(max(total, cells[2]))


def test_figure_15_has_one_pool_in_a_microbatch_and_no_overlap():
    replay, _ = filled("15")
    for series in replay.series[1:]:
        assert series.method.config.pool_size == series.job.data_parallel_size == 4
        assert not series.method.is_overlapped and series.method.config.chunks == 1
    grid = {(s.method.config.block_size, s.method.config.head_split) for s in replay.series[1:]}
    assert grid == {(block, heads) for block in (2, 4, 8, 16) for heads in (1, 2, 4)}
    wide = replace(JOB, context_parallel_size=16, shape=replace(JOB.shape, query_heads=16))
    sizes = {each.job.data_parallel_size for each in FIGURES["15"].series(wide, CHOICES)}
    assert sizes == {4}


def test_figure_11_keeps_the_global_batch_and_pools_within_dp():
    replay, found = filled("11")
    sizes = {(s.job.data_parallel_size, s.method.config.pool_size) for s in replay.series[1::2]}
    assert sizes == {(1, 1), (2, 2), (4, 2), (8, 2)}
    steps = {each.name: each.step_ms for each in found}
    alone = scaling(replay, found, 0.0)
    assert alone["ulysses"][1] == alone["libra"][1] == 1
    assert alone["libra"][8] == pytest.approx(steps["libra DP 1"] / steps["libra DP 8"])
    half = scaling(replay, found, 0.5)
    slow = steps["ulysses DP 1"]
    expected = 2 * slow / (steps["ulysses DP 8"] + slow / 8)
    assert half["ulysses"][8] == pytest.approx(expected), "other work scales perfectly"


def test_throughput_is_flops_over_seconds():
    grid = throughput_grid(JOB.shape, 8192, "by hand", lambda call: (1e-3, 2e-3))
    assert (grid.blocks, grid.heads) == ((1024, 2048, 4096, 8192), (1, 2, 4))
    pairs = sum(range(8192 - 1024 + 1, 8192 + 1))
    assert grid.forward[1, 0] == pytest.approx(4 * 8 * 2 * pairs / 1e-3 / 1e12)
    np.testing.assert_allclose(grid.backward, grid.forward * 1.25)


def test_calls_of_the_grid_have_the_kv_heads_of_their_query_heads():
    shape = AttentionShape(query_heads=16, kv_heads=4, head_dim=8)
    heads = [(row[0].query_heads, row[0].kv_heads) for row in grid_calls(shape, 4096)]
    assert heads == [(1, 1), (2, 1), (4, 1), (8, 2), (16, 4)]


def test_the_model_fills_the_grid_and_small_calls_are_slower():
    grid = predicted_grid(replace(JOB.shape, head_dim=128), 65_536, MODEL)
    assert (grid.forward > 0).all() and (grid.backward > 0).all()
    assert grid.forward[0, 0] < 0.2 * grid.forward.max()
