"""Row numbers of one worker's plan, on the host. In: WorkerPlan (ranges). Out: PlanIndex (numpy).

Everything of a bind that needs neither a device nor a kernel, so that it can be made ahead, in the
background; `bind` brings it to the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.executor.local_rows import TokenRanges
from megatron_libra.executor.route_index import (
    RouteIndex,
    contributions_at_home,
    index_route,
    positions_at_home,
)
from megatron_libra.plan.worker_plan import Round, WorkerPlan, WorkerRoute, is_in_place

__all__ = ["LocalIndex", "PlanIndex", "index_plan"]

Int32 = NDArray[np.int32]
LARGEST_GAP = 65_536
"""Query rows (tokens x heads) of a gap that a call in place skips; for more, another call is
cheaper: a kernel needs about 0.4 ns for each in forward and 1.3 ns in backward."""


@dataclass(frozen=True, slots=True, eq=False)
class LocalIndex:
    """How the local part is computed."""

    tokens: Int32
    """The local tokens in compute order."""
    in_place: bool
    rounds: tuple[Round, ...]
    """Over home tokens in place, else over copies of the local tokens."""
    num_early_rounds: int
    gaps: tuple[tuple[int, int], ...]
    """Ranges of home tokens whose results are not computed in place."""

    @classmethod
    def of(cls, plan: WorkerPlan) -> LocalIndex:
        """In place or in copies, see is_in_place."""
        tokens = _index(plan, plan.local.query, 1).sent_rows
        ranges, num_tokens = TokenRanges.of(plan.local, tokens), plan.num_local_tokens
        exchanged = sum(int(part.query.send_count.sum()) for part in plan.exchanged)
        gaps = ranges.gaps(num_tokens)
        if is_in_place(len(tokens), len(tokens) + exchanged // plan.heads.head_split, len(gaps)):
            rounds, num_early = ranges.rounds(LARGEST_GAP // plan.shape.query_heads)
            return cls(tokens, True, rounds, num_early, gaps)
        local = plan.local
        return cls(tokens, False, local.rounds, local.num_early_rounds, ((0, num_tokens),))

    def unread(self, num_tokens: int) -> tuple[tuple[int, int], ...]:
        """Token ranges between the key ranges of rounds in place."""
        spans = sorted((r.key_start, r.key_stop) for r in self.rounds)
        stops = [0, *(stop for _, stop in spans)]
        starts = [*(start for start, _ in spans), num_tokens]
        return tuple((a, b) for a, b in zip(stops, starts, strict=True) if a < b)


@dataclass(frozen=True, slots=True, eq=False)
class PlanIndex:
    """Row numbers of both routes and both exchanged parts, and of the local part."""

    plan: WorkerPlan
    query: tuple[RouteIndex, ...]
    """Of the near and the far part."""
    kv: tuple[RouteIndex, ...]
    query_position: Int32
    """(T * H,) place of each home row among the sent rows of both parts, or NOWHERE."""
    summed: Int32
    """Home rows of the kv route that get gradients back, by falling number of contributions."""
    passes: list[Int32]
    """passes[j]: the j-th contributions to the first of them, as places among the sent rows."""
    local: LocalIndex


def index_plan(plan: WorkerPlan) -> PlanIndex:
    """Expand ranges to row numbers. Pure; numpy does most of it without the interpreter lock."""
    heads, tokens = plan.heads, plan.num_local_tokens
    query = tuple(_index(plan, part.query, heads.head_split) for part in plan.exchanged)
    kv = tuple(_index(plan, part.kv, heads.kv_shards) for part in plan.exchanged)
    sent_query, sent_kv = (
        np.concatenate([i.sent_rows for i in indexes]) for indexes in (query, kv)
    )
    passes, summed = contributions_at_home(sent_kv)
    return PlanIndex(
        plan=plan,
        query=query,
        kv=kv,
        query_position=positions_at_home(sent_query, tokens * heads.head_split),
        summed=summed,
        passes=passes,
        local=LocalIndex.of(plan),
    )


def _index(plan: WorkerPlan, route: WorkerRoute, num_shards: int) -> RouteIndex:
    return index_route(route, worker=plan.worker, num_shards=num_shards)
