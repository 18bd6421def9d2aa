"""How few bytes could balance a pool. In: pool, tau. Out: ByteFloor, a lower bound.

For plans that move work only from workers above C = (1 + tau) * mean to workers below it, at any
granularity of tokens and query heads, with every query at home elsewhere. Bytes per row: d * b.

1. A worker above C sheds at least load - C pairs. It moves fewest query rows (token x head) if it
   takes those with most keys first: together Q rows, each sent as Q and returned as O.
2. A worker that computes R pairs from q query rows has at least R / q rows of keys, because a query
   meets each key once. Workers of other slots hold none of them. With R at most the room below C,
   the sum of q + R / q over workers is at least Q + A^2 / Q, A = sum of sqrt(R) over the largest
   rooms that take the work. (Workers of the slots that shed take theirs without keys, at most.)
3. A worker not above C keeps its home work and so receives the keys of it that it lacks.

Senders: what 1 and 2 move leaves the workers of the slots that shed; the most loaded one sends at
least the mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.bench.outcome import Int64, QueryRanges
from megatron_libra.bench.pools import BenchPool
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import read_samples
from megatron_libra.plan.tiles import BlockTable, causal_pairs, cut_blocks

__all__ = ["ByteFloor", "byte_floor"]


@dataclass(frozen=True, slots=True)
class ByteFloor:
    """Least bytes of one layer's forward."""

    query_bytes: float
    """Q and O of what must leave, if K and V were free."""
    home_kv_bytes: int
    """K and V that workers not above C lack for their own queries."""
    total_bytes: float
    worker_bytes: float
    """Of the most loaded worker."""


def byte_floor(pool: BenchPool, load_slack: float) -> ByteFloor:
    """The floor of a pool with zigzag homes."""
    layout = TokenLayout("zigzag", pool.seq_length, pool.context_parallel_size)
    samples = read_samples(pool.sequences, pool.seq_length)
    pieces = cut_blocks(samples, layout, layout.piece_tokens)
    ranges = _home_ranges(pieces)
    home = ranges.outcome(samples, layout, pool.shape)
    target = (1 + load_slack) * home.loads.mean()
    givers = np.flatnonzero(home.loads > target)
    heads, row = pool.shape.query_heads, pool.shape.head_dim * pool.shape.bytes_per_element
    rows = heads * sum(_fewest_tokens(ranges, home.loads, int(w), target) for w in givers)
    slots = np.unique(givers // pool.context_parallel_size)
    spread = _spread(home.loads, target, slots, pool)
    home_kv = int(np.delete(home.kv_bytes, givers, axis=1).sum())
    least = max(rows, spread)
    moved = 2 * row * (least + spread**2 / least) if least else 0.0
    sending = max(rows, spread * 2**0.5)
    sent = row * (sending + 2 * spread**2 / sending) if sending else 0.0
    workers = max(1, len(slots) * pool.context_parallel_size)
    return ByteFloor(2 * row * rows, home_kv, moved + home_kv, sent / workers)


def _home_ranges(pieces: BlockTable) -> QueryRanges:
    return QueryRanges(
        np.repeat(pieces.home, np.diff(pieces.first_fragment)),
        pieces.fragment_sample,
        pieces.fragment_start,
        pieces.fragment_stop,
    )


def _fewest_tokens(ranges: QueryRanges, loads: Int64, worker: int, target: float) -> float:
    """Tokens that a worker must move to be at C, those with most keys first; a lower bound."""
    own = ranges.worker == worker
    start, stop = ranges.start[own], ranges.stop[own]
    excess = float(loads[worker]) - target
    low, high = 0, int(stop.max())  # tokens with more than `low` keys hold at least the excess
    while high - low > 1:
        middle = (low + high) // 2
        above = np.maximum(start, middle)
        if causal_pairs(np.minimum(above, stop), stop).sum() >= excess:
            low = middle
        else:
            high = middle
    above = np.minimum(np.maximum(start, high), stop)
    tokens, pairs = int((stop - above).sum()), int(causal_pairs(above, stop).sum())
    return tokens + (excess - pairs) / high  # the next ones have exactly `high` keys


def _spread(loads: Int64, target: float, slots: Int64, pool: BenchPool) -> float:
    """A: sum of sqrt(pairs) over workers of other slots, which take what is left, largest room
    first; pairs of all query heads.
    """
    room: NDArray[np.float64] = np.maximum(target - loads, 0.0)
    excess = float(np.maximum(loads - target, 0.0).sum())
    near = np.isin(np.arange(len(loads)) // pool.context_parallel_size, slots)
    left = max(0.0, excess - float(room[near].sum()))
    far = np.sort(room[~near])[::-1]
    taken = np.clip(left - (np.cumsum(far) - far), 0.0, far)
    return float(np.sqrt(taken * pool.shape.query_heads).sum())
