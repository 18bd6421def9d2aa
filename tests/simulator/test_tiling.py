"""How a call is cut into tiles and steps: by hand, counted."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.tiling import Tiling, floor_sum, tile_work
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
