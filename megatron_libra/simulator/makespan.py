"""How long a GPU takes for the tiles of a call. In: TileWork, slots. Out: the time in steps.

Tiles start in the order of the grid, each on the first slot that is free (SMs, times the CTAs that
one holds). Three estimates, of which the largest counts:

    spread      all work over the slots
    long tile   a long tile that starts late, because others stand before it
    last wave   n tiles on m slots: the tiles behind the first floor((n - 1) / m) m ones start when
                those are done

Example, 5 tiles of 10 steps on 4 slots: spread 12.5, long tile 10, last wave 20.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.tiling import ENTRY_HEAD, ENTRY_TILE, HEAD_ENTRY, TileWork

__all__ = ["makespan", "spread"]

Float = NDArray[np.float64]


def makespan(work: TileWork, tile_steps: float, slots: int, alone: float) -> Float:
    """(C,) how long a call takes, in the time of a step; see the module docstring.

    Args:
        work: the tiles.
        tile_steps: what a tile costs besides its steps, in steps.
        slots: CTAs that the device runs side by side.
        alone: how long a tile takes where slots are left over, over the time where all are busy; at
            most 1.
    """
    one_head = work.steps + tile_steps * work.tiles
    long_tile = alone * _long_tile(work, one_head, work.longest + tile_steps, slots)
    bound = np.maximum(long_tile, spread(work, tile_steps, slots))
    if work.tiling.ctas_per_sm > 1:
        return bound
    return np.maximum(bound, _last_wave(work, one_head, tile_steps, slots))


def spread(work: TileWork, tile_steps: float, slots: int) -> Float:
    """(C,) the work of a call over the slots, in steps: no call takes less."""
    return work.calls.sum(work.heads * (work.steps + tile_steps * work.tiles)) / slots


def _long_tile(work: TileWork, one_head: Float, longest: Float, slots: int) -> Float:
    """(C,) when the last long tile is done, tiles starting in the order of the grid."""
    before = _before_longest(work, one_head, longest)
    tiles_before = _before_longest(work, work.tiles, np.ones_like(longest))
    # a slot gets free when those tiles are begun, and half done that are not its own
    running = (slots - 1) / 2 / np.maximum(tiles_before, 1)
    start = np.where(tiles_before < slots, 0.0, before / slots * (1 - running))
    return work.calls.max(np.where(work.tiles > 0, start + longest, 0.0))


def _before_longest(work: TileWork, one_head: Float, own: Float) -> Float:
    """(E,) sum over the tiles that start before an entry's longest tile of the last head."""
    before = _before_entry(work, one_head)
    if work.tiling.grid == ENTRY_HEAD:
        before = before + (work.heads - 1) * one_head
    return before + one_head - own if work.tiling.longest_last else before


def _before_entry(work: TileWork, one_head: Float) -> Float:
    """(E,) sum over the tiles that start before an entry (of the last head, where heads are the
    outermost), from a sum for each entry and head."""
    call, is_by_head = work.calls.call, work.tiling.grid == HEAD_ENTRY
    value = one_head if is_by_head else one_head * work.heads
    before = np.cumsum(value) - value
    before = before - before[work.calls.first][call] if len(call) else before
    if is_by_head:
        before = before + (work.heads - 1) * work.calls.sum(one_head)[call]
    return before


def _last_wave(work: TileWork, one_head: Float, tile_steps: float, slots: int) -> Float:
    """(C,) when the tiles are done that start last; 0 where there is a slot for every tile."""
    calls, call = work.calls, work.calls.call
    before = _before_entry(work, work.tiles)
    own_heads = 1.0 if work.tiling.grid == HEAD_ENTRY else work.heads
    waves = np.maximum(np.ceil(calls.sum(work.heads * work.tiles) / slots) - 1, 0)[call]
    skipped = np.maximum(waves * slots - before, 0.0)  # tiles of the entry in earlier waves
    done, length = _first_tiles(work, one_head, skipped, tile_steps)
    start = (_before_entry(work, one_head) + done) / slots - _early(work, skipped, waves, slots)
    is_last = (before + own_heads * work.tiles > waves * slots) & (work.tiles > 0) & (waves > 0)
    return calls.max(np.where(is_last, np.maximum(start, 0.0) + length, 0.0))


def _first_tiles(
    work: TileWork, one_head: Float, count: Float, tile_steps: float
) -> tuple[Float, Float]:
    """(E,) sum of the first tiles of an entry, and the length of the next one. Lengths go down (up
    with longest_last) evenly from tile to tile."""
    tiles = np.maximum(work.tiles, 1)
    if work.tiling.grid == ENTRY_TILE:
        tile = np.minimum(np.floor(count / work.heads), tiles - 1)
        whole, heads, rest = np.zeros_like(count), work.heads, count - tile * work.heads
    else:
        head = np.floor(count / tiles)
        tile = count - head * tiles
        whole, heads, rest = head * one_head, np.ones_like(count), np.zeros_like(count)
    slope = _slope(work)
    first = work.shortest if work.tiling.longest_last else work.longest
    slope = slope if work.tiling.longest_last else -slope
    length = first + slope * tile + tile_steps
    series = tile * (first + tile_steps) + slope * tile * (tile - 1) / 2
    return whole + heads * series + rest * length, length


def _slope(work: TileWork) -> Float:
    """(E,) steps between the lengths of neighbouring tiles."""
    slope: Float = (work.longest - work.shortest) / np.maximum(work.tiles - 1, 1)
    return slope


def _early(work: TileWork, skipped: Float, waves: Float, slots: int) -> Float:
    """(E,) how much earlier than on average the first slot is free for the last wave: half of the
    difference between the tiles of the wave before. Where lengths only fall, two waves are even:
    who had the longest tile of one has the shortest of the other."""
    calls, call = work.calls, work.calls.call
    shortest = -calls.max(-np.where(work.tiles > 0, work.shortest, np.inf))
    of_call = (calls.max(work.longest) - shortest)[call]
    heads = work.heads if work.tiling.grid == ENTRY_TILE else 1.0
    of_entry = np.minimum(_slope(work) * slots / heads, work.longest - work.shortest)
    difference = np.where(skipped >= slots, of_entry, of_call)
    if work.tiling.grid == ENTRY_TILE:
        difference = np.where((waves % 2 == 0) & (skipped >= 2 * slots), 0.0, difference)
    return difference / 2
