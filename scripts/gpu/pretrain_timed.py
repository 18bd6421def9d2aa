"""scripts/pretrain_gpt.py with a clock on the forward of every microbatch, and its prediction.

    torchrun ... -m megatron_libra.run scripts/gpu/pretrain_timed.py --forwards FOLDER ...

In: --forwards and --cost-model, then flags of pretrain_gpt.py. Out: FOLDER/forwards-RANK.json:

stage, replica, context   its pipeline, data and context parallel rank
forward_ms                by step and microbatch: what Megatron's forward_step took on the device;
                          a later stage's wait for its input is not in it
attention_s               by step and microbatch, predicted seconds of the plan's forward and
                          backward of one layer; on the first worker and stage of each pool, null on
                          the others

CUDA events are recorded, and read when training is over; on a CPU the host's clock is taken.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench_prediction import add_cost_model, cost_model_of, pool_seconds

from megatron_libra import PoolPlan
from megatron_libra.integration.launch import prepare
from megatron_libra.simulator.cost_model import CostModel

Mark = Any
"""A CUDA event, or seconds."""


class Forwards:
    """Stands in for Megatron's forward_step of one microbatch; keeps when it began and ended."""

    def __init__(self, forward_step: Callable[..., Any], *, on_gpu: bool) -> None:
        self.forward_step, self.on_gpu = forward_step, on_gpu
        self.place: dict[str, int] = {}
        self.marks: list[list[tuple[Mark, Mark]]] = []
        """By step and microbatch."""
        self.plans: list[list[PoolPlan]] = []
        """The same, where this rank predicts."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.place = self.place or place()
        if kwargs["current_microbatch"] == 0:
            self.marks.append([])
            self.plans.append([])
        begin = self.mark()
        result = self.forward_step(*args, **kwargs)
        self.marks[-1].append((begin, self.mark()))
        return result

    def keep(self, plan: PoolPlan) -> None:
        """The plan of the forward that runs."""
        if not any((self.place["stage"], self.place["context"])) and (
            self.place["replica"] % plan.config.pool_size == 0
        ):
            self.plans[-1].append(plan)

    def mark(self) -> Mark:
        """Now, on the device; nothing waits."""
        if not self.on_gpu:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def record(self, model: CostModel) -> dict[str, Any]:
        """What is written; waits for the device."""
        if self.on_gpu:
            import torch

            torch.cuda.synchronize()
        predicts = any(self.plans)
        seconds = [[pool_seconds(plan, model) for plan in step] for step in self.plans]
        return {
            **self.place,
            "forward_ms": [[self.between(*marks) for marks in step] for step in self.marks],
            "attention_s": seconds if predicts else None,
        }

    def between(self, begin: Mark, end: Mark) -> float:
        """Milliseconds."""
        return float(begin.elapsed_time(end) if self.on_gpu else (end - begin) * 1e3)


def place() -> dict[str, int]:
    """Where this rank is, while Megatron's groups exist."""
    from megatron.core import parallel_state

    return {
        "stage": parallel_state.get_pipeline_model_parallel_rank(),
        "replica": parallel_state.get_data_parallel_rank(),
        "context": parallel_state.get_context_parallel_rank(),
    }


def watch() -> Forwards:
    """Put a clock into Megatron, and an ear into libra's log of plans."""
    from megatron.core.pipeline_parallel import schedules

    from megatron_libra.integration import cpu
    from megatron_libra.integration.telemetry import Telemetry

    forwards = Forwards(schedules.forward_step, on_gpu=not cpu.installed())
    observe = Telemetry.observe

    def observe_and_keep(telemetry: Telemetry, planned: Any) -> None:
        forwards.keep(planned.plan)
        observe(telemetry, planned)

    schedules.forward_step = forwards
    Telemetry.observe = observe_and_keep
    return forwards


def main() -> None:
    """Train, then write."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False, add_help=False)
    parser.add_argument("--forwards", type=Path, required=True, help="folder")
    add_cost_model(parser)
    args, sys.argv[1:] = parser.parse_known_args()
    model = cost_model_of(args, parser)
    prepare()
    forwards = watch()
    runpy.run_path(str(Path(__file__).parents[1] / "pretrain_gpt.py"), run_name="__main__")
    file = args.forwards / f"forwards-{os.environ['RANK']}.json"
    file.write_text(json.dumps(forwards.record(model)))


if __name__ == "__main__":
    main()
