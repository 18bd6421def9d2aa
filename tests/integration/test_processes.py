"""A number of processes that does not fit the sizes of a run: a line, before Megatron's assertion.

On plain namespaces; test_launcher.py has the real command."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from megatron_libra.integration.errors import RunError
from megatron_libra.integration.processes import check_processes

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
        {"world_size": 8, "use_mp_args_from_checkpoint_args": True},  # these sizes are not final
        {"world_size": 8, "yaml_cfg": "run.yaml"},
        {"libra_pool_size": 3},  # refusals.py tells it together with all other rules
    ],
)
def test_a_fine_number_passes(changes: dict[str, Any]) -> None:
    check_processes(namespace(**changes))


def test_a_setting_that_this_megatron_does_not_have_is_no_fault() -> None:
    args = namespace()
    del args.eval_global_batch_size, args.expert_tensor_parallel_size, args.yaml_cfg
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
    ],
)
def test_refused_with_a_way_out(changes: dict[str, Any], lines: list[str]) -> None:
    with pytest.raises(RunError) as fault:
        check_processes(namespace(**changes))
    assert str(fault.value).splitlines() == lines
