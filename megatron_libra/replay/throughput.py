"""Figure 5: throughput of one attention call by block length and heads. In: CostModel, or a timer.
Out: ThroughputGrid.

A call is one block of queries against all keys of a full-length sample, the last block of it, as a
worker that received it computes; its kv heads are those that its query heads attend to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape
from megatron_libra.replay.calls import KernelCall, call_of, table_of
from megatron_libra.simulator.cost_model import CostModel

__all__ = ["BLOCKS", "HEADS", "ThroughputGrid", "grid_calls", "predicted_grid", "throughput_grid"]

Float = NDArray[np.float64]
BLOCKS = (1024, 2048, 4096, 8192, 16384)
HEADS = (1, 2, 4, 8, 16)
BACKWARD_WORK = 2.5
"""FLOPs of backward over those of forward."""


@dataclass(frozen=True, slots=True, eq=False)
class ThroughputGrid:
    """TFLOP/s by block and heads."""

    label: str
    """Device and kernel, or the model."""
    num_keys: int
    blocks: tuple[int, ...]
    heads: tuple[int, ...]
    forward: Float
    """(heads, blocks)"""
    backward: Float


def grid_calls(
    shape: AttentionShape, num_keys: int, heads: tuple[int, ...] = HEADS
) -> list[list[KernelCall]]:
    """By heads and block; blocks that are longer than the keys are left out."""
    ratio = shape.query_heads // shape.kv_heads
    return [
        [
            call_of(
                [block],
                [num_keys],
                query_heads=count,
                kv_heads=max(1, count // ratio),
                head_dim=shape.head_dim,
            )
            for block in BLOCKS
            if block <= num_keys
        ]
        for count in heads
        if count <= shape.query_heads
    ]


def throughput_grid(
    shape: AttentionShape,
    num_keys: int,
    label: str,
    seconds: Callable[[KernelCall], tuple[float, float]],
) -> ThroughputGrid:
    """TFLOP/s given a function for the seconds of forward and backward of a call."""
    calls = grid_calls(shape, num_keys)
    times = np.array([[seconds(call) for call in row] for row in calls])
    flops = np.array([[float(call.flops) for call in row] for row in calls])
    return ThroughputGrid(
        label=label,
        num_keys=num_keys,
        blocks=tuple(call.round.max_queries for call in calls[0]),
        heads=tuple(row[0].query_heads for row in calls),
        forward=flops / times[..., 0] / 1e12,
        backward=BACKWARD_WORK * flops / times[..., 1] / 1e12,
    )


def predicted_grid(shape: AttentionShape, num_keys: int, model: CostModel) -> ThroughputGrid:
    """By a cost model."""

    def seconds(call: KernelCall) -> tuple[float, float]:
        forward, backward = (
            float(
                model.pass_cost(call.head_dim, backward=backward).seconds(
                    table_of([call]), model.num_sms
                )[0]
            )
            for backward in (False, True)
        )
        return forward, backward

    return throughput_grid(shape, num_keys, f"model {model.name}", seconds)
