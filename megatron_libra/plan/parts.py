"""In which part of a layer a query range is computed.

In: blocks, homes, tile workers. Out: Parts, the part of every fragment by head shard.

A fragment is *local* if its home computes all head shards of it and of the sample before it: it
never enters an exchange, and its heads are computed together, as if there were no shards, with
queries and keys where the home has them. What is left is *near* on a worker of its own slot, and
*far* on the worker of another one. Pools stand on whole nodes, so near rows mostly travel inside a
node and far rows between nodes. The chunk pipeline (section 4.4) computes the far part in the
middle, where the near part hides its first dispatch and its last return; local work hides those of
the near part, the early half the first and the late half the last. Example, one sample of 8 tokens
on CP = 2 contiguous, B = 2, every block at its home:

    home        0 0 0 0 | 1 1 1 1
    part        local     near           (the keys of tokens 4..7 begin on worker 0)
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import SamplePool
from megatron_libra.plan.tiles import BlockTable, causal_pairs

__all__ = ["EARLY", "FAR", "LATE", "NEAR", "Parts", "parts_of", "pipeline_order"]

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
NEAR, FAR, EARLY, LATE = range(4)
LEAN = 0.25
"""Share of the exchanging workers, those with the least local work, that say how much is late."""
COARSE = 0.5
"""Of what a worker shall compute last; where whole samples make less, it divides by heads."""


@dataclass(frozen=True, slots=True, eq=False)
class Parts:
    """When everything is computed."""

    of_fragment: Int64
    """(H, F) NEAR or FAR, or for all H alike EARLY or LATE."""
    late_kv_heads: Int64
    """(W,) kv heads of the local part that a worker computes last, of all its samples; 0 where
    some of the samples are LATE, or nothing is."""


def pipeline_order(chunks: int) -> tuple[tuple[int, int], ...]:
    """(part, chunk) of every step between the local halves, on all workers alike: near chunks on
    both sides of the far ones, whose transfers they hide.

    Example, M = 3: near 0, near 1, far 0, far 1, far 2, near 2.
    """
    first = (chunks + 1) // 2
    near = [(NEAR, chunk) for chunk in range(chunks)]
    far = [(FAR, chunk) for chunk in range(chunks)]
    return (*near[:first], *far, *near[first:])


def parts_of(
    samples: SamplePool, blocks: BlockTable, layout: TokenLayout, worker: Int64, kv_heads: int
) -> Parts:
    """The part of every fragment of a head shard.

    Local fragments of one sample are never divided between EARLY and LATE, because they share keys;
    a worker with few samples divides all of them by kv heads instead. At most half of a worker's
    work is late; a worker that exchanges nothing has none. Workers whose loads are alike keep about
    equally much for the end, so that all reach their last return at one time: NCCL's kernels take
    SMs while they wait for each other.

    Args:
        worker: (H, F) who computes it.
        kv_heads: of the layer.
    """
    home = blocks.home[np.repeat(np.arange(blocks.num_blocks), np.diff(blocks.first_fragment))]
    is_local = (worker == home).all(axis=0) & _has_keys_at_home(samples, blocks, layout)
    is_local = _starting(is_local, blocks.fragment_sample)
    slot = worker // layout.context_parallel_size
    part = np.where(slot == samples.slot[blocks.fragment_sample], NEAR, FAR).astype(np.int64)
    part[:, is_local] = EARLY
    fragment = np.flatnonzero(is_local)
    late, late_kv_heads = _late(
        worker=home[fragment],
        sample=blocks.fragment_sample[fragment],
        pairs=causal_pairs(blocks.fragment_start, blocks.fragment_stop)[fragment],
        exchanging=np.concatenate([worker[:, ~is_local].ravel(), home[~is_local]]),
        num_workers=samples.num_slots * layout.context_parallel_size,
        kv_heads=kv_heads,
    )
    part[:, fragment[late]] = LATE
    return Parts(part, late_kv_heads)


def _has_keys_at_home(samples: SamplePool, blocks: BlockTable, layout: TokenLayout) -> Bool:
    """(F,) whether all keys that a fragment attends to are on its own home."""
    start = samples.start[blocks.fragment_sample]
    first = start // layout.piece_tokens
    last = (start + blocks.fragment_stop - 1) // layout.piece_tokens
    # only the two middle pieces of a zigzag layout are neighbours on one worker
    found: Bool = (last - first <= 1) & (layout.piece_rank[first] == layout.piece_rank[last])
    return found


def _starting(is_local: Bool, sample: Int64) -> Bool:
    """Those whose whole sample up to them is marked: one range of queries and keys a sample."""
    missing = np.cumsum(~is_local)
    first = np.flatnonzero(np.diff(sample, prepend=-1))
    before = missing[first] - ~is_local[first]
    found: Bool = missing == np.repeat(before, np.diff(first, append=len(sample)))
    return found


def _late(
    *,
    worker: Int64,
    sample: Int64,
    pairs: Int64,
    exchanging: Int64,
    num_workers: int,
    kv_heads: int,
) -> tuple[Int64, Int64]:
    """Rows of the fragments to compute last: of each worker's samples, in order, the last ones that
    together have at most half of its local pairs, and of those of LEAN exchanging workers. And
    (W,) the late kv heads where a worker divides by them instead."""
    late_kv_heads = np.zeros(num_workers, np.int64)
    order = np.lexsort((sample, worker))
    worker, sample, pairs = worker[order], sample[order], pairs[order]
    first = np.flatnonzero((np.diff(worker, prepend=-1) != 0) | (np.diff(sample, prepend=-1) != 0))
    if not len(first):
        return first, late_kv_heads
    owner, weight = worker[first], np.add.reduceat(pairs, first)
    ends = np.flatnonzero(np.diff(owner, append=-1))
    _, position = np.unique(owner, return_inverse=True)
    total = np.bincount(position, weight)
    exchanges = np.isin(owner[ends], exchanging)
    if not exchanges.any():
        return first[:0], late_kv_heads
    most = np.minimum(total, np.quantile(total[exchanges], LEAN, method="lower"))[position]
    done = np.cumsum(weight)
    behind = done[ends][position] - done + weight  # this sample's and all later ones' pairs
    is_late = (2 * behind <= most) & exchanges[position]
    wanted = most[ends] * exchanges / 2
    whole = np.bincount(position, weight * is_late)
    nearest = np.minimum(np.rint(kv_heads * wanted / total), kv_heads // 2)
    late_kv_heads[owner[ends]] = np.where(whole < COARSE * wanted, nearest, 0)
    is_late &= late_kv_heads[owner] == 0
    rows: Int64 = order[np.repeat(is_late, np.diff(first, append=len(worker)))]
    return rows, late_kv_heads
