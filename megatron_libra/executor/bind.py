"""Bind one worker's plan to its device, once per microbatch; every layer reuses the result.

In: WorkerPlan (ranges, host). Out: BoundPlan (index tensors, device). All index arrays travel in
one pinned, non-blocking copy; nothing waits for the device. Later code only gathers rows by these
indices: a scatter is several times slower than a gather with the inverse permutation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np
import torch
from numpy.typing import NDArray

from megatron_libra.config import divisors
from megatron_libra.executor.bound_route import (
    BoundRoute,
    HomeSum,
    PartRows,
    bind_route,
    bind_sum,
)
from megatron_libra.executor.kernels import AttentionKernel, BoundRound
from megatron_libra.executor.local_rows import LocalRows, rounds_in_place
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
from megatron_libra.plan.parts import FAR, NEAR, pipeline_order
from megatron_libra.plan.worker_plan import Round, WorkerPlan, WorkerRoute

__all__ = ["BoundLocal", "BoundPlan", "BoundStep", "HomeRows", "bind"]

Int32 = NDArray[np.int32]
INT32_MAX = 2**31 - 1
ALIGNMENT = 4
"""Elements of int32 to which a tensor is aligned: kernels copy boundaries that are not at a
multiple of 16 bytes."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundLocal:
    """The local part on the device: rows of this worker's own tensors, never exchanged."""

    rows: LocalRows
    rounds: tuple[BoundRound, ...]
    num_early_rounds: int
    heads: HeadPartition
    """All heads; its chunks are more than 1 only if one call would be too large for the kernel."""
    untouched: tuple[tuple[int, int], ...]
    """In place: ranges of home tokens that no round reads as keys."""
    num_covered: int
    """Tokens of this worker that belong to a sample; those behind them are padding."""

    @property
    def num_calls(self) -> int:
        """Kernel calls of a forward, each with a log-sum-exp."""
        return len(self.rounds) * self.heads.chunks


@dataclass(frozen=True, slots=True, eq=False)
class HomeRows:
    """How returned query rows get home. A home row is a token of a head shard and chunk."""

    gather: torch.Tensor
    """int32 rows of the mailbox: of every home row, or of those of `index`."""
    index: torch.Tensor | None
    """int64 home rows that were exchanged; None: all are gathered, and local ones put over them."""


@dataclass(frozen=True, slots=True)
class BoundStep:
    """One chunk of the near or the far part; its place among the steps is its query segment."""

    part: int
    chunk: int
    kv_segment: int
    """Of the kv route: the piece that the chunk computes with."""
    brings_kv: bool
    """K and V did not travel with an earlier chunk of the part."""
    finishes_kv: bool
    """No later chunk of the part computes with the same K and V."""


@dataclass(frozen=True, slots=True, eq=False)
class BoundPlan:
    """One worker's plan on its device. Used by forward, backward and activation recompute of every
    layer."""

    plan: WorkerPlan
    runtime: PoolRuntime
    steps: tuple[BoundStep, ...]
    """What is exchanged, in time order, alike on all workers; empty if nothing is."""
    query: BoundRoute
    kv: BoundRoute
    home_rows: HomeRows
    kv_sum: HomeSum
    rounds: tuple[tuple[BoundRound, ...], ...]
    """By exchanged part, for each chunk."""
    local: BoundLocal

    @property
    def heads(self) -> HeadPartition:
        """How the heads are cut into shards, chunks and pieces."""
        return self.plan.heads


def bind(plan: WorkerPlan, runtime: PoolRuntime) -> BoundPlan:
    """Turn ranges into device index tensors. Local: nothing is communicated, nothing waits for the
    device.

    Raises:
        PlanError: the plan is another worker's or another pool's.
        ValueError: an attention call would be too large for the kernel, or row numbers for int32.
    """
    _check(plan, runtime)
    heads, tokens, parts = plan.heads, plan.num_local_tokens, plan.exchanged
    query = [_index(plan, part.query, heads.head_split) for part in parts]
    kv = [_index(plan, part.kv, heads.kv_shards) for part in parts]
    local_tokens = _index(plan, plan.local.query, 1).sent_rows
    sent = [np.concatenate([index.sent_rows for index in indexes]) for indexes in (query, kv)]
    # where most rows are exchanged, the home gathers them all from the mailbox
    in_place = 2 * len(sent[0]) <= tokens * heads.head_split
    local_rounds = rounds_in_place(plan.local, local_tokens) if in_place else plan.local.rounds
    position = positions_at_home(sent[0], tokens * heads.head_split)
    blocks = [size for index in kv for size in index.block_sizes]
    passes, summed = contributions_at_home(sent[1], blocks, tokens * heads.kv_shards)
    rounds = [*(r for part in parts for r in part.rounds), *local_rounds]
    entries = [cu for r in rounds for cu in (r.cu_queries, r.cu_keys)]
    *routes, (position_t, sent_t, summed_t, local_t), passes_t, entries_t = _upload(
        [
            *(_arrays(index) for index in (*query, *kv)),
            [position, sent[0], summed, local_tokens], passes, entries,
        ],
        runtime.device,
    )  # fmt: skip
    steps = _steps(plan)
    bound_query = bind_route(
        [_part_rows(plan, p.query_rows, rows) for p, rows in zip(parts, routes[:2], strict=True)],
        [(step.part, step.chunk) for step in steps],
        heads.chunks,
    )
    bound_kv = bind_route(
        [_part_rows(plan, p.kv_rows, rows) for p, rows in zip(parts, routes[2:], strict=True)],
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
        home_rows=_home_rows(bound_query, sent_t if in_place else position_t, in_place),
        kv_sum=bind_sum(passes_t, summed_t, bound_kv),
        rounds=tuple(tuple(islice(bound_rounds, len(part.rounds))) for part in parts),
        local=BoundLocal(
            rows=LocalRows(None if in_place else local_t.long()),
            rounds=tuple(bound_rounds),
            num_early_rounds=plan.local.num_early_rounds,
            heads=_local_heads(plan, local_rounds, runtime.kernel),
            untouched=_untouched(local_rounds, tokens),
            num_covered=len(local_tokens) + len(np.unique(sent[0] // heads.head_split)),
        ),
    )


def _home_rows(route: BoundRoute, rows: torch.Tensor, in_place: bool) -> HomeRows:
    """rows: the exchanged home rows in travel order, or the position of every home row."""
    if not in_place:
        return HomeRows(route.rows_at_home(rows).flatten(), None)
    position = torch.arange(len(rows), dtype=torch.int32, device=rows.device)
    chunk = torch.arange(route.chunks, device=rows.device)
    index = rows.long()[:, None] * route.chunks + chunk
    return HomeRows(route.rows_at_home(position).flatten(), index.flatten())


def _untouched(rounds: Sequence[Round], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Token ranges between the key ranges of rounds in place."""
    stops = [0, *(r.key_stop for r in rounds)]
    starts = [*(r.key_start for r in rounds), num_tokens]
    return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)


def _steps(plan: WorkerPlan) -> tuple[BoundStep, ...]:
    """The chunks of the parts in which any worker of the pool computes something."""
    heads, steps, segments = plan.heads, [], -1
    at = dict.fromkeys((NEAR, FAR), 0)
    for part, chunk in pipeline_order(heads.chunks):
        if not plan.exchanged[part].query_rows.any():
            continue
        piece = heads.kv_piece_of(chunk)
        brings = chunk == 0 or heads.kv_piece_of(chunk - 1) != piece
        if brings:
            segments += 1
            at[part] = segments
        last = chunk + 1 == heads.chunks or heads.kv_piece_of(chunk + 1) != piece
        steps.append(BoundStep(part, chunk, at[part], brings, last))
    return tuple(steps)


def _part_rows(plan: WorkerPlan, matrix: NDArray[np.int64], rows: list[torch.Tensor]) -> PartRows:
    return PartRows(RowTraffic(matrix, plan.worker), *rows)


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
    for part in plan.exchanged:
        _check_calls(
            runtime.kernel, part.rounds, heads.query_heads_per_chunk, heads.kv_heads_per_chunk, plan
        )
    query_rows = sum(part.query_rows for part in plan.exchanged)
    kv_rows = sum(part.kv_rows for part in plan.exchanged)
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
