"""Which query ranges need nothing from other workers, and which of those run early or late.

In: blocks, homes, tile workers. Out: the part of every fragment.

A fragment is *local* if its home computes all head shards of it and holds all its keys. It never
enters an exchange, and all heads are computed in one call, as if there were no shards. Local work
fills the ends of the chunk pipeline (section 4.4), where the first dispatch and the last return
would be exposed: the early half is computed under the first, the late half under the last. Example,
one sample of 8 tokens on CP = 2 contiguous, B = 2, every block at its home:

    home        0 0 0 0 | 1 1 1 1
    part        local     exchanged      (the keys of tokens 4..7 begin on worker 0)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import SamplePool
from megatron_libra.plan.tiles import BlockTable, causal_pairs

__all__ = ["EARLY", "EXCHANGED", "LATE", "parts_of"]

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
EXCHANGED, EARLY, LATE = range(3)


def parts_of(
    samples: SamplePool, blocks: BlockTable, layout: TokenLayout, worker: Int64, kv_fetch: str
) -> Int64:
    """The part of every fragment.

    Args:
        worker: (H, F) who computes a fragment of a head shard.

    Returns:
        (F,) EXCHANGED, EARLY or LATE. Local fragments of one sample are never divided between EARLY
        and LATE, because they share keys; a worker that exchanges nothing has no LATE ones.
    """
    home = blocks.home[np.repeat(np.arange(blocks.num_blocks), np.diff(blocks.first_fragment))]
    is_local = (worker == home).all(axis=0)
    is_local &= _has_keys_at_home(samples, blocks, layout, kv_fetch)
    part = np.where(is_local, EARLY, EXCHANGED).astype(np.int64)
    fragment = np.flatnonzero(is_local)
    late = _late(
        worker=home[fragment],
        sample=blocks.fragment_sample[fragment],
        pairs=causal_pairs(blocks.fragment_start, blocks.fragment_stop)[fragment],
        exchanging=worker[:, ~is_local],
    )
    part[fragment[late]] = LATE
    return part


def _has_keys_at_home(
    samples: SamplePool, blocks: BlockTable, layout: TokenLayout, kv_fetch: str
) -> Bool:
    """(F,) whether all keys that a fragment fetches are on its own home."""
    sample = blocks.fragment_sample
    num_keys = samples.length[sample] if kv_fetch == "group" else blocks.fragment_stop
    first = samples.start[sample] // layout.piece_tokens
    last = (samples.start[sample] + num_keys - 1) // layout.piece_tokens
    # only the two middle pieces of a zigzag layout are neighbours on one worker
    found: Bool = (last - first <= 1) & (layout.piece_rank[first] == layout.piece_rank[last])
    return found


def _late(*, worker: Int64, sample: Int64, pairs: Int64, exchanging: Int64) -> Int64:
    """Rows of the fragments to compute last: of each worker's samples, in order, the last ones that
    together have at most half of its local pairs."""
    order = np.lexsort((sample, worker))
    worker, sample, pairs = worker[order], sample[order], pairs[order]
    first = np.flatnonzero((np.diff(worker, prepend=-1) != 0) | (np.diff(sample, prepend=-1) != 0))
    if not len(first):
        return first
    owner, weight = worker[first], np.add.reduceat(pairs, first)
    _, position = np.unique(owner, return_inverse=True)
    total = np.bincount(position, weight)[position]
    ends = np.flatnonzero(np.diff(owner, append=-1))
    done = np.cumsum(weight)
    behind = done[ends][position] - done + weight  # this sample's and all later ones' pairs
    is_late = (2 * behind <= total) & np.isin(owner, exchanging)
    rows: Int64 = order[np.repeat(is_late, np.diff(first, append=len(worker)))]
    return rows
