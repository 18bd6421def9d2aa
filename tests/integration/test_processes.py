"""A number of processes that does not fit the sizes of a run: a line, before Megatron's assertion.

On plain namespaces; test_launcher.py has the real command."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_libra.integration.errors import RunError
from megatron_libra.integration.processes import check_processes
from megatron_libra.integration.rules import RULES

FINE: dict[str, Any] = {
    "context_parallel_impl": "libra",
    "libra_pool_size": 2,
    "world_size": 12,
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 1,
    "context_parallel_size": 3,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "global_batch_size": 8,
    "eval_global_batch_size": None,
    "step_batch_size_schedule": None,
    "seq_length": 256,
    "num_distributed_optimizer_instances": 1,
    "tensor_parallel_num_weight_shards": None,
    "decrease_batch_size_if_needed": False,
    "use_checkpoint_args": False,
    "use_mp_args_from_checkpoint_args": False,
    "yaml_cfg": None,
}
FLAGS = "--tensor-model-parallel-size, --pipeline-model-parallel-size or --context-parallel-size"
EXPERTS = "--expert-model-parallel-size or --expert-tensor-parallel-size"


def namespace(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**FINE, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"world_size": 6},
        {"global_batch_size": None},
        {"expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
        {"world_size": 8, "context_parallel_impl": "megatron"},  # Megatron's own to refuse
        # these sizes are not final
        {"world_size": 8, "use_mp_args_from_checkpoint_args": True, "use_checkpoint_args": True},
        {"world_size": 8, "yaml_cfg": "run.yaml"},
        {"libra_pool_size": 3},  # refusals.py tells it together with all other rules
        {"global_batch_size": None, "step_batch_size_schedule": "0:4 10K:8, 1M:16"},
        {"tensor_parallel_num_weight_shards": 2},  # one for each tensor-parallel rank
        {"num_distributed_optimizer_instances": 6},  # of DP 2 x CP 3
    ],
)
def test_a_fine_number_passes(changes: dict[str, Any]) -> None:
    check_processes(namespace(**changes))


def test_a_setting_that_this_megatron_does_not_have_is_no_fault() -> None:
    args = namespace()
    del args.eval_global_batch_size, args.expert_tensor_parallel_size, args.yaml_cfg
    del args.step_batch_size_schedule, args.num_distributed_optimizer_instances
    del args.tensor_parallel_num_weight_shards, args.use_checkpoint_args
    check_processes(args)


@pytest.mark.parametrize(
    ("changes", "lines"),
    [
        (
            {"world_size": 8},
            [
                "8 processes are not a multiple of TP 2 x PP 1 x CP 3 = 6; start 6 or 12, or "
                f"change {FLAGS}."
            ],
        ),
        (
            {"world_size": 1},
            [f"1 process is not a multiple of TP 2 x PP 1 x CP 3 = 6; start 6, or change {FLAGS}."],
        ),
        (
            {"expert_model_parallel_size": 4},
            [
                "12 processes are not a multiple of PP 1 x EP 4 x expert TP 2 = 8; start 24, or "
                f"change {EXPERTS}."
            ],
        ),
        (
            {"world_size": 8, "expert_model_parallel_size": 5, "expert_tensor_parallel_size": 1},
            [
                "8 processes are not a multiple of TP 2 x PP 1 x CP 3 = 6; start 30, or change "
                f"{FLAGS}.",
                "8 processes are not a multiple of PP 1 x EP 5 x expert TP 1 = 5; start 30, or "
                f"change {EXPERTS}.",
            ],
        ),
        (
            {"context_parallel_size": 0, "pipeline_model_parallel_size": -1},
            [
                "--pipeline-model-parallel-size (-1) must be at least 1; try 1.",
                "--context-parallel-size (0) must be at least 1; try 1.",
            ],
        ),
        (
            {"world_size": 18},
            [
                "--global-batch-size (8) must be a multiple of the data-parallel size (3, of 18 "
                "processes); try 6 or 9.",
                "--libra-pool-size (2) must divide the data-parallel size (3); try one of [1, 3].",
            ],
        ),
        (
            {"world_size": 18, "global_batch_size": 2, "context_parallel_impl": "ulysses"},
            [
                "--global-batch-size (2) must be a multiple of the data-parallel size (3, of 18 "
                "processes); try 3."
            ],
        ),
        (
            {"world_size": 18, "eval_global_batch_size": 6, "libra_pool_size": 0},
            [
                "--global-batch-size (8) must be a multiple of the data-parallel size (3, of 18 "
                "processes); try 6 or 9."
            ],
        ),
        (
            {"eval_global_batch_size": 5},
            [
                "--eval-global-batch-size (5) must be a multiple of the data-parallel size (2, of "
                "12 processes); try 4 or 6."
            ],
        ),
        (
            # Megatron takes sizes from a checkpoint only where --use-checkpoint-args is given
            {"world_size": 8, "use_mp_args_from_checkpoint_args": True},
            [
                "8 processes are not a multiple of TP 2 x PP 1 x CP 3 = 6; start 6 or 12, or "
                f"change {FLAGS}."
            ],
        ),
        (
            {"global_batch_size": None, "step_batch_size_schedule": "0:4 2048:3, 1K:5 8K:3"},
            [
                "--step-batch-size-schedule (size 5) must be a multiple of the data-parallel size "
                "(2, of 12 processes); try 4 or 6.",
                "--step-batch-size-schedule (size 3) must be a multiple of the data-parallel size "
                "(2, of 12 processes); try 2 or 4.",
            ],
        ),
        (
            {"global_batch_size": 8, "step_batch_size_schedule": "0:4 2048:8"},
            ["--step-batch-size-schedule replaces --global-batch-size (8); give one of them."],
        ),
        (
            {"global_batch_size": None, "step_batch_size_schedule": "0:4 2048=8"},
            [
                "--step-batch-size-schedule: batch size schedule entry '2048=8' must be "
                "THRESHOLD:GBS with numbers; try 250B:1536."
            ],
        ),
        (
            {"global_batch_size": None, "step_batch_size_schedule": "0:4 2048:-2"},
            [
                "--step-batch-size-schedule: batch sizes (4, -2) must be at least 1 and one for "
                "each threshold (0, 8); try 0:64 100000:128."
            ],
        ),
        (
            {"num_distributed_optimizer_instances": 4},
            [
                "--num-distributed-optimizer-instances (4) must divide DP x CP (6) and the data-"
                "parallel size of experts (6); try one of [1, 2, 3, 6]."
            ],
        ),
        (
            {
                "expert_model_parallel_size": 3,
                "num_distributed_optimizer_instances": 3,  # 12 / (EP 3 x expert TP 2) = 2
            },
            [
                "--num-distributed-optimizer-instances (3) must divide DP x CP (6) and the data-"
                "parallel size of experts (2); try one of [1, 2]."
            ],
        ),
        (
            {"num_distributed_optimizer_instances": 0},
            [
                "--num-distributed-optimizer-instances (0) must divide DP x CP (6) and the data-"
                "parallel size of experts (6); try one of [1, 2, 3, 6]."
            ],
        ),
    ],
)
def test_refused_with_a_way_out(changes: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(RunError) as fault:
        check_processes(namespace(**changes))
    assert str(fault.value).splitlines() == lines


@pytest.mark.parametrize("flag", ["--global-batch-size", "--eval-global-batch-size"])
@pytest.mark.parametrize("size", [0, -2, -3, -4])
@pytest.mark.parametrize("data_parallel_size", [1, 2, 3])
def test_a_batch_of_no_sample(flag: str, size: int, data_parallel_size: int) -> None:
    """The way out is a positive multiple; libra orders validation samples without evaluation too,
    so --eval-iters 0 does not matter."""
    changes = {
        "global_batch_size": data_parallel_size,
        "libra_pool_size": 1,
        flag[2:].replace("-", "_"): size,
    }
    world_size = 6 * data_parallel_size
    with pytest.raises(RunError) as fault:
        check_processes(namespace(world_size=world_size, eval_iters=0, **changes))
    assert str(fault.value) == (
        f"{flag} ({size}) must be a positive multiple of the data-parallel size "
        f"({data_parallel_size}, of {world_size} processes); try {data_parallel_size}."
    )


def test_one_process_is_one() -> None:
    alone = {"tensor_model_parallel_size": 1, "context_parallel_size": 1, "world_size": 1}
    with pytest.raises(RunError, match=r"data-parallel size \(1, of 1 process\); try 1\."):
        check_processes(namespace(global_batch_size=0, libra_pool_size=1, **alone))


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"tensor_parallel_num_weight_shards": 4, "global_batch_size": 1}, "weight_remat"),
        ({"tensor_parallel_num_weight_shards": 4}, "weight_remat"),  # 4 shards of TP 2: DP is 1
        ({"tensor_parallel_num_weight_shards": 1}, "weight_remat"),  # fewer than TP
        (
            {"decrease_batch_size_if_needed": True, "global_batch_size": 5},
            "decrease_batch_size_if_needed",
        ),
    ],
)
def test_a_refused_flag_that_changes_what_a_batch_must_be_is_told_instead(
    changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(RunError) as fault:
        check_processes(namespace(**changes))
    assert str(fault.value) == next(rule.line for rule in RULES if rule.name == name)


def test_weight_shards_are_refused_with_a_way_out_that_holds_at_every_tp() -> None:
    rule = next(rule for rule in RULES if rule.name == "weight_remat")
    assert rule.line.endswith("drop it.")
