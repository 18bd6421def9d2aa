"""Steps from the forwards of their microbatches. In: what pretrain_timed.py wrote. Out: how much
forwards differ; predicted milliseconds of a step.

A step is predicted as megatron_libra/simulator does it: the attention of its very plans by a cost
model, the rest as it was measured. The rest of one microbatch, `rest_ms`, is a step of ulysses at
DP 1 less its predicted attention, over its microbatches. It is taken for equal in all layouts: 1 /
PP of it on each stage. So the gradient sync of replicas and transfers between stages are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from bench_common import Case
from bench_models import Model
from numpy.typing import NDArray

from megatron_libra.simulator.pipeline import pipeline_seconds

__all__ = ["PATTERN", "attention_of", "forward_spread", "read_forwards", "rest_of", "step_ms"]

Float = NDArray[np.float64]
PATTERN = "forwards-*.json"


def read_forwards(folder: Path) -> list[Case]:
    """What every rank wrote; empty for a script that does not."""
    return [json.loads(file.read_text()) for file in sorted(folder.glob(PATTERN))]


def forward_spread(ranks: Sequence[Case], warmup: int) -> float:
    """max / mean of the first stage's forward times, over all microbatches and replicas of a step;
    mean of the steps after warm-up. A replica's time is that of its slowest rank."""
    replicas: dict[int, list[Float]] = {}
    for rank in ranks:
        if rank["stage"] == 0:
            times = np.array(rank["forward_ms"][warmup:], np.float64)
            replicas.setdefault(rank["replica"], []).append(times)
    times = np.stack([np.max(same, axis=0) for same in replicas.values()])
    return float((times.max(axis=(0, 2)) / times.mean(axis=(0, 2))).mean())


def attention_of(ranks: Sequence[Case], warmup: int) -> Float:
    """(steps, microbatches, pools, 2) predicted seconds of one layer's forward and backward."""
    pools = sorted(
        (rank for rank in ranks if rank["attention_s"] is not None), key=lambda r: r["replica"]
    )
    return np.stack([np.array(rank["attention_s"][warmup:]) for rank in pools], axis=2)


def step_ms(attention: Float, model: Model, num_stages: int, rest_ms: float) -> float:
    """Predicted milliseconds of a step, mean of the steps: its slowest group of pools, through the
    stages by 1F1B.

    Args:
        attention: see attention_of.
        rest_ms: of one microbatch in the whole model.
    """
    forward, backward = np.moveaxis(attention, -1, 0) * 1e3 * model.num_layers / num_stages
    unit = rest_ms / num_stages / (model.num_forwards + 2)
    again = model.num_forwards - 1
    return float(
        np.mean(
            [
                pipeline_seconds(f + unit, b + again * f + (2 + again) * unit, num_stages).max()
                for f, b in zip(forward, backward, strict=True)
            ]
        )
    )


def rest_of(measured_ms: float, attention: Float, model: Model) -> float | None:
    """rest_ms, from a step of ulysses at DP 1 without stages; None where its predicted attention
    alone is longer, so that the cost model is not of this machine."""
    rest = measured_ms - step_ms(attention, model, 1, 0.0)
    return rest / attention.shape[1] if rest > 0 else None
