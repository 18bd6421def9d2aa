"""Bind one worker's plan to its device, once per microbatch; every layer reuses the result.

In: PlanIndex (row numbers, host), or the WorkerPlan that it is made of. Out: BoundPlan (index
tensors, device). All index arrays travel in one pinned, non-blocking copy; nothing waits for the
device. Later code only gathers rows by these indices: a scatter is several times slower than a
gather with the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.config import divisors
from megatron_libra.executor.bound_plan import BoundLocal, BoundPlan
from megatron_libra.executor.bound_route import PartRows, bind_route, bind_sum
from megatron_libra.executor.kernels import AttentionKernel, BoundRound, bind_round
from megatron_libra.executor.local_calls import LocalCalls
from megatron_libra.executor.local_rows import LocalRows
from megatron_libra.executor.plan_index import PlanIndex, index_plan
from megatron_libra.executor.route_index import RouteIndex
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.steps import steps_of
from megatron_libra.executor.transport import RowTraffic
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.heads import HeadPartition, fits
from megatron_libra.plan.worker_plan import Round, WorkerPlan

__all__ = ["bind", "bind_index"]

Int32 = NDArray[np.int32]
INT32_MAX = 2**31 - 1
ALIGNMENT = 4
"""Elements of int32 to which a tensor is aligned: kernels copy boundaries that are not at a
multiple of 16 bytes."""


def bind(plan: WorkerPlan, runtime: PoolRuntime) -> BoundPlan:
    """Turn ranges into device index tensors. Local: nothing is communicated, nothing waits for the
    device.

    Raises:
        PlanError: the plan is another worker's or another pool's.
        ValueError: an attention call would be too large for the kernel, or row numbers for int32.
    """
    _check(plan, runtime)
    return _bind(index_plan(plan), runtime)


def bind_index(index: PlanIndex, runtime: PoolRuntime) -> BoundPlan:
    """The same, of a plan whose row numbers the coordinator made ahead; training calls this one.
    Local; raises what bind raises."""
    _check(index.plan, runtime)
    return _bind(index, runtime)


def _bind(index: PlanIndex, runtime: PoolRuntime) -> BoundPlan:
    plan, local = index.plan, index.local
    heads, steps = plan.heads, steps_of(plan)
    rounds = [*(r for part in plan.exchanged for r in part.rounds), *local.rounds]
    entries = [cu for r in rounds for cu in (r.cu_queries, r.cu_keys)]
    pass_sizes = [len(contributions) * heads.kv_pieces for contributions in index.passes]
    singles = [index.query_position, local.tokens]
    arrays = [_route_arrays(index.query), _route_arrays(index.kv), singles, entries]
    query, kv, (position, local_tokens), entries_t, sums = _upload(
        [*arrays, _sum_arrays(index, pass_sizes)], runtime.device
    )
    bound_query = bind_route(
        _part_rows(plan, [part.query_rows for part in plan.exchanged], query),
        [(step.part, step.chunk) for step in steps],
        heads.chunks,
    )
    bound_kv = bind_route(
        _part_rows(plan, [part.kv_rows for part in plan.exchanged], kv),
        [(step.part, heads.kv_piece_of(step.chunk)) for step in steps if step.brings_kv],
        heads.kv_pieces,
    )
    bound_rounds = iter(_bound_rounds(rounds, entries_t, runtime))
    return BoundPlan(
        plan=plan,
        runtime=runtime,
        steps=steps,
        query=bound_query,
        kv=bound_kv,
        query_rows_at_home=bound_query.rows_at_home(position).flatten(),
        kv_sum=bind_sum(*sums, pass_sizes, bound_kv),
        rounds=tuple(tuple(islice(bound_rounds, len(part.rounds))) for part in plan.exchanged),
        local=BoundLocal(
            rows=LocalRows(None if local.in_place else local_tokens.long()),
            calls=LocalCalls.of(
                tuple(bound_rounds),
                local.num_early_rounds,
                plan.local.late_kv_heads,
                _local_heads(plan, local.rounds, runtime.kernel),
            ),
            gaps=local.gaps,
            unread=local.unread(plan.num_local_tokens),
        ),
    )


def _route_arrays(parts: Sequence[RouteIndex]) -> list[Int32]:
    return [array for each in parts for array in (each.sent_rows, each.arrange, each.depart)]


def _sum_arrays(index: PlanIndex, pass_sizes: list[int]) -> list[Int32]:
    """Rows, contributions and where the passes of all pieces start, see HomeSum."""
    contributions = np.concatenate([np.zeros(0, np.int32), *index.passes])
    return [index.summed, contributions, np.cumsum([0, *pass_sizes, 0]).astype(np.int32)]


def _part_rows(
    plan: WorkerPlan, matrices: Sequence[NDArray[np.int64]], rows: list[torch.Tensor]
) -> list[PartRows]:
    """Near and far: three tensors each."""
    return [
        PartRows(RowTraffic(matrix, plan.worker), *rows[3 * part : 3 * part + 3])
        for part, matrix in enumerate(matrices)
    ]


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
    pairs = zip(entries[::2], entries[1::2], strict=True)
    return tuple(
        bind_round(r, runtime.kernel, runtime.device, entries=pair)
        for r, pair in zip(rounds, pairs, strict=True)
    )


def _check(plan: WorkerPlan, runtime: PoolRuntime) -> None:
    here = (runtime.dispatch.worker, runtime.dispatch.num_workers)
    if (plan.worker, plan.num_workers) != here:
        raise PlanError(
            f"plan of worker {plan.worker} of {plan.num_workers} was given to worker {here[0]} of "
            f"{here[1]}; call pool_plan.worker_plan({here[0]}) of a pool with {here[1]} workers."
        )
    heads = plan.heads
    for part in plan.exchanged:
        _check_calls(
            runtime.kernel, part.rounds, heads.query_heads_per_chunk, heads.kv_heads_per_chunk, plan
        )
    query_rows = plan.near.query_rows + plan.far.query_rows
    kv_rows = plan.near.kv_rows + plan.far.kv_rows
    most = max(
        _most_rows(plan, query_rows, heads.head_split, heads.chunks),
        2 * _most_rows(plan, kv_rows, heads.kv_shards, heads.kv_pieces),
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


def _local_heads(
    plan: WorkerPlan, rounds: Sequence[Round], kernel: AttentionKernel
) -> HeadPartition:
    """All heads in as few calls as the kernel allows."""
    shape = plan.shape
    for count in divisors(shape.query_heads):
        if not fits(shape, 1, count):
            continue
        heads = HeadPartition.of(shape, 1, count)
        try:
            _check_calls(
                kernel, rounds, heads.query_heads_per_chunk, heads.kv_heads_per_chunk,
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
