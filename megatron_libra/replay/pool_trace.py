"""The trace of one pool of a replay. In: Replay, seconds, which pool. Out: a Chrome trace file.

Predicted: every worker. Measured: only workers whose kernel calls were run, in the timeline of the
pool; of a pool without such a worker there is no measured track, because its times would be the
model's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megatron_libra.replay.replay import Replay
from megatron_libra.replay.times import PASSES, pass_times
from megatron_libra.replay.trace import layer_spans, write_trace
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.timeline import Span

__all__ = ["Track", "find_pool", "pool_name", "pool_tracks", "write_pool_trace"]

Bool = NDArray[np.bool_]
Float = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class Track:
    """One source of a pool's times."""

    parts: Float
    """(2, 4, W) seconds by pass, part and worker."""
    workers: Bool | None = None
    """(W,) which are written; None: all."""


def pool_tracks(
    replay: Replay,
    row: int,
    ours: Sequence[Float],
    parts: Sequence[Float],
    was_run: Sequence[Bool] | None,
) -> dict[str, Track]:
    """What is known of a pool: predicted and, if a worker of it was run, measured.

    Args:
        row: of the pool.
        ours: predicted (2, 4, W) seconds of every work.
        parts: the same, measured where workers were run.
        was_run: (W,) of every work, which these are; None: none.
    """
    index = int(replay.rows[row, 4])
    tracks = {"predicted": Track(ours[index])}
    if was_run is not None and was_run[index].any():
        tracks["measured"] = Track(parts[index], was_run[index])
    return tracks


def pool_name(replay: Replay, row: int) -> str:
    """SERIES:WINDOW:MICROBATCH:POOL, as find_pool takes it."""
    number, *place = replay.rows[row, :4].tolist()
    return ":".join(map(str, (replay.series[number].name, *place)))


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
    replay: Replay, row: int, tracks: Mapping[str, Track], model: CostModel, path: Path
) -> None:
    """Write forward and backward of one attention layer of a pool.

    Args:
        row: of the pool.
        tracks: by name, see pool_tracks.
        model: for the exchange.
    """
    number, window, microbatch, pool, _ = replay.rows[row].tolist()
    note = (
        f"{replay.corpus.name}, {replay.series[number].method.title}, step {window}, microbatch "
        f"{microbatch}, pool {pool}; exchange simulated"
    )
    if "measured" not in tracks:
        note += "; no worker of this pool was run"
    spans = {name: _spans(replay, row, track, model) for name, track in tracks.items()}
    write_trace(path, spans, note=note)


def _spans(replay: Replay, row: int, track: Track, model: CostModel) -> list[Span]:
    number, *_, index = replay.rows[row].tolist()
    forward, backward = (
        pass_times(
            replay.works[index],
            track.parts[int(is_backward)],
            model,
            backward=is_backward,
            is_overlapped=replay.series[number].method.is_overlapped,
        ).timeline
        for is_backward in PASSES
    )
    spans = layer_spans(forward, backward)
    return [s for s in spans if track.workers is None or track.workers[s.worker]]
