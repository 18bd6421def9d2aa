"""What the simulator expects of plans. In: plans, a cost model. Out: seconds of a layer, errors.

A pool takes as long as its slowest worker, forward and backward apart (megatron_libra/simulator).
All GPUs are of one host, so every pool is inside a node.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from megatron_libra import PoolPlan
from megatron_libra.simulator.calibration import BUILT_IN, load_cost_model
from megatron_libra.simulator.cost_model import CostModel, predict
from megatron_libra.simulator.pool_work import PoolWork

__all__ = ["add_cost_model", "cost_model_of", "error_percent", "pool_seconds"]


def add_cost_model(parser: argparse.ArgumentParser) -> None:
    """The flag of the model."""
    parser.add_argument(
        "--cost-model",
        type=lambda name: name if name in BUILT_IN else str(Path(name).resolve()),
        default=BUILT_IN[0],
        help=f"of predictions: {', '.join(BUILT_IN)} or a file that libra calibrate wrote; its "
        "kernel and links should be those that are measured (default: %(default)s, copy engines)",
    )


def cost_model_of(args: argparse.Namespace, parser: argparse.ArgumentParser) -> CostModel:
    """The model; leaves with a line where there is none."""
    try:
        return load_cost_model(args.cost_model)
    except ValueError as error:
        parser.error(f"--cost-model: {error}")


def pool_seconds(plan: PoolPlan, model: CostModel) -> tuple[float, float]:
    """Forward and backward of one layer on a pool, each its slowest worker's."""
    work = PoolWork.of(plan, workers_per_node=plan.num_workers)
    time = predict(work, model, refetch=plan.config.backward_kv == "refetch")
    return time.forward_s, time.backward_s


def error_percent(predicted: float, measured: float) -> float:
    """How far a prediction is above what was measured."""
    return 100 * (predicted / measured - 1)
