"""Calls to fit a cost model to, and calls of plans to test it on. In: sizes. Out: GroupedCall.

The grid has what workers' plans are made of, each far from the others: one long causal sample,
blocks of a sample against its prefix, with and without fillers, many short samples, all of these
in one call, and few rows on many keys; in several head counts. The plans are those of pools from
the long-tailed preset, shortened; none of their calls is fitted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.corpora import LongTail
from megatron_libra.data.packing import pack_best_fit
from megatron_libra.plan.heads import fits
from megatron_libra.plan.layout import round_up
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from megatron_libra.replay.calls import KernelCall, call_of, worker_calls

__all__ = ["GridSize", "GroupedCall", "HEADS", "MAX_HEADS", "fit_calls", "plan_calls"]

Entries = list[tuple[int, int]]
"""(queries, keys)."""
FIT = "fit"
HEADS = {64: ((8, 1), (32, 4)), 128: ((8, 1), (32, 4), (4, 1)), 256: ((4, 1), (16, 2), (128, 16))}
"""(query heads, kv heads) of calls by head dimension: chunks of usual layers, and whole layers."""
MAX_HEADS = 4096
"""Query heads of a call; above, no layer is known and inputs take all memory."""
SHAPES = {64: (32, 4), 128: (32, 4), 256: (128, 16)}
"""(query heads, kv heads) of the layer whose plans are the test."""
POOL_SIZE, CONTEXT_PARALLEL_SIZE = 4, 2
NUM_POOLS = 2


@dataclass(frozen=True, slots=True)
class GridSize:
    """How large the calls are."""

    tokens: int = 65_536
    """Tokens of the longest causal sample, a power of two; the longest prefix has four times as
    many."""
    flops: float = 2e13
    """Most FLOPs of one forward."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupedCall:
    """A call and what it is for."""

    call: KernelCall
    group: str
    """fit, or the pool and worker of a plan whose time its calls make up."""


def fit_calls(
    head_dim: int, size: GridSize, heads: Sequence[tuple[int, int]], *, seed: int = 0
) -> list[GroupedCall]:
    """The grid in a random order, so that a part of it is a fair sample."""
    rng = np.random.default_rng(seed)
    entries = list(_entries(size, rng))
    calls = [
        call_of(*zip(*each, strict=True), query_heads=hq, kv_heads=hkv, head_dim=head_dim)
        for hq, hkv in heads
        for each in entries
    ]
    kept = [GroupedCall(call, FIT) for call in calls if call.flops <= size.flops]
    return [kept[i] for i in rng.permutation(len(kept))]


def _entries(size: GridSize, rng: np.random.Generator) -> Iterator[Entries]:
    n = size.tokens
    for part in (1, 2, 4, 16, 64):
        yield [(n // part, n // part)]
    for keys in (n // 2, 4 * n):
        for queries in (n // 64, n // 16, n // 4):
            yield [(queries, keys)]
    yield [(n // 512, n), (n // 512, n // 4)]
    yield _prefixes(n, 8)
    yield [(n // 8, n // 2), (0, n // 2), (n // 8, n // 4), (0, n // 4), (n // 16, n // 16)]
    for median in (n // 1024, n // 256, n // 64):
        yield _samples(n, median, rng)
    yield [(n // 256, n // 256)] * 300
    yield [*_samples(n // 2, n // 128, rng), (n // 4, n)]
    yield [(n // 4, 2 * n), *_samples(n // 2, n // 32, rng), (n // 16, n // 2), (0, n // 2)]


def _prefixes(n: int, count: int) -> Entries:
    """Blocks at even distances of as many samples."""
    return [(n // 32, (i + 1) * n // count) for i in range(count)]


def _samples(total: int, median: int, rng: np.random.Generator) -> Entries:
    """Whole samples of lognormal lengths."""
    lengths = np.clip(rng.lognormal(np.log(max(median, 1)), 1.0, total), 1, total // 4)
    chosen = lengths[: int(np.searchsorted(np.cumsum(lengths), total)) + 1].astype(int).tolist()
    return [(length, length) for length in chosen]


def plan_calls(head_dim: int, size: GridSize, *, seed: int = 1) -> list[GroupedCall]:
    """All calls of the workers of a few pools, grouped by worker."""
    found = []
    for pool in range(NUM_POOLS):
        plan = _plan(head_dim, size, np.random.default_rng((seed, pool)))
        for worker in range(plan.num_workers):
            group = f"pool {pool} worker {worker}"
            found += [GroupedCall(call, group) for call in worker_calls(plan.worker_plan(worker))]
    return found


def _plan(head_dim: int, size: GridSize, rng: np.random.Generator) -> PoolPlan:
    """A pool of long-tailed packed sequences, one of them a single document."""
    length = size.tokens
    tail = LongTail(seq_length=length, sigma=1.78, median=max(2, min(644, length // 64)))
    packed = pack_best_fit(tail.document_lengths(4000, rng), length, window=4000).rows
    chosen = rng.choice(len(packed), POOL_SIZE - 1, replace=False).tolist()
    sequences = [(length,), *(tuple(packed.lengths(row)) for row in chosen)]
    shape = AttentionShape(
        query_heads=SHAPES[head_dim][0], kv_heads=SHAPES[head_dim][1], head_dim=head_dim
    )
    split = 4 if fits(shape, 4, 4) else 1
    return plan_pool(
        sequences,
        context_parallel_size=CONTEXT_PARALLEL_SIZE,
        shape=shape,
        config=LibraConfig(
            pool_size=POOL_SIZE,
            block_size=max(1, length // 32),
            head_split=split,
            chunks=4 if fits(shape, split, 4) else 1,
        ),
        seq_length=round_up(length, 2 * CONTEXT_PARALLEL_SIZE),
    )
