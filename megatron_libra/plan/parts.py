"""Which query ranges need nothing from other workers, and which of those run early or late.

In: blocks, homes, tile workers. Out: a part for every fragment of every head shard.

A fragment whose queries and keys are all at home on the worker that computes it is *local*: it
never enters an exchange. Local work fills the ends of the chunk pipeline (section 4.4), where the
first dispatch and the last return would be exposed: the early half is computed under the first, the
late half under the last. Example, one sample of 8 tokens on CP = 2 contiguous, B = 2, every block
at its home:

    home        0 0 0 0 | 1 1 1 1
    part        local     exchanged      (the keys of tokens 4..7 begin on worker 0)
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import SamplePool
from megatron_libra.plan.tiles import BlockTable, causal_pairs

__all__ = ["EARLY", "EXCHANGED", "LATE", "NUM_PARTS", "parts_of"]

Int64 = NDArray[np.int64]
Bool = NDArray[np.bool_]
EXCHANGED, EARLY, LATE = range(3)
NUM_PARTS = 3


def parts_of(
    samples: SamplePool,
    blocks: BlockTable,
    layout: TokenLayout,
    worker: Int64,
    kv_shard: Int64,
    kv_fetch: str,
) -> Int64:
    """The part of every fragment.

    Args:
        worker: (H, F) who computes a fragment of a head shard.
        kv_shard: (H,) the kv shard of a head shard.

    Returns:
        (H, F) EXCHANGED, EARLY or LATE. Fragments that share keys on a worker are never divided
        between EARLY and LATE; a worker that exchanges nothing has no LATE ones.
    """
    block = np.repeat(np.arange(blocks.num_blocks), np.diff(blocks.first_fragment))
    is_local = (worker == blocks.home[block]) & _has_keys_at_home(samples, blocks, layout, kv_fetch)
    part = np.where(is_local, EARLY, EXCHANGED).astype(np.int64)
    shard, fragment = np.nonzero(is_local)
    late = _late(
        worker=worker[shard, fragment],
        group=kv_shard[shard] * len(samples.length) + blocks.fragment_sample[fragment],
        pairs=causal_pairs(blocks.fragment_start, blocks.fragment_stop)[fragment],
        exchanging=worker[~is_local],
    )
    part[shard[late], fragment[late]] = LATE
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


def _late(*, worker: Int64, group: Int64, pairs: Int64, exchanging: Int64) -> Int64:
    """Rows of the fragments to compute last: of each worker's KV groups, in order, the last ones
    that together have at most half of its local pairs."""
    order = np.lexsort((group, worker))
    worker, group, pairs = worker[order], group[order], pairs[order]
    first = np.flatnonzero((np.diff(worker, prepend=-1) != 0) | (np.diff(group, prepend=-1) != 0))
    if not len(first):
        return first
    group_worker, group_pairs = worker[first], np.add.reduceat(pairs, first)
    _, position = np.unique(group_worker, return_inverse=True)
    total = np.bincount(position, group_pairs)[position]
    ends = np.flatnonzero(np.diff(group_worker, append=-1))
    done = np.cumsum(group_pairs)
    behind = done[ends][position] - done + group_pairs  # this group's and all later ones' pairs
    is_late = (2 * behind <= total) & np.isin(group_worker, exchanging)
    rows: Int64 = order[np.repeat(is_late, np.diff(first, append=len(worker)))]
    return rows
