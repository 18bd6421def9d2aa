"""The kernel calls that a worker's plan makes. In: WorkerPlan. Out: KernelCall.

A call has the shape of the executor's: the same entries, heads and head dimension. All M chunks of
an exchanged part have equal shapes, so one of them stands for all (repeats). Rows are counted from
the call's own first row, because it is run by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.parts import EARLY, FAR, LATE, NEAR
from megatron_libra.plan.tiles import causal_pairs
from megatron_libra.plan.worker_plan import Round, WorkerPlan
from megatron_libra.simulator.call_table import CallTable

__all__ = ["KernelCall", "call_of", "table_of", "worker_calls"]

Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class KernelCall:
    """One varlen attention call."""

    round: Round
    """Query rows and key rows start at 0."""
    query_heads: int
    kv_heads: int
    head_dim: int
    part: int = NEAR
    """NEAR, FAR, EARLY or LATE, an index of call_table.PARTS."""
    repeats: int = 1
    """How often a layer's pass makes a call of this shape: M in an exchanged part."""

    @property
    def num_queries(self) -> Int64:
        """(n,) queries of the entries."""
        return np.diff(self.round.cu_queries).astype(np.int64)

    @property
    def num_keys(self) -> Int64:
        """(n,) keys of the entries."""
        return np.diff(self.round.cu_keys).astype(np.int64)

    @property
    def flops(self) -> int:
        """Of one forward: 4 d for each causal query-key pair and query head."""
        pairs = int(causal_pairs(self.num_keys - self.num_queries, self.num_keys).sum())
        return 4 * self.head_dim * self.query_heads * pairs

    @property
    def key(self) -> tuple[bytes, bytes, int, int, int]:
        """Equal for calls of one shape, which take the same time."""
        cuts = self.round.cu_queries.tobytes(), self.round.cu_keys.tobytes()
        return (*cuts, self.query_heads, self.kv_heads, self.head_dim)


def call_of(
    num_queries: Sequence[int],
    num_keys: Sequence[int],
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
) -> KernelCall:
    """A call by its entries.

    Raises:
        ValueError: an entry has more queries than keys, or there is none with queries.
    """
    queries, keys = np.asarray(num_queries, np.int64), np.asarray(num_keys, np.int64)
    if queries.shape != keys.shape or not queries.any() or (queries > keys).any():
        raise ValueError(
            f"a call needs entries of at most as many queries as keys, not {list(num_queries)} on "
            f"{list(num_keys)}; try [4] on [8]."
        )
    return KernelCall(_round(queries, keys), query_heads, kv_heads, head_dim)


def _round(queries: Int64, keys: Int64) -> Round:
    cu_queries, cu_keys = (
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32) for counts in (queries, keys)
    )
    return Round(
        query_start=0,
        query_stop=int(cu_queries[-1]),
        key_start=0,
        key_stop=int(cu_keys[-1]),
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=int(queries.max()),
        max_keys=int(keys.max()),
    )


def worker_calls(plan: WorkerPlan) -> tuple[KernelCall, ...]:
    """All calls of one worker in a layer's pass, by part: early, near, far, late."""
    heads, dim = plan.heads, plan.shape.head_dim
    chunk = KernelCall(
        round=_empty_round(),
        query_heads=heads.query_heads_per_chunk,
        kv_heads=heads.kv_heads_per_chunk,
        head_dim=dim,
        part=NEAR,
        repeats=heads.chunks,
    )
    early, late = (
        [(_local_call(chunk, heads, len(kv_heads), part), each) for each in rounds]
        for part, (rounds, kv_heads) in zip(
            (EARLY, LATE), plan.local.halves(heads.kv_heads), strict=True
        )
    )
    rounds = [
        *early,
        *((chunk, each) for each in plan.near.rounds),
        *((replace(chunk, part=FAR), each) for each in plan.far.rounds),
        *late,
    ]
    return tuple(replace(call, round=_from_zero(each)) for call, each in rounds)


def _local_call(chunk: KernelCall, heads: HeadPartition, kv_heads: int, part: int) -> KernelCall:
    query_heads = kv_heads * heads.query_heads // heads.kv_heads
    return replace(chunk, query_heads=query_heads, kv_heads=kv_heads, part=part, repeats=1)


def _empty_round() -> Round:
    none = np.zeros(1, np.int32)
    return Round(0, 0, 0, 0, none, none, 0, 0)


def _from_zero(each: Round) -> Round:
    return replace(
        each,
        query_start=0,
        query_stop=each.query_stop - each.query_start,
        key_start=0,
        key_stop=each.key_stop - each.key_start,
    )


def table_of(calls: Iterable[KernelCall]) -> CallTable:
    """What a cost model reads of calls, in their order."""
    calls = list(calls)
    table = CallTable.of_calls(
        [(call.num_queries, call.num_keys) for call in calls],
        [call.query_heads for call in calls],
        [call.kv_heads for call in calls],
    )
    return replace(table, part=np.array([call.part for call in calls], np.int64))
