"""How a call is cut into tiles and steps: by hand, counted, against a schedule of every tile."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

import numpy as np
import pytest

from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.tiling import (
    ENTRY_HEAD,
    ENTRY_TILE,
    GRIDS,
    HEAD_ENTRY,
    Tiling,
    floor_sum,
    tile_work,
)
from megatron_libra.simulator.tilings import KERNELS, tiling_of

Entries = list[tuple[int, int]]


def _table(*calls: Entries, query_heads: int = 1, kv_heads: int = 1) -> CallTable:
    return CallTable.of_calls(
        [(np.array([q for q, _ in each]), np.array([k for _, k in each])) for each in calls],
        [query_heads] * len(calls),
        [kv_heads] * len(calls),
    )


def test_the_example_of_the_module() -> None:
    """6 queries on 10 keys, tiles and steps of 4 rows."""
    calls = _table([(6, 10)])
    forward = tile_work(calls, Tiling(tile_rows=4, step_rows=4, owns_keys=False))
    backward = tile_work(calls, Tiling(tile_rows=4, step_rows=4, owns_keys=True))
    assert (forward.tiles[0], forward.steps[0], forward.longest[0]) == (2, 5, 3)
    assert (backward.tiles[0], backward.steps[0], backward.longest[0]) == (3, 5, 2)


def _tiles(queries: int, keys: int, ratio: int, tiling: Tiling) -> list[int]:
    """Steps of each tile of one head, counted pair by pair."""
    row, col = np.indices((queries * ratio, keys))
    visible = col <= row // ratio + keys - queries
    if tiling.owns_keys:
        visible = visible.T
    found = []
    for start in range(0, visible.shape[0], tiling.tile_rows):
        seen = visible[start : start + tiling.tile_rows].any(axis=0)
        steps = (
            np.add.reduceat(seen, np.arange(0, len(seen), tiling.step_rows)) if len(seen) else []
        )
        found.append(int(np.count_nonzero(steps)))
    return found


@pytest.mark.parametrize("owns_keys", [False, True])
@pytest.mark.parametrize("ratio", [1, 4])
def test_tiles_and_steps_are_those_of_the_mask(owns_keys: bool, ratio: int) -> None:
    rng = np.random.default_rng(0)
    tiling = Tiling(tile_rows=16, step_rows=12, owns_keys=owns_keys, packs_heads=not owns_keys)
    for _ in range(60):
        keys = int(rng.integers(1, 150))
        queries = int(rng.integers(0, keys + 1))
        packed = 1 if owns_keys else ratio
        work = tile_work(_table([(queries, keys)], query_heads=2 * ratio, kv_heads=2), tiling)
        steps = _tiles(queries, keys, packed, tiling)
        assert work.heads[0] == (2 * ratio if owns_keys else 2)
        assert (work.tiles[0], work.steps[0]) == (len(steps), sum(steps)), (queries, keys)
        if steps:
            assert (work.longest[0], work.shortest[0]) == (max(steps), min(steps))


def test_floor_sum_counts() -> None:
    rng = np.random.default_rng(0)
    count, modulus, slope, first = (
        rng.integers(low, 200, 300).astype(float) for low in (0, 1, 0, 0)
    )
    expected = [
        sum((int(s) * i + int(f)) // int(m) for i in range(int(n)))
        for n, m, s, f in zip(count, modulus, slope, first, strict=True)
    ]
    assert floor_sum(count, modulus, slope, first).tolist() == expected


def _order(entries: Entries, heads: int, tiling: Tiling) -> Iterator[int]:
    """Steps of all tiles in the order of the grid."""
    cut = [_tiles(q, k, 1, tiling) for q, k in entries]
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
        calls = _table(entries, query_heads=heads, kv_heads=heads)
        found = tile_work(calls, tiling).makespan(2.0, 20, 1.0)[0]
        ratios.append(found / _scheduled(entries, heads, tiling, 2.0, 20))
    assert np.median(ratios) == pytest.approx(1, abs=0.06)
    assert np.percentile(ratios, 10) > 0.82 and np.percentile(ratios, 90) < 1.06
    assert max(ratios) < 1.25


def test_many_tiles_take_as_long_as_their_work() -> None:
    entries = [(400, 450), (300, 300), (20, 500)]
    tiling = Tiling(tile_rows=16, step_rows=16, owns_keys=False, grid=ENTRY_TILE)
    found = tile_work(_table(entries, query_heads=40, kv_heads=40), tiling).makespan(2.0, 20, 1.0)
    assert found[0] == pytest.approx(_scheduled(entries, 40, tiling, 2.0, 20), rel=0.01)


def test_few_tiles_take_as_long_as_the_longest() -> None:
    tiling = Tiling(tile_rows=8, step_rows=8, owns_keys=False)
    work = tile_work(_table([(16, 80)]), tiling)  # tiles of 9 and 10 steps
    assert work.makespan(0.0, 4, 1.0) == pytest.approx([10])
    assert work.makespan(0.0, 4, 0.6) == pytest.approx([6])
    assert work.makespan(0.0, 1, 1.0) == pytest.approx([19])


def test_one_tile_more_than_slots_takes_twice_as_long() -> None:
    tiling = Tiling(tile_rows=8, step_rows=8, owns_keys=False)
    calls = _table([(8, 800)] * 4, [(8, 800)] * 5)
    times = tile_work(calls, tiling).makespan(0.0, 4, 1.0)
    assert times[0] == 100 and times[1] == pytest.approx(200, rel=0.03)


def test_empty_tiles_of_a_sparse_grid() -> None:
    """Entries of 3 and 1 tiles: a grid of 2 x 3 tiles in each of 2 heads, 4 of them empty."""
    tiling = Tiling(tile_rows=4, step_rows=4, owns_keys=False, sparse_grid=True)
    calls = _table([(12, 12), (4, 4)], query_heads=2, kv_heads=2)
    assert tile_work(calls, tiling).empty_tiles().tolist() == [4]


def test_tiles_look_at_the_entries_before_their_own() -> None:
    """31 at a time: the tile of entry 62 looks twice before it looks at its own."""
    tiling = Tiling(tile_rows=4, step_rows=4, owns_keys=False, searches_entry=True)
    assert tile_work(_table([(4, 4)] * 63), tiling).probes().tolist() == [31 + 2]


def test_tilings_of_known_kernels() -> None:
    fa4 = tiling_of("fa4", 256, backward=False)
    assert (fa4.tile_rows, fa4.step_rows, fa4.packs_heads) == (128, 80, True)
    assert tiling_of("torch_flash", 100, backward=True).owns_keys
    for kernel in KERNELS:
        tiling_of(kernel, 64, backward=True)
    with pytest.raises(ValueError, match=r"kernel \('x'\) must be one of fa4"):
        tiling_of("x", 64, backward=True)
    with pytest.raises(ValueError, match=r"head_dim \(512\) must be at most 256"):
        tiling_of("fa4", 512, backward=True)
