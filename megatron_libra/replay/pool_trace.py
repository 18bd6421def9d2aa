"""The trace of one pool of a replay. In: Replay, seconds, which pool. Out: a Chrome trace file.

Tracks are predicted and, where kernels were run, measured; each has a row for every worker and
stream.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_libra.replay.replay import Replay
from megatron_libra.replay.times import PASSES, pass_times
from megatron_libra.replay.trace import layer_spans, write_trace
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.timeline import Span

__all__ = ["find_pool", "write_pool_trace"]

Float = NDArray[np.float64]


def find_pool(replay: Replay, name: str, layer: Float) -> int:
    """The row of a pool.

    Args:
        name: SERIES:WINDOW:MICROBATCH:POOL; empty: the slowest pool of the last series.
        layer: (pools,) seconds.

    Raises:
        ValueError: there is no such pool.
    """
    if not name:
        rows = replay.of_series(replay.series[-1].name)
        return int(rows[layer[rows].argmax()])
    series, *numbers = name.split(":")
    known = [each.name for each in replay.series]
    place = [int(number) for number in numbers if number.isdecimal()]
    if series in known and len(place) == len(numbers) == 3:
        wanted = [known.index(series), *place]
        found = np.flatnonzero((replay.rows[:, :4] == wanted).all(axis=1))
        if found.size:
            return int(found[0])
    last = replay.rows[-1]
    raise ValueError(
        f"there is no pool {name!r}; it must be SERIES:WINDOW:MICROBATCH:POOL with a series of "
        f"{', '.join(known)}; try {known[last[0]]}:{':'.join(map(str, last[1:4]))}."
    )


def write_pool_trace(
    replay: Replay,
    row: int,
    parts: Mapping[str, Sequence[Float]],
    model: CostModel,
    path: Path,
) -> None:
    """Write forward and backward of one attention layer of a pool.

    Args:
        row: of the pool.
        parts: by track, such as predicted and measured: (2, 4, W) seconds of every work.
        model: for the exchange.
    """
    number, window, microbatch, pool, index = replay.rows[row].tolist()
    method = replay.series[number].method
    tracks: dict[str, tuple[Span, ...]] = {}
    for track, seconds in parts.items():
        forward, backward = (
            pass_times(
                replay.works[index],
                seconds[index][int(is_backward)],
                model,
                backward=is_backward,
                is_overlapped=method.is_overlapped,
            ).timeline
            for is_backward in PASSES
        )
        tracks[track] = layer_spans(forward, backward)
    note = (
        f"{replay.corpus.name}, {method.title}, step {window}, microbatch {microbatch}, pool "
        f"{pool}; exchange simulated"
    )
    write_trace(path, tracks, note=note)
