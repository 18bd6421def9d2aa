"""How a FlashAttention kernel cuts a call, and what the cut costs. In: calls. Out: TileWork.

A kernel's thread block (CTA) owns one *tile* of rows of one head and walks over the other side in
*steps*: forward owns queries and walks keys, backward owns keys and walks queries. A step costs the
same whether the causal mask hides none, some or nearly all of it. Example, tiles of 4 rows, steps
of 4, one entry of 6 queries on 10 keys:

    forward    tile 0: queries 0..3 see keys 0..7, 2 steps    tile 1: queries 4 5, 3 steps
    backward   tile 0: keys 0..3, 2 steps    tile 1: keys 4..7, 2 steps    tile 2: keys 8 9, 1 step
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.call_table import CallTable

__all__ = [
    "ENTRY_HEAD",
    "ENTRY_TILE",
    "GRIDS",
    "HEAD_ENTRY",
    "TileWork",
    "Tiling",
    "floor_sum",
    "tile_work",
]

Float = NDArray[np.float64]
GRIDS = ENTRY_TILE, ENTRY_HEAD, HEAD_ENTRY = ("entry, tile, head", "entry, head, tile",
                                              "head, entry, tile")  # fmt: skip
"""Orders of the tiles of a call, the outermost first."""
ENTRIES_OF_PROBE = 31
SCANNED_ENTRIES = 256
"""Above, FlashAttention-4 bisects instead of going through all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiling:
    """The cut of one pass of one kernel at one head dimension."""

    tile_rows: int
    """Rows that a CTA owns."""
    step_rows: int
    """Rows of the other side that it walks at a time."""
    owns_keys: bool
    """A CTA owns keys and walks queries, as backward does; else the other way round."""
    packs_heads: bool = False
    """The query heads of one kv head are rows of one tile (PackGQA)."""
    ctas_per_sm: int = 1
    """CTAs that an SM runs side by side."""
    grid: str = ENTRY_HEAD
    """The order in which tiles start, one of GRIDS."""
    longest_last: bool = False
    """An entry's longest tile starts last."""
    sparse_grid: bool = False
    """The grid has the tiles of the longest entry for every entry; most of them are empty."""
    searches_entry: bool = False
    """A CTA finds its entry by going through the entries before it, some at a time."""


@dataclass(frozen=True, slots=True, eq=False)
class TileWork:
    """E entries of calls, cut; everything of one head (of one kv head where heads are packed)."""

    calls: CallTable
    tiling: Tiling
    heads: Float
    """(E,) heads of a call, each with the tiles below."""
    tiles: Float
    """(E,)"""
    steps: Float
    """(E,) of all tiles together."""
    longest: Float
    """(E,) steps of the longest tile."""
    shortest: Float
    """(E,) steps of the shortest tile."""

    def empty_tiles(self) -> Float:
        """(C,) tiles of the grid without work."""
        if not self.tiling.sparse_grid:
            return np.zeros(len(self.calls))
        entries = np.diff(self.calls.first, append=len(self.tiles))
        grid = self.calls.max(self.tiles) * entries - self.calls.sum(self.tiles)
        return grid * self.calls.max(self.heads)

    def probes(self) -> Float:
        """(C,) looks at the entries that all tiles together take to find their own."""
        if not self.tiling.searches_entry:
            return np.zeros(len(self.calls))
        call = self.calls.call
        count = np.diff(self.calls.first, append=len(call))[call]
        before = np.arange(len(call)) - self.calls.first[call]
        probes = np.where(count > SCANNED_ENTRIES, np.log2(count), before // ENTRIES_OF_PROBE)
        return self.calls.sum(self.heads * self.tiles * probes)


def tile_work(calls: CallTable, tiling: Tiling) -> TileWork:
    """Cut all entries."""
    call = calls.call
    kv_heads, heads = (
        each[call].astype(np.float64) for each in (calls.kv_heads, calls.query_heads)
    )
    ratio = np.ones_like(heads)
    if tiling.packs_heads:
        ratio, heads = heads // kv_heads, kv_heads
    queries, keys = (each.astype(np.float64) for each in (calls.num_queries, calls.num_keys))
    if tiling.owns_keys:
        return TileWork(calls, tiling, heads, *_own_keys(queries, keys, tiling))
    return TileWork(calls, tiling, heads, *_own_queries(queries, keys, ratio, tiling))


def _own_queries(
    queries: Float, keys: Float, ratio: Float, tiling: Tiling
) -> tuple[Float, Float, Float, Float]:
    """Tile t of T ends with query (t + 1) tile_rows / ratio, the last with the last query."""
    rows, step = float(tiling.tile_rows), float(tiling.step_rows)
    tiles = np.ceil(queries * ratio / rows)
    width = step * ratio
    first = (keys - queries) * ratio + rows + width - 1
    steps = floor_sum(np.maximum(tiles - 1, 0), width, np.full_like(width, rows), first)
    longest = np.ceil(keys / step)
    active = tiles > 0
    shortest = np.where(tiles > 1, np.floor(first / width), longest)
    return tiles, (steps + longest) * active, longest * active, shortest * active


def _own_keys(queries: Float, keys: Float, tiling: Tiling) -> tuple[Float, Float, Float, Float]:
    """Tile j walks the queries that see key j tile_rows: all but the first
    floor((j tile_rows - offset) / step_rows) steps."""
    rows, step = float(tiling.tile_rows), float(tiling.step_rows)
    tiles = np.ceil(keys / rows)
    offset = keys - queries
    longest = np.ceil(queries / step)
    begin = np.minimum(np.ceil(offset / rows), tiles)
    count = tiles - begin
    hidden = floor_sum(
        count, np.full_like(count, step), np.full_like(count, rows), begin * rows - offset
    )
    last = np.maximum(np.floor(((tiles - 1) * rows - offset) / step), 0)
    has_queries = queries > 0
    return tiles, (tiles * longest - hidden) * has_queries, longest, (longest - last) * has_queries


def floor_sum(count: Float, modulus: Float, slope: Float, first: Float) -> Float:
    """Sum of floor((slope i + first) / modulus) over i in [0, count), of whole numbers of at least
    0, modulus above 0. The Euclidean algorithm, on arrays; quotients of whole numbers below 2^53
    are exact in float64.
    """
    total = np.zeros_like(count)
    while True:
        by_slope, by_first = np.floor(slope / modulus), np.floor(first / modulus)
        total = total + count * ((count - 1) / 2 * by_slope + by_first)
        slope, first = slope - by_slope * modulus, first - by_first * modulus
        top = np.where(count > 0, slope * count + first, 0.0)
        if not (top >= modulus).any():
            return total
        count = np.floor(top / modulus)
        first = top - count * modulus
        modulus, slope = np.maximum(slope, 1.0), modulus
