"""The chunks that a layer exchanges, in time order. In: WorkerPlan. Out: steps, alike on all
workers of a pool."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_libra.plan.parts import FAR, NEAR, pipeline_order
from megatron_libra.plan.worker_plan import WorkerPlan

__all__ = ["Step", "steps_of"]


@dataclass(frozen=True, slots=True)
class Step:
    """One chunk of the near or the far part; its place among the steps is its query segment."""

    part: int
    chunk: int
    kv_segment: int
    """Of the kv route: the piece that the chunk computes with."""
    brings_kv: bool
    """K and V did not travel with an earlier chunk of the part."""
    finishes_kv: bool
    """No later chunk of the part computes with the same K and V."""


def steps_of(plan: WorkerPlan) -> tuple[Step, ...]:
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
        steps.append(Step(part, chunk, at[part], brings, last))
    return tuple(steps)
