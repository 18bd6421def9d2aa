"""How long the tiles of a call take: by hand, and against a schedule of every tile."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.makespan import makespan, spread
from megatron_libra.simulator.tiling import (
    ENTRY_HEAD,
    ENTRY_TILE,
    GRIDS,
    HEAD_ENTRY,
    Tiling,
    tile_work,
)
from megatron_libra.simulator.tilings import tiling_of

Entries = list[tuple[int, int]]


def _table(*calls: Entries, heads: int = 1) -> CallTable:
    return CallTable.of_calls(
        [(np.array([q for q, _ in each]), np.array([k for _, k in each])) for each in calls],
        [heads] * len(calls),
        [heads] * len(calls),
    )


def _time(entries: Entries, heads: int, tiling: Tiling, tile_steps: float, slots: int) -> float:
    work = tile_work(_table(entries, heads=heads), tiling)
    return float(makespan(work, tile_steps, slots, 1.0)[0])


def _steps(queries: int, keys: int, tiling: Tiling) -> list[int]:
    """Of the tiles of queries of one head; test_tiling.py counts them pair by pair."""
    last = [min(start + tiling.tile_rows, queries) for start in range(0, queries, tiling.tile_rows)]
    return [-(-(keys - queries + row) // tiling.step_rows) for row in last]


def _order(entries: Entries, heads: int, tiling: Tiling) -> Iterator[int]:
    """Steps of all tiles in the order of the grid."""
    cut = [_steps(q, k, tiling) for q, k in entries]
    cut = [sorted(each, reverse=not tiling.longest_last) for each in cut]
    if tiling.grid == HEAD_ENTRY:
        yield from (steps for _ in range(heads) for each in cut for steps in each)
    for each in cut if tiling.grid == ENTRY_HEAD else []:
        yield from each * heads
    for each in cut if tiling.grid == ENTRY_TILE else []:
        yield from (steps for steps in each for _ in range(heads))


def _scheduled(
    entries: Entries, heads: int, tiling: Tiling, tile_steps: float, slots: int
) -> float:
    """When the last tile is done if each starts on the first slot that is free."""
    free = [0.0] * slots
    for steps in _order(entries, heads, tiling):
        heapq.heapreplace(free, free[0] + steps + tile_steps)
    return max(free)


@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("longest_last", [False, True])
def test_the_makespan_is_near_that_of_a_schedule(grid: str, longest_last: bool) -> None:
    """Random calls of one tile to some hundreds on 20 slots: where it is hardest. With many tiles
    for each slot the work alone counts (next test).
    """
    rng = np.random.default_rng(0)
    tiling = Tiling(
        tile_rows=16, step_rows=16, owns_keys=False, grid=grid, longest_last=longest_last
    )
    ratios = []
    for _ in range(150):
        keys = rng.integers(16, 500, int(rng.integers(1, 6)))
        entries = [(int(rng.integers(16, k + 1)), int(k)) for k in keys]
        heads = int(rng.integers(1, 9))
        found = _time(entries, heads, tiling, 2.0, 20)
        ratios.append(found / _scheduled(entries, heads, tiling, 2.0, 20))
    assert np.median(ratios) == pytest.approx(1, abs=0.035)
    assert np.percentile(ratios, 10) > 0.88 and np.percentile(ratios, 90) < 1.06
    assert max(ratios) < 1.35


def test_many_tiles_take_as_long_as_their_work() -> None:
    entries = [(400, 450), (300, 300), (20, 500)]
    tiling = Tiling(tile_rows=16, step_rows=16, owns_keys=False, grid=ENTRY_TILE)
    found = _time(entries, 40, tiling, 2.0, 20)
    assert found == pytest.approx(_scheduled(entries, 40, tiling, 2.0, 20), rel=0.01)


def test_few_tiles_take_as_long_as_the_longest() -> None:
    tiling = Tiling(tile_rows=8, step_rows=8, owns_keys=False)
    work = tile_work(_table([(16, 80)]), tiling)  # tiles of 9 and 10 steps
    assert makespan(work, 0.0, 4, 1.0) == pytest.approx([10])
    assert makespan(work, 0.0, 4, 0.6) == pytest.approx([6])
    assert makespan(work, 0.0, 1, 1.0) == pytest.approx([19])


def test_one_tile_more_than_slots_takes_twice_as_long() -> None:
    tiling = Tiling(tile_rows=8, step_rows=8, owns_keys=False)
    calls = _table([(8, 800)] * 4, [(8, 800)] * 5)
    times = makespan(tile_work(calls, tiling), 0.0, 4, 1.0)
    assert times[0] == 100 and times[1] == pytest.approx(200, rel=0.03)


@pytest.mark.parametrize(
    "entries",
    [[(20480, 49152)], [(4641, 17879)] * 4, [(10240, 65536), (10240, 49147)], [(8892, 58039)] * 4],
)
def test_the_last_wave_of_few_long_tiles(entries: Entries) -> None:
    """Far parts of pools in one or two heads: 2 to 5 tiles for each of 132 slots, a call as long as
    one tile more than its work."""
    tiling = tiling_of("fa4", 128, backward=False)
    expected = _scheduled(entries, 2, tiling, 1.0, 132)
    work = tile_work(_table(entries, heads=2), tiling)
    assert spread(work, 1.0, 132)[0] < 0.88 * expected
    assert _time(entries, 2, tiling, 1.0, 132) == pytest.approx(expected, rel=0.085)
