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
from megatron_libra.executor.local_rows import LocalRows, TokenRanges
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

__all__ = ["BoundLocal", "BoundPlan", "BoundStep", "bind"]

Int32 = NDArray[np.int32]
INT32_MAX = 2**31 - 1
LARGEST_GAP = 65_536
"""Query rows (tokens x heads) of a gap that a call in place skips; for more, another call is
cheaper: a kernel needs about 0.4 ns for each in forward and 1.3 ns in backward."""
MOST_GAPS = 32
"""Each is filled by a gather of its own."""
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
    gaps: tuple[tuple[int, int], ...]
    """Ranges of home tokens that are not local: exchanged, or padding."""
    unread: tuple[tuple[int, int], ...]
    """Ranges of home tokens that no round in place reads as keys."""

    @property
    def num_calls(self) -> int:
        """Kernel calls of a forward, each with a log-sum-exp."""
        return len(self.rounds) * self.heads.chunks


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
    query_rows_at_home: torch.Tensor
    """(T * H * M,) int32 where each returned row of a home token stands in the return's mailbox;
    the zero row for padding, and for local rows, which do not come from there."""
    kv_tokens: torch.Tensor | None
    """int32 home tokens whose K and V are sent; None if they are most of them, so that all are
    prepared."""
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
    ranges = TokenRanges.of(plan.local, local_tokens)
    gaps, in_place = ranges.gaps(tokens), 2 * len(local_tokens) >= tokens
    if in_place and len(gaps) <= MOST_GAPS:
        local_rounds, num_early = ranges.rounds(LARGEST_GAP // plan.shape.query_heads)
    else:
        gaps, in_place = ((0, tokens),), False
        local_rounds, num_early = plan.local.rounds, plan.local.num_early_rounds
    position = positions_at_home(sent[0], tokens * heads.head_split)
    blocks = [size for index in kv for size in index.block_sizes]
    kv_tokens = _sent_tokens(kv, heads.kv_shards, tokens)
    passes, summed = contributions_at_home(sent[1], blocks, tokens * heads.kv_shards)
    rounds = [*(r for part in parts for r in part.rounds), *local_rounds]
    entries = [cu for r in rounds for cu in (r.cu_queries, r.cu_keys)]
    *routes, (position_t, summed_t, local_t, tokens_t), passes_t, entries_t = _upload(
        [
            *(_arrays(index, index.sent_rows) for index in query),
            *(
                _arrays(index, _packed_rows(index, kv_tokens, heads.kv_shards, tokens))
                for index in kv
            ),
            [position, summed, local_tokens, kv_tokens], passes, entries,
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
        query_rows_at_home=bound_query.rows_at_home(position_t).flatten(),
        kv_tokens=tokens_t if len(kv_tokens) < tokens else None,
        kv_sum=bind_sum(passes_t, summed_t, bound_kv),
        rounds=tuple(tuple(islice(bound_rounds, len(part.rounds))) for part in parts),
        local=BoundLocal(
            rows=LocalRows(None if in_place else local_t.long()),
            rounds=tuple(bound_rounds),
            num_early_rounds=num_early,
            heads=_local_heads(plan, local_rounds, runtime.kernel),
            gaps=gaps,
            unread=_unread(local_rounds, tokens),
        ),
    )


def _unread(rounds: Sequence[Round], num_tokens: int) -> tuple[tuple[int, int], ...]:
    """Token ranges between the key ranges of rounds in place."""
    spans = sorted((r.key_start, r.key_stop) for r in rounds)
    stops, starts = [0, *(stop for _, stop in spans)], [*(start for start, _ in spans), num_tokens]
    return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)


def _sent_tokens(indexes: list[RouteIndex], kv_shards: int, num_tokens: int) -> Int32:
    """Home tokens that the kv route needs, or all of them if they are most."""
    sent = np.zeros(num_tokens, np.bool_)
    for index in indexes:
        sent[index.sent_rows // kv_shards] = True
    if 2 * np.count_nonzero(sent) > num_tokens:
        sent[:] = True
    return np.flatnonzero(sent).astype(np.int32)


def _packed_rows(index: RouteIndex, kv_tokens: Int32, kv_shards: int, num_tokens: int) -> Int32:
    """The index's sent rows among the prepared rows of kv_tokens."""
    place = np.zeros(num_tokens, np.int32)
    place[kv_tokens] = np.arange(len(kv_tokens), dtype=np.int32)
    token, shard = np.divmod(index.sent_rows, np.int32(kv_shards))
    packed: Int32 = place[token] * np.int32(kv_shards) + shard
    return packed


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


def _arrays(index: RouteIndex, packed: Int32) -> list[Int32]:
    return [packed, index.arrange, index.depart]


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
