"""Bind one worker's plan to its device, once per microbatch; every layer reuses the result.

In: WorkerPlan (ranges, host). Out: BoundPlan (index tensors, device). All index arrays travel in
    one pinned, non-blocking copy; nothing waits for the device. Later code only gathers rows by
    these indices: a scatter is several times slower than a gather with the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.executor.kernels import AttentionKernel, BoundRound
from megatron_libra.executor.route_index import (
    RouteIndex,
    contributions_at_home,
    index_route,
    positions_at_home,
)
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.transport import RowSplits
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.heads import HeadPartition
from megatron_libra.plan.worker_plan import Round, WorkerPlan

__all__ = ["BoundPlan", "BoundRoute", "PackIndex", "bind"]

Int64 = NDArray[np.int64]
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
    """Turn ranges into device index tensors. Local: nothing is communicated, the device is not
    waited for.

    Raises:
        PlanError: the plan is another worker's or another pool's.
        ValueError: an attention call would be too large for the kernel.
    """
    _check(plan, runtime)
    heads, tokens = plan.heads, plan.num_local_tokens
    query = index_route(
        plan.query, worker=plan.worker, num_workers=plan.num_workers, num_shards=heads.head_split
    )
    kv = index_route(
        plan.kv, worker=plan.worker, num_workers=plan.num_workers, num_shards=heads.kv_shards
    )
    query_home = positions_at_home(query.sent_rows, tokens * heads.head_split, heads.chunks)
    kv_home = _sum_rows(kv.sent_rows, tokens * heads.kv_shards, heads.kv_pieces)
    upload = _Upload()
    query_slots = _add_route(upload, query, heads.chunks)
    kv_slots = _add_route(upload, kv, heads.kv_pieces)
    home, sums = upload.add(query_home), [upload.add(rows) for rows in kv_home]
    entries = [(upload.add(r.cu_queries), upload.add(r.cu_keys)) for r in plan.rounds]
    tensors = upload.to(runtime.device)
    return BoundPlan(
        plan=plan,
        runtime=runtime,
        query=_bound_route(query, query_slots, tensors),
        kv=_bound_route(kv, kv_slots, tensors),
        query_rows_at_home=tensors[home],
        kv_sum=HomeSum(tuple(tensors[i] for i in sums[2:]), tensors[sums[0]], tensors[sums[1]]),
        rounds=tuple(
            _bound_round(r, tensors[q], tensors[k], runtime.kernel, runtime.device)
            for r, (q, k) in zip(plan.rounds, entries, strict=True)
        ),
    )


class _Upload:
    """Collects int arrays on the host and brings them to the device in one copy."""

    def __init__(self) -> None:
        self._arrays: list[NDArray[np.int32]] = []

    def add(self, array: NDArray[np.integer]) -> int:
        """Register an array; returns its place in the list that `to` returns."""
        if array.max(initial=0) > INT32_MAX:
            raise ValueError(
                f"row number {array.max()} is beyond {INT32_MAX}; lower head_split or chunks."
            )
        self._arrays.append(array.astype(np.int32, copy=False).ravel())
        return len(self._arrays) - 1

    def to(self, device: torch.device) -> list[torch.Tensor]:
        """One int32 tensor for each array, views of one buffer."""
        flat = torch.from_numpy(np.concatenate(self._arrays))
        if device.type == "cuda":
            # the caching host allocator keeps the pinned block until the copy has run
            flat = flat.pin_memory().to(device, non_blocking=True)
        return list(flat.split([len(array) for array in self._arrays]))


def _add_route(upload: _Upload, index: RouteIndex, num_chunks: int) -> list[int]:
    """Places of arrange, depart and of the rows to dispatch for each chunk."""
    chunk_rows = [index.sent_rows * num_chunks + chunk for chunk in range(num_chunks)]
    return [upload.add(rows) for rows in (index.arrange, index.depart, *chunk_rows)]


def _bound_route(
    index: RouteIndex, slots: Sequence[int], tensors: list[torch.Tensor]
) -> BoundRoute:
    arrange, depart, *dispatch = (tensors[slot] for slot in slots)
    splits = RowSplits(tuple(index.send_count.tolist()), tuple(index.receive_count.tolist()))
    in_order = index.is_in_order
    return BoundRoute(
        dispatch=tuple(_pack(rows, splits.num_sent) for rows in dispatch),
        arrange=None if in_order else arrange,
        depart=None if in_order else _pack(depart, splits.num_received),
        splits=splits,
        num_rows=len(index.arrange),
        num_sent=len(index.sent_rows),
    )


def _pack(rows: torch.Tensor, num_remote: int) -> PackIndex:
    return PackIndex(remote=rows[:num_remote], local=rows[num_remote:])


def _sum_rows(sent_rows: Int64, num_home_rows: int, num_pieces: int) -> list[Int64]:
    """Key rows, value rows, then the passes; see HomeSum. A row holds dK and dV: two half rows."""
    passes, rank = contributions_at_home(sent_rows, num_home_rows)
    piece = np.arange(num_pieces)
    if len(passes) < 2:
        home = positions_at_home(sent_rows, num_home_rows, num_pieces)
        return [2 * home, 2 * home + 1]
    zero_row = len(passes[0])
    home = np.minimum(rank[:, None] * num_pieces + piece, zero_row * num_pieces).ravel()
    return [
        2 * home,
        2 * home + 1,
        *((p[:, None] + piece * len(sent_rows)).ravel() for p in passes),
    ]


def _bound_round(
    plan_round: Round,
    cu_queries: torch.Tensor,
    cu_keys: torch.Tensor,
    kernel: AttentionKernel,
    device: torch.device,
) -> BoundRound:
    return BoundRound(
        query_start=plan_round.query_start,
        query_stop=plan_round.query_stop,
        key_stop=plan_round.key_stop,
        cu_queries=cu_queries,
        cu_keys=cu_keys,
        max_queries=plan_round.max_queries,
        max_keys=plan_round.max_keys,
        prepared=kernel.prepare(plan_round, device),
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
