"""How many chunks a layer is exchanged in, if the user does not say (section 4.4).

In: the parts of all workers. Out: M.

With more chunks less stands at the ends of the pipeline that nothing hides: of the first dispatch
what outlasts the early half of the local part, of the last return what outlasts the late half. But
each chunk costs launches, and its last wave leaves half of the GPU idle for as long as a tile of
queries takes with the longest keys. M is where the sum of both is smallest on the worst worker.
Example: a worker receives for 6 units of time and returns for 4, its local halves take 2 each, a
chunk costs 1: M = 1 costs 4 + 2 + 1, M = 2 costs 1 + 2, M = 4 costs 4.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.heads import HeadPartition, fits
from megatron_libra.plan.part_tables import ExchangeTables, LocalTables
from megatron_libra.plan.tiles import causal_pairs

__all__ = ["best_chunks"]

Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]
NODE_WORKERS = 8
"""GPUs of a node: larger pools send far rows between nodes."""
INSIDE_FLOPS, BETWEEN_FLOPS = 1_700, 13_000
"""FLOPs of forward while a byte travels: 650 TFLOP/s against 390 GB/s inside a node, 50 between."""
LAUNCH_FLOPS = 20_000_000_000
"""What a GPU computes while a chunk is launched, arranged and packed: about 30 us of a Hopper."""
WAVE_QUERIES = 132 * 128
"""Queries of one head in a wave of a Hopper GPU: a tile of 128 on each SM."""


def best_chunks(
    config: LibraConfig,
    shape: AttentionShape,
    near: ExchangeTables,
    far: ExchangeTables,
    local: LocalTables,
) -> int:
    """M for a pool: at most config.most_chunks, and such that it cuts a shard's heads evenly."""
    heads = HeadPartition.of(shape, config.head_split, 1)
    arrive, leave = _exchange_flops(heads, shape, near, far)
    early, late = _local_flops(shape, config.token_pairs, local, len(arrive))
    each = sum(_chunk_flops(shape, part) for part in (near, far))

    def cost(chunks: int) -> float:
        first = np.maximum(0, arrive / chunks - early)
        last = np.maximum(0, leave / chunks - late)
        return float((first + last).max()) + chunks * each

    most = range(1, config.most_chunks + 1)
    return min((m for m in most if m == 1 or fits(shape, config.head_split, m)), key=cost)


def _exchange_flops(
    heads: HeadPartition, shape: AttentionShape, near: ExchangeTables, far: ExchangeTables
) -> tuple[Float64, Float64]:
    """(W,) what could be computed while a worker's rows arrive, and while its results leave."""
    far_flops = BETWEEN_FLOPS if far.num_workers > NODE_WORKERS else INSIDE_FLOPS
    arrive, leave = np.zeros((2, near.num_workers))
    for part, flops in ((near, INSIDE_FLOPS), (far, far_flops)):
        queries, keys = part.sent_bytes(shape, heads)
        for matrix in (queries, keys):
            np.fill_diagonal(matrix, 0)
        arrive += (queries + keys).sum(axis=0) * flops
        leave += queries.sum(axis=0) * flops
    return arrive, leave


def _chunk_flops(shape: AttentionShape, part: ExchangeTables) -> float:
    """What a chunk of a part costs: launches, and half a wave with the longest keys."""
    keys = int(part.entries.num_keys.max(initial=0))
    return keys and LAUNCH_FLOPS + WAVE_QUERIES / 2 * keys * 4 * shape.head_dim


def _local_flops(
    shape: AttentionShape, token_pairs: int, local: LocalTables, num_workers: int
) -> tuple[Float64, Float64]:
    """(W,) FLOPs of forward of the early and the late half of the local part."""
    entries = local.entries
    queries, keys = entries.num_queries, entries.num_keys
    pairs = causal_pairs(keys - queries, keys) + token_pairs * queries
    by_heads = local.late_kv_heads[entries.worker] / shape.kv_heads
    is_late = entries.round >= local.early_rounds[entries.worker]
    late_share = np.where(is_late, 1.0, by_heads)
    flops = pairs * (4.0 * shape.head_dim * shape.query_heads)
    early, late = (
        np.bincount(entries.worker, flops * share, num_workers)
        for share in (1 - late_share, late_share)
    )
    return early, late
