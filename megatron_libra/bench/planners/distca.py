"""DistCA's scheduling rule, re-implemented from its published description.

In: pool, tolerance. Out: Outcome.

Every worker starts with its own tokens, as items: the head and the tail part of a sample that it
holds, with equally many tokens each, so that every token of an item costs the same. The worker with
the largest deficit below the mean load takes from workers above it the item, or part of one, with
the most pairs for its bytes (Q, O, and K and V once for each worker and sample), as much as the
item, the surplus and the deficit allow; until every load is within the tolerance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.bench.outcome import (
    Int64,
    Outcome,
    QueryRanges,
    kv_row_bytes,
    query_row_bytes,
)
from megatron_libra.bench.pools import BenchPool
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import SamplePool, read_samples
from megatron_libra.plan.tiles import cut_blocks

__all__ = ["plan"]

GRAIN = 16
"""Parts of an item are multiples of it, as its document lengths are."""


@dataclass(slots=True, eq=False)
class _Items:
    """Queries [head, head + tokens) and [tail - tokens, tail) of a sample, on a worker."""

    worker: Int64
    sample: Int64
    head: Int64
    tail: Int64
    tokens: Int64

    @property
    def pairs_per_token(self) -> Int64:
        """Pairs of one head token and its mirror image in the tail."""
        return self.head + self.tail + 1

    def split(self, item: int, tokens: int, worker: int) -> None:
        """Move the inner `tokens` of an item, which need the fewest keys, to a worker."""
        left = self.tokens[item] - tokens
        moved = (worker, self.sample[item], self.head[item] + left, self.tail[item] - left, tokens)
        self.tokens[item] = left
        for name, value in zip(self.__slots__, moved, strict=True):
            setattr(self, name, np.append(getattr(self, name), value))


def plan(pool: BenchPool, *, tolerance: float) -> Outcome:
    """Balance the pool from its zigzag homes until loads are within (1 +- tolerance) * mean."""
    layout = TokenLayout("zigzag", pool.seq_length, pool.context_parallel_size)
    samples = read_samples(pool.sequences, pool.seq_length)
    items, middle = _home_items(samples, layout)
    _balance(items, middle, pool, tolerance, len(samples.length))
    return _ranges(items, middle).outcome(samples, layout, pool.shape)


def _home_items(samples: SamplePool, layout: TokenLayout) -> tuple[_Items, QueryRanges]:
    """Items of every worker, and the single middle tokens of odd ranges, which never move."""
    pieces = cut_blocks(samples, layout, layout.piece_tokens)
    worker = np.repeat(pieces.home, np.diff(pieces.first_fragment))
    order = np.lexsort((pieces.fragment_start, pieces.fragment_sample, worker))
    worker, sample = worker[order], pieces.fragment_sample[order]
    start, stop = pieces.fragment_start[order], pieces.fragment_stop[order]
    first = np.flatnonzero((worker[1:] == worker[:-1]) & (sample[1:] == sample[:-1]))
    second = first + 1
    tokens = np.minimum(stop - start, 0)
    tokens[first] = np.minimum((stop - start)[first], (stop - start)[second])
    paired = tokens[first]
    rest_start, rest_stop = start.copy(), stop.copy()
    rest_start[first] += paired
    rest_stop[second] -= paired
    half = (rest_stop - rest_start) // 2
    odd = np.flatnonzero((rest_stop - rest_start) % 2)
    items = _Items(
        np.concatenate([worker[first], worker]),
        np.concatenate([sample[first], sample]),
        np.concatenate([start[first], rest_start]),
        np.concatenate([stop[second], rest_stop]),
        np.concatenate([paired, half]),
    )
    centre = (rest_start + half)[odd]
    return items, QueryRanges(worker[odd], sample[odd], centre, centre + 1)


def _balance(
    items: _Items, middle: QueryRanges, pool: BenchPool, tolerance: float, num_samples: int
) -> None:
    load = np.zeros(pool.num_workers, np.int64)
    np.add.at(load, items.worker, items.tokens * items.pairs_per_token)
    np.add.at(load, middle.worker, middle.stop)
    mean = load.mean()
    held = np.zeros((pool.num_workers, num_samples), np.int64)
    np.maximum.at(held, (items.worker, items.sample), items.tail)
    while (np.abs(load - mean) > tolerance * mean).any():
        receiver = int(load.argmin())
        giver_floor = tolerance * mean if load.max() > (1 + tolerance) * mean else 0.0
        surplus = load - mean
        chosen = _best_part(items, surplus, giver_floor, held[receiver], pool)
        if chosen is None:
            return
        item, tokens = chosen
        pairs = tokens * int(items.pairs_per_token[item])
        load[items.worker[item]] -= pairs
        load[receiver] += pairs
        items.split(item, tokens, receiver)
        sample = items.sample[item]
        held[receiver, sample] = max(held[receiver, sample], items.tail[-1])


def _best_part(
    items: _Items, surplus: NDArray[np.float64], floor: float, held: Int64, pool: BenchPool
) -> tuple[int, int] | None:
    """(item, its tokens to take) with the most pairs for its bytes, if there is one; from workers
    whose surplus is above floor, for the worker with the least.
    """
    deficit = -float(surplus.min())
    above = surplus[items.worker]
    at = np.flatnonzero((above > floor) & (items.tokens > 0))
    rate = items.pairs_per_token[at]
    most = np.minimum(above[at], deficit)
    part = np.ceil(most / (rate * GRAIN)).astype(np.int64) * GRAIN
    tokens = np.minimum(items.tokens[at], part)
    keys = items.tail[at] - items.tokens[at] + tokens - held[items.sample[at]]
    moved = 4 * tokens * query_row_bytes(pool.shape)  # Q and O of a head and a tail token
    moved += np.maximum(keys, 0) * kv_row_bytes(pool.shape)
    helps = tokens * rate < above[at] + deficit  # else the two would only change places
    worth = np.where(helps, tokens * rate / np.maximum(moved, 1), 0.0)
    if not worth.size or worth.max() <= 0:
        return None
    best = int(worth.argmax())
    return int(at[best]), int(tokens[best])


def _ranges(items: _Items, middle: QueryRanges) -> QueryRanges:
    some = items.tokens > 0
    worker, sample, head, tail, tokens = (getattr(items, name)[some] for name in items.__slots__)
    return QueryRanges(
        np.concatenate([worker, worker, middle.worker]),
        np.concatenate([sample, sample, middle.sample]),
        np.concatenate([head, tail - tokens, middle.start]),
        np.concatenate([head + tokens, tail, middle.stop]),
    )
