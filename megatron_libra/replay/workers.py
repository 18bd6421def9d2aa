"""The workers of a replay one by one. In: Replay, predicted parts. Out: WorkerTable, KernelCalls.

Rows of the table go through all works and their workers; columns of seconds are the parts of a
layer's passes, (8,): those of PARTS (one chunk of near and far work) in forward, then in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from megatron_libra.replay.calls import KernelCall, call_of
from megatron_libra.replay.replay import Replay
from megatron_libra.replay.sampling import WorkerTable
from megatron_libra.replay.times import kernel_seconds
from megatron_libra.simulator.call_table import CallTable, part_weights
from megatron_libra.simulator.pool_work import PoolWork

__all__ = ["by_work", "by_worker", "calls_of_worker", "part_columns", "weights", "worker_table"]

Float = NDArray[np.float64]
Int64 = NDArray[np.int64]


def worker_table(replay: Replay, parts: Sequence[Float]) -> WorkerTable:
    """All workers of all works; a work that several series or microbatches share belongs to the
    first, and is a straggler if it is one of any."""
    sizes = [work.num_workers for work in replay.works]
    _, first = np.unique(replay.rows[:, 4], return_index=True)
    owner = replay.rows[first]  # by work
    microbatches = int(owner[:, 2].max(initial=0)) + 1
    names: dict[bytes, int] = {}
    calls = [names.setdefault(name, len(names)) for work in replay.works for name in _names(work)]
    seconds = [
        kernel_seconds(part, work.chunks).sum(axis=0)
        for part, work in zip(parts, replay.works, strict=True)
    ]
    return WorkerTable(
        method=np.repeat(owner[:, 0], sizes),
        microbatch=np.repeat(owner[:, 1] * microbatches + owner[:, 2], sizes),
        pool=np.repeat(np.arange(len(sizes)), sizes),
        worker=np.concatenate([np.arange(size) for size in sizes]),
        calls=np.array(calls, np.int64),
        seconds=np.concatenate(seconds),
        is_straggler=np.repeat(_stragglers(replay.rows, seconds), sizes),
    )


def _stragglers(rows: Int64, seconds: Sequence[Float]) -> NDArray[np.bool_]:
    """(works,) whether a work has the heaviest worker of some method and microbatch."""
    heaviest = np.array([each.max(initial=0.0) for each in seconds])
    series, window, microbatch, pool, work = rows.T
    order = np.lexsort((pool, -heaviest[work], microbatch, window, series))
    is_first = (np.diff(rows[order, :3], axis=0, prepend=-1) != 0).any(axis=1)
    found = np.zeros(len(seconds), np.bool_)
    found[work[order[is_first]]] = True
    return found


def _names(work: PoolWork) -> list[bytes]:
    """By worker: equal for equal calls."""
    hashes = [blake2b(str((work.head_dim, work.chunks)).encode()) for _ in range(work.num_workers)]
    for call, worker in enumerate(work.calls.worker.tolist()):
        entries = _entries(work.calls, call)
        shape = np.array([work.calls.query_heads[call], work.calls.kv_heads[call],
                          work.calls.part[call], len(entries)])  # fmt: skip
        hashes[worker].update(shape.tobytes())
        hashes[worker].update(entries.tobytes())
    return [each.digest() for each in hashes]


def _entries(calls: CallTable, call: int) -> Int64:
    """(entries, 2) queries and keys of a call."""
    start = calls.first[call]
    stop = calls.first[call + 1] if call + 1 < len(calls) else len(calls.num_queries)
    columns = calls.num_queries[start:stop], calls.num_keys[start:stop]
    return np.stack(columns, axis=1)


def calls_of_worker(work: PoolWork, worker: int) -> tuple[KernelCall, ...]:
    """The kernel calls of a worker, for measure_worker."""
    found = []
    for call in np.flatnonzero(work.calls.worker == worker).tolist():
        queries, keys = _entries(work.calls, call).T
        part = int(work.calls.part[call])
        shaped = call_of(
            queries.tolist(),
            keys.tolist(),
            query_heads=int(work.calls.query_heads[call]),
            kv_heads=int(work.calls.kv_heads[call]),
            head_dim=work.head_dim,
        )
        repeats = int(part_weights(work.chunks)[part])
        found.append(replace(shaped, part=part, repeats=repeats))
    return tuple(found)


def part_columns(parts: Sequence[Float]) -> Float:
    """(N, 8) seconds of all workers, of one chunk, from (2, 4, W) of each work."""
    return np.concatenate([part.reshape(8, -1).T for part in parts])


def by_work(replay: Replay, columns: Float) -> list[Float]:
    """The other way round."""
    stops = np.cumsum([work.num_workers for work in replay.works])[:-1]
    return [part.T.reshape(2, 4, -1) for part in np.split(columns, stops)]


def by_worker(replay: Replay, rows: NDArray[np.bool_]) -> list[NDArray[np.bool_]]:
    """(W,) of each work, given (N,) of all workers."""
    stops = np.cumsum([work.num_workers for work in replay.works])[:-1]
    return np.split(rows, stops)


def weights(replay: Replay) -> Float:
    """(N, 8) how often a layer makes each part: M times a chunk, once the local ones."""
    return np.concatenate(
        [np.tile(part_weights(work.chunks), (work.num_workers, 2)) for work in replay.works]
    )
