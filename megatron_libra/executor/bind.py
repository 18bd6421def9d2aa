"""Bind one worker's plan to its device, once per microbatch; every layer reuses the result.

In: WorkerPlan (ranges, host). Out: BoundPlan (index tensors, device). All index arrays travel in
one pinned, non-blocking copy; nothing waits for the device. Later code only gathers rows by these
indices: a scatter is several times slower than a gather with the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.config import divisors
from megatron_libra.executor.bound_route import BoundRoute, HomeSum, bind_route, bind_sum
from megatron_libra.executor.kernels import AttentionKernel, BoundRound
from megatron_libra.executor.local_rows import LocalRows
from megatron_libra.executor.route_index import (
    RouteIndex,
    contributions_at_home,
    index_route,
    positions_at_home,
)
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.transport import RowTraffic
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.heads import HeadPartition, fits
from megatron_libra.plan.worker_plan import Round, WorkerPlan, WorkerRoute

__all__ = ["BoundLocal", "BoundPlan", "bind"]

Int32 = NDArray[np.int32]
INT32_MAX = 2**31 - 1
ALIGNMENT = 4
"""Elements of int32 to which a tensor is aligned: kernels copy boundaries that are not at a
multiple of 16 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundLocal:
    """The local part on the device: rows of this worker's own tensors, never exchanged."""

    query: LocalRows
    """Tokens of Q, dO, O and dQ."""
    kv: LocalRows
    """Tokens of K, V, dK and dV."""
    rounds: tuple[BoundRound, ...]
    num_early_rounds: int
    heads: HeadPartition
    """All heads; its chunks are more than 1 only if one call would be too large for the kernel."""

    @property
    def num_calls(self) -> int:
        """Kernel calls of a forward, each with a log-sum-exp."""
        return len(self.rounds) * self.heads.chunks


@dataclass(frozen=True, slots=True, eq=False)
class BoundPlan:
    """One worker's plan on its device. Used by forward, backward and activation recompute of every
    layer."""

    plan: WorkerPlan
    runtime: PoolRuntime
    query: BoundRoute
    kv: BoundRoute
    query_rows_at_home: torch.Tensor
    """(T * H * M,) where each output row stands in the mailbox of the return."""
    kv_sum: HomeSum
    rounds: tuple[BoundRound, ...]
    """Of the exchanged part, for each chunk."""
    local: BoundLocal

    @property
    def heads(self) -> HeadPartition:
        """How the heads are cut into shards, chunks and pieces."""
        return self.plan.heads

    @property
    def exchanges(self) -> bool:
        """Whether any worker of the pool exchanges anything; the same on every worker."""
        return self.query.traffic.moves or self.kv.traffic.moves

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
    heads, tokens = plan.heads, plan.num_local_tokens
    query, kv = _index(plan, plan.query, heads.head_split), _index(plan, plan.kv, heads.kv_shards)
    local_query, local_kv = (
        _index(plan, route, 1).sent_rows for route in (plan.local.query, plan.local.kv)
    )
    position = positions_at_home(query.sent_rows, tokens * heads.head_split)
    passes, rank = contributions_at_home(kv.sent_rows, kv.send_count, tokens * heads.kv_shards)
    if len(passes) < 2:  # nothing to sum: find the only returned row itself
        passes, rank = [], positions_at_home(kv.sent_rows, len(rank))
    rounds = (*plan.rounds, *plan.local.rounds)
    entries = [cu for r in rounds for cu in (r.cu_queries, r.cu_keys)]
    query_t, kv_t, (position_t, rank_t), local_t, passes_t, entries_t = _upload(
        [_arrays(query), _arrays(kv), [position, rank], [local_query, local_kv], passes, entries],
        runtime.device,
    )
    bound_rounds = _bound_rounds(rounds, entries_t, runtime)
    query_traffic = RowTraffic(plan.query_rows, plan.worker)
    bound_query = bind_route(query_t, query_traffic, heads.chunks)
    bound_kv = bind_route(kv_t, RowTraffic(plan.kv_rows, plan.worker), heads.kv_pieces)
    return BoundPlan(
        plan=plan,
        runtime=runtime,
        query=bound_query,
        kv=bound_kv,
        query_rows_at_home=bound_query.rows_at_home(position_t).flatten(),
        kv_sum=bind_sum(passes_t, rank_t, bound_kv),
        rounds=bound_rounds[: len(plan.rounds)],
        local=BoundLocal(
            query=LocalRows.of(local_query, local_t[0]),
            kv=LocalRows.of(local_kv, local_t[1]),
            rounds=bound_rounds[len(plan.rounds) :],
            num_early_rounds=plan.local.num_early_rounds,
            heads=_local_heads(plan, runtime.kernel),
        ),
    )


def _index(plan: WorkerPlan, route: WorkerRoute, num_shards: int) -> RouteIndex:
    return index_route(
        route, worker=plan.worker, num_workers=plan.num_workers, num_shards=num_shards
    )


def _arrays(index: RouteIndex) -> list[Int32]:
    return [index.sent_rows, index.arrange, index.depart]


def _upload(lists: list[list[Int32]], device: torch.device) -> Iterator[list[torch.Tensor]]:
    """The same lists as tensors on the device, aligned views of one buffer that one copy brought
    there."""
    arrays = [array for arrays in lists for array in arrays]
    starts = np.cumsum([0, *(-(-len(array) // ALIGNMENT) * ALIGNMENT for array in arrays)])
    flat = torch.empty(int(starts[-1]), dtype=torch.int32, pin_memory=device.type == "cuda")
    for start, array in zip(starts.tolist(), arrays, strict=False):
        flat[start : start + len(array)] = torch.from_numpy(array)
    # the caching host allocator keeps the pinned block until the copy has run
    flat = flat.to(device, non_blocking=True)
    views = zip(starts.tolist(), arrays, strict=False)
    tensors = iter([flat[start : start + len(array)] for start, array in views])
    return ([next(tensors) for _ in arrays] for arrays in lists)


def _bound_rounds(
    rounds: Sequence[Round], entries: list[torch.Tensor], runtime: PoolRuntime
) -> tuple[BoundRound, ...]:
    return tuple(
        BoundRound(
            query_start=r.query_start,
            query_stop=r.query_stop,
            key_start=r.key_start,
            key_stop=r.key_stop,
            cu_queries=cu_queries,
            cu_keys=cu_keys,
            max_queries=r.max_queries,
            max_keys=r.max_keys,
            prepared=runtime.kernel.prepare(r, runtime.device),
        )
        for r, cu_queries, cu_keys in zip(rounds, entries[::2], entries[1::2], strict=True)
    )


def _check(plan: WorkerPlan, runtime: PoolRuntime) -> None:
    here = (runtime.dispatch.worker, runtime.dispatch.num_workers)
    if (plan.worker, plan.num_workers) != here:
        raise PlanError(
            f"plan of worker {plan.worker} of {plan.num_workers} was given to worker {here[0]} of "
            f"{here[1]}; call pool_plan.worker_plan({here[0]}) of a pool with {here[1]} workers."
        )
    heads = plan.heads
    _check_calls(
        runtime.kernel, plan.rounds, heads.query_heads_per_chunk, heads.kv_heads_per_chunk, plan
    )
    most = max(
        _most_rows(plan, plan.query_rows, heads.head_split, heads.chunks),
        2 * _most_rows(plan, plan.kv_rows, heads.kv_shards, heads.kv_pieces),
    )
    if most > INT32_MAX:
        raise ValueError(
            f"{most} row numbers do not fit int32; lower head_split or chunks, or raise the "
            "context parallel size."
        )


def _check_calls(
    kernel: AttentionKernel,
    rounds: Sequence[Round],
    query_heads: int,
    kv_heads: int,
    plan: WorkerPlan,
) -> None:
    for plan_round in rounds:
        kernel.check_sizes(plan_round, query_heads, kv_heads, plan.shape.head_dim)


def _local_heads(plan: WorkerPlan, kernel: AttentionKernel) -> HeadPartition:
    """All heads in as few calls as the kernel allows."""
    shape = plan.shape
    for count in divisors(shape.query_heads):
        if not fits(shape, 1, count):
            continue
        heads = HeadPartition.of(shape, 1, count)
        try:
            _check_calls(
                kernel, plan.local.rounds, heads.query_heads_per_chunk, heads.kv_heads_per_chunk,
                plan,
            )  # fmt: skip
        except ValueError:
            if count == shape.query_heads:
                raise
            continue
        return heads
    raise AssertionError("one head is a divisor")


def _most_rows(plan: WorkerPlan, matrix: NDArray[np.int64], shards: int, chunks: int) -> int:
    """Rows of this worker's tensors or of a mailbox, whichever are more."""
    sent, received = int(matrix[plan.worker].sum()), int(matrix[:, plan.worker].sum())
    return chunks * max(plan.num_local_tokens * shards, sent + received) + 1
