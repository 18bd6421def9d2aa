"""Bind one worker's plan to its device, once per microbatch; every layer reuses the result.

In: WorkerPlan (ranges, host). Out: BoundPlan (index tensors, device). All index arrays travel in
one pinned, non-blocking copy; nothing waits for the device. Later code only gathers rows by these
indices: a scatter is several times slower than a gather with the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.executor.kernels import BoundRound
from megatron_libra.executor.route_index import (
    NOWHERE,
    RouteIndex,
    contributions_at_home,
    index_route,
    positions_at_home,
)
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.transport import RowSplits
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.worker_plan import Round, WorkerPlan, WorkerRoute

__all__ = ["BoundPlan", "BoundRoute", "PackIndex", "bind"]

Int32 = NDArray[np.int32]
INT32_MAX = 2**31 - 1


@dataclass(frozen=True, slots=True, eq=False)
class PackIndex:
    """Which rows leave, in travel order."""

    remote: torch.Tensor
    """(n,) int32 rows for the other workers."""
    local: torch.Tensor
    """(n,) int32 rows that stay on this worker."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundRoute:
    """One route on the device. Forward: dispatch, splits, arrange. The way back: depart,
    splits.inverse()."""

    dispatch: tuple[PackIndex, ...]
    """By chunk (query) or piece (kv): home rows to pack."""
    arrange: torch.Tensor | None
    """(num_rows,) travel position of every compute row; None if rows arrive in compute order."""
    depart: PackIndex | None
    """Compute rows to pack for the way home; None if compute order is travel order."""
    splits: RowSplits
    num_rows: int
    """Rows of the compute buffer."""
    num_sent: int
    """Home rows that leave for each chunk, the local ones included."""


@dataclass(frozen=True, slots=True, eq=False)
class HomeSum:
    """How dK and dV are summed at the home. Rows are ranked by falling number of contributions."""

    passes: tuple[torch.Tensor, ...]
    """passes[j]: returned rows that are the j-th contributions, for the first ranks; empty if one
    is the most."""
    key_rows: torch.Tensor
    """(T * K * U,) half rows of dK in the sum (or in the returned rows if there are no passes)."""
    value_rows: torch.Tensor
    """(T * K * U,) half rows of dV."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundPlan:
    """One worker's plan on its device. Used by forward, backward and activation recompute of every
    layer."""

    plan: WorkerPlan
    runtime: PoolRuntime
    query: BoundRoute
    kv: BoundRoute
    query_rows_at_home: torch.Tensor
    """(T * H * M,) where each output row stands among the returned rows."""
    kv_sum: HomeSum
    rounds: tuple[BoundRound, ...]

    @property
    def heads(self) -> HeadPartition:
        """How the heads are cut into shards, chunks and pieces."""
        return self.plan.heads

    def brings_kv(self, chunk: int) -> bool:
        """True if K and V of this chunk did not travel with an earlier one."""
        return chunk == 0 or self.heads.kv_piece_of(chunk - 1) != self.heads.kv_piece_of(chunk)

    def finishes_kv(self, chunk: int) -> bool:
        """True if no later chunk computes with the same K and V."""
        return chunk + 1 == self.heads.chunks or self.brings_kv(chunk + 1)


def bind(plan: WorkerPlan, runtime: PoolRuntime) -> BoundPlan:
    """Turn ranges into device index tensors. Local: nothing is communicated, nothing waits for the
    device.

    Raises:
        PlanError: the plan is another worker's or another pool's.
        ValueError: an attention call would be too large for the kernel, or row numbers for int32.
    """
    _check(plan, runtime)
    heads, device = plan.heads, runtime.device
    query, kv = _index(plan, plan.query, heads.head_split), _index(plan, plan.kv, heads.kv_shards)
    position = positions_at_home(query.sent_rows, plan.num_local_tokens * heads.head_split)
    passes, rank = contributions_at_home(
        kv.sent_rows, kv.send_count, plan.num_local_tokens * heads.kv_shards
    )
    if len(passes) < 2:  # nothing to sum: find the only returned row itself
        passes, rank = [], positions_at_home(kv.sent_rows, len(rank))
    entries = [cu for r in plan.rounds for cu in (r.cu_queries, r.cu_keys)]
    query_rows, kv_rows, (position_t, rank_t), passes_t, entries_t = _upload(
        [_arrays(query), _arrays(kv), [position, rank], passes, entries], device
    )
    bound_query = _bound_route(query, query_rows, heads.chunks)
    return BoundPlan(
        plan=plan,
        runtime=runtime,
        query=bound_query,
        kv=_bound_route(kv, kv_rows, heads.kv_pieces),
        query_rows_at_home=_returned_rows(position_t, heads.chunks, bound_query.num_sent),
        kv_sum=_home_sum(passes_t, rank_t, heads.kv_pieces, len(kv.sent_rows)),
        rounds=tuple(
            _bound_round(r, *entries_t[2 * i : 2 * i + 2], runtime)
            for i, r in enumerate(plan.rounds)
        ),
    )


def _index(plan: WorkerPlan, route: WorkerRoute, num_shards: int) -> RouteIndex:
    return index_route(
        route, worker=plan.worker, num_workers=plan.num_workers, num_shards=num_shards
    )


def _arrays(index: RouteIndex) -> list[Int32]:
    return [index.sent_rows, index.arrange, index.depart]


def _upload(lists: list[list[Int32]], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """The same lists as tensors on the device, views of one buffer that one copy brought there."""
    arrays = [array for arrays in lists for array in arrays]
    flat = torch.from_numpy(np.concatenate(arrays))
    if device.type == "cuda":
        # the caching host allocator keeps the pinned block until the copy has run
        flat = flat.pin_memory().to(device, non_blocking=True)
    tensors = iter(flat.split([len(array) for array in arrays]))
    return ([next(tensors) for _ in arrays] for arrays in lists)


def _bound_route(index: RouteIndex, rows: list[torch.Tensor], num_chunks: int) -> BoundRoute:
    sent, arrange, depart = rows
    splits = RowSplits(index.send_count, index.receive_count)
    return BoundRoute(
        dispatch=tuple(
            _pack(sent * num_chunks + chunk, splits.num_sent) for chunk in range(num_chunks)
        ),
        arrange=None if index.is_in_order else arrange,
        depart=None if index.is_in_order else _pack(depart, splits.num_received),
        splits=splits,
        num_rows=len(index.arrange),
        num_sent=len(index.sent_rows),
    )


def _pack(rows: torch.Tensor, num_remote: int) -> PackIndex:
    return PackIndex(remote=rows[:num_remote], local=rows[num_remote:])


def _each_chunk(rows: torch.Tensor, num_chunks: int, stride: int) -> torch.Tensor:
    """(n, num_chunks): rows + chunk * stride."""
    return rows[:, None] + torch.arange(num_chunks, dtype=rows.dtype, device=rows.device) * stride


def _returned_rows(position: torch.Tensor, num_chunks: int, num_sent: int) -> torch.Tensor:
    """(home rows * chunks,) rows of the returned buffer: chunk * num_sent + travel position; the
    zero row behind all of them for padding tokens."""
    rows = _each_chunk(position, num_chunks, num_sent)
    return rows.masked_fill(position[:, None] == NOWHERE, num_chunks * num_sent).flatten()


def _home_sum(
    passes: list[torch.Tensor], rank: torch.Tensor, num_pieces: int, num_sent: int
) -> HomeSum:
    """Without passes, rank is a travel position. A row holds dK and dV: two half rows."""
    if passes:
        zero_row = len(passes[0]) * num_pieces
        rows = _each_chunk(rank * num_pieces, num_pieces, 1)
        rows = rows.masked_fill(rank[:, None] == NOWHERE, zero_row).flatten()
    else:
        rows = _returned_rows(rank, num_pieces, num_sent)
    return HomeSum(
        passes=tuple(_each_chunk(p, num_pieces, num_sent).flatten() for p in passes),
        key_rows=2 * rows,
        value_rows=2 * rows + 1,
    )


def _bound_round(
    plan_round: Round, cu_queries: torch.Tensor, cu_keys: torch.Tensor, runtime: PoolRuntime
) -> BoundRound:
    return BoundRound(
        query_start=plan_round.query_start,
        query_stop=plan_round.query_stop,
        key_stop=plan_round.key_stop,
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=plan_round.max_queries,
        max_keys=plan_round.max_keys,
        prepared=runtime.kernel.prepare(plan_round, runtime.device),
    )


def _check(plan: WorkerPlan, runtime: PoolRuntime) -> None:
    here = (runtime.dispatch.worker, runtime.dispatch.num_workers)
    if (plan.worker, plan.num_workers) != here:
        raise PlanError(
            f"plan of worker {plan.worker} of {plan.num_workers} was given to worker {here[0]} of "
            f"{here[1]}; call pool_plan.worker_plan({here[0]}) of a pool with {here[1]} workers."
        )
    heads = plan.heads
    for plan_round in plan.rounds:
        runtime.kernel.check_sizes(
            plan_round, heads.query_heads_per_chunk, heads.kv_heads_per_chunk, plan.shape.head_dim
        )
    sent = int(plan.query.send_count.sum()), int(plan.kv.send_count.sum())
    most = max(
        (max(plan.num_local_tokens * heads.head_split, sent[0]) + 1) * heads.chunks,
        2 * (max(plan.num_local_tokens * heads.kv_shards, sent[1]) + 1) * heads.kv_pieces,
    )
    if most > INT32_MAX:
        raise ValueError(
            f"{most} row numbers do not fit int32; lower head_split or chunks, or raise the "
            "context parallel size."
        )
