"""Equal-chunk dispatch with a K/V gather, MagiAttention's scope, re-implemented.

In: pool. Out: Outcome. From its published rule, over all sequences of the pool as one group.

Tokens are cut into chunks of equal length; every worker gets the same number of chunks, heaviest
first to the least loaded worker that is not full. Tokens live where they are computed (the input is
permuted once, which is not counted), so only K and V move: each worker receives the prefix of every
sample up to its last query there, without what it has.
"""

from __future__ import annotations

import numpy as np

from megatron_libra.bench.outcome import Int64, Outcome, kv_row_bytes
from megatron_libra.bench.pools import BenchPool
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import read_samples
from megatron_libra.plan.tiles import BlockTable, cut_blocks
from megatron_libra.plan.vrsp import exact_cardinality_lpt

__all__ = ["plan"]


def plan(pool: BenchPool, *, chunks_per_worker: int) -> Outcome:
    """Dispatch chunks of L / (CP * chunks_per_worker) tokens, rounded up."""
    size = pool.num_workers
    layout = TokenLayout("contiguous", pool.seq_length, pool.context_parallel_size)
    samples = read_samples(pool.sequences, pool.seq_length)
    chunks = cut_blocks(samples, layout, -(-layout.piece_tokens // chunks_per_worker))
    owner = _dispatch(chunks, size, chunks_per_worker)
    loads = np.zeros(size, np.int64)
    np.add.at(loads, owner, chunks.pairs)
    rows = _gathered_rows(chunks, owner, size)
    return Outcome(loads, np.zeros_like(rows), rows * kv_row_bytes(pool.shape))


def _dispatch(chunks: BlockTable, num_workers: int, chunks_per_worker: int) -> Int64:
    """(chunks,) the worker of each chunk; padding at the end counts as chunks without work."""
    work = np.zeros(num_workers * chunks_per_worker, np.int64)
    work[: chunks.num_blocks] = chunks.pairs
    owner = np.empty(len(work), np.int64)
    for worker, members in enumerate(exact_cardinality_lpt(work.tolist(), num_workers)):
        owner[members] = worker
    return owner[: chunks.num_blocks]


def _gathered_rows(chunks: BlockTable, owner: Int64, num_workers: int) -> Int64:
    """(W, W) tokens whose K and V cross workers, source row, destination column."""
    sample, stop = chunks.fragment_sample, chunks.fragment_stop
    holder = np.repeat(owner, np.diff(chunks.first_fragment))
    order = np.lexsort((-stop, sample, holder))  # the last query of each (worker, sample) first
    first = np.ones(len(order), np.bool_)
    first[1:] = np.diff(holder[order]).astype(bool) | np.diff(sample[order]).astype(bool)
    reader, wanted, keys = holder[order][first], sample[order][first], stop[order][first]
    bounds = np.searchsorted(sample, np.arange(sample.max(initial=-1) + 2))
    count = np.diff(bounds)[wanted]
    row = np.repeat(np.arange(len(wanted)), count)
    fragment = (
        bounds[wanted][row] + np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    )
    tokens = np.minimum(stop[fragment], keys[row]) - chunks.fragment_start[fragment]
    rows = np.zeros((num_workers, num_workers), np.int64)
    np.add.at(rows, (holder[fragment], reader[row]), np.maximum(tokens, 0))
    np.fill_diagonal(rows, 0)
    return rows
