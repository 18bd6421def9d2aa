"""Every refusal: its line by a namespace, then Megatron's own parser for the flags that set it
off."""

from __future__ import annotations

import argparse
from enum import Enum
from typing import Any

import pytest

from megatron_libra.integration.errors import RunError
from megatron_libra.integration.refusals import check
from megatron_libra.integration.rules import RULES
from tests.integration.layouts import Layout
from tests.integration.parsing import parse_all


class Choice(Enum):
    """Stands for Megatron's enums."""

    local = 4
    learnable = 2


FINE: dict[str, Any] = {
    "context_parallel_impl": "libra",
    "tensor_model_parallel_size": 1,
    "context_parallel_size": 2,
    "data_parallel_size": 4,
    "num_attention_heads": 8,
    "group_query_attention": True,
    "num_query_groups": 2,
    "kv_channels": 16,
    "params_dtype": argparse.Namespace(itemsize=2),
    "seq_length": 256,
    "micro_batch_size": 1,
    "eval_micro_batch_size": 1,
    "calculate_per_token_loss": True,
    "dataloader_inter_document_masking": True,
    "dataloader_type": "single",
    "attention_dropout": 0.0,
    "softmax_type": "vanilla",
    "position_embedding_type": "rope",
    "libra_pool_size": 2,
    "libra_block_size": 64,
    "libra_head_split": 1,
    "libra_chunks": 2,
    "libra_load_slack": 0.01,
    "libra_token_pairs": 0,
    "libra_transport": "auto",
    "libra_placer": "home_first",
    "libra_kv_fetch": "prefix",
    "libra_layout": "zigzag",
    "libra_vrsp_scope": "auto",
    "libra_backward_kv": "save",
    "libra_kernel": "auto",
    "libra_deterministic": False,
    "libra_plan_ahead": 2,
    "libra_plan_timeout_s": 300.0,
    "libra_log_file": None,
    "rank": 7,
    "world_size": 8,
}

BROKEN: dict[str, dict[str, Any]] = {
    "multi_latent_attention": {"multi_latent_attention": True},
    "attention_backend": {"attention_backend": Choice.local},
    "mtp_num_layers": {"mtp_num_layers": 1},
    "softmax_type": {"softmax_type": Choice.learnable},
    "qk_clip": {"qk_clip": True},
    "log_max_attention_logit": {"log_max_attention_logit": True},
    "window_size": {"window_size": (128, 0)},
    "attention_dropout": {"attention_dropout": 0.1},
    "experimental_attention_variant": {"experimental_attention_variant": "dsa"},
    "use_kitchen_attention": {"use_kitchen_attention": True},
    "hybrid_model": {"hybrid_layer_pattern": "M*M*"},
    "heterogeneous_layers": {"heterogeneous_layers_config_path": "layers.json"},
    "position_embedding_type": {"position_embedding_type": "mrope"},
    "cuda_graphs": {"cuda_graph_impl": "local"},
    "overlap_moe_expert_parallel_comm": {"overlap_moe_expert_parallel_comm": True},
    "hybrid_context_parallel": {"hybrid_context_parallel": True},
    "fp8_attention": {"fp8_dot_product_attention": True},
    "batch_invariant_mode": {"batch_invariant_mode": True},
    "offload_modules": {
        "fine_grained_activation_offloading": True,
        "offload_modules": ["core_attn"],
    },
    "weight_remat": {"gtp_weight_remat_size": 2},
    "perform_rl_step": {"perform_rl_step": True},
    "micro_batch_size": {"micro_batch_size": 2},
    "calculate_per_token_loss": {"calculate_per_token_loss": False},
    "packed_data": {"dataloader_inter_document_masking": False},
    "dataloader_type": {"dataloader_type": "cyclic"},
    "full_validation": {"full_validation": True},
    "iterations_to_skip": {"iterations_to_skip": [3]},
    "decrease_batch_size_if_needed": {"decrease_batch_size_if_needed": True},
    "phase_transition_iterations": {
        "phase_transition_iterations": [4],
        "step_batch_size_schedule": "0:4 64:8",
    },
    "fim_data": {"fim_data": True},
}

RELATED: dict[str, dict[str, Any]] = {
    "--libra-pool-size (3) must divide the data-parallel size (4); try one of [1, 2, 4].": {
        "libra_pool_size": 3
    },
    "head_split (3) must divide query_heads (8); try one of [1, 2, 4, 8].": {"libra_head_split": 3},
    "chunks (3) must divide query_heads / head_split (8); try one of [1, 2, 4, 8].": {
        "libra_chunks": 3
    },
    "seq_length (254) must be a multiple of 2 * context_parallel_size (4) for layout zigzag; "
    "try 256.": {"seq_length": 254},
    "load_slack (2.0) must be in [0, 1); try 0.01.": {"libra_load_slack": 2.0},
    "--libra-log-file /dev/null/a.jsonl: Not a directory; give a file in a folder that the last "
    "rank can write.": {"libra_log_file": "/dev/null/a.jsonl"},
    "context_parallel_size (16) must divide the 8 query heads of a tensor-parallel rank for "
    "ulysses; "
    "use --context-parallel-impl libra --libra-placer home.": {
        "context_parallel_impl": "ulysses",
        "context_parallel_size": 16,
    },
}


def namespace(**changes: Any) -> argparse.Namespace:
    return argparse.Namespace(**{**FINE, **changes})


def lines_of(args: argparse.Namespace, transformer: Any = None) -> list[str]:
    with pytest.raises(RunError) as fault:
        check(args, transformer)
    return str(fault.value).splitlines()


def test_a_fine_run_passes() -> None:
    check(namespace())
    check(namespace(context_parallel_size=1, calculate_per_token_loss=False))
    check(namespace(context_parallel_impl="ulysses", libra_pool_size=3))
    check(namespace(libra_log_file="/dev/null/a.jsonl", rank=0))  # only the last rank writes it
    check(namespace(phase_transition_iterations=[4]))
    check(namespace(step_batch_size_schedule="0:4 64:8"))
    check(namespace(tensor_parallel_num_weight_shards=1))


def test_every_rule_has_a_case() -> None:
    assert BROKEN.keys() == {rule.name for rule in RULES}


@pytest.mark.parametrize("name", BROKEN)
def test_refused_with_one_line(name: str) -> None:
    (line,) = lines_of(namespace(**BROKEN[name]))
    rule = next(rule for rule in RULES if rule.name == name)
    assert line.split("{")[0].startswith(rule.line.split("{")[0])
    assert "{" not in line and line.endswith((".", ")."))


@pytest.mark.parametrize("line", RELATED)
def test_relations_name_values_and_a_way_out(line: str) -> None:
    assert lines_of(namespace(**RELATED[line])) == [line]


def test_all_faults_are_told_at_once() -> None:
    lines = lines_of(namespace(attention_dropout=0.1, libra_pool_size=3, fim_data=True))
    assert len(lines) == 3


def test_a_script_s_own_transformer_config_counts() -> None:
    (line,) = lines_of(namespace(), argparse.Namespace(window_size=(64, 0)))
    assert "--window-size (64, 0)" in line


FLAGS = {
    "mtp_num_layers": "--mtp-num-layers 1",
    "softmax_type": "--softmax-type learnable",
    "use_kitchen_attention": "--use-kitchen-attention",
    "full_validation": "--full-validation",
    "experimental_attention_variant": "--experimental-attention-variant dsa",
    "batch_invariant_mode": "--batch-invariant-mode",
    "cuda_graphs": "--cuda-graph-impl local",
    "window_size": "--window-size 64,0",
    "attention_dropout": "--attention-dropout 0.1",
    "micro_batch_size": "--micro-batch-size 2",
    "dataloader_type": "--dataloader-type cyclic",
    "iterations_to_skip": "--iterations-to-skip 3",
    "fim_data": "--fim-data",
}


def test_megatron_s_flags_set_the_rules_off() -> None:
    """The names above are those that Megatron's parser uses."""
    layout = Layout(dp=2, cp=2, pool=2)
    fine = layout.command_line("corpus")
    commands = [(4, {}, fine)]
    commands += [(4, {}, [*fine, *flags.split()]) for flags in FLAGS.values()]
    unpacked = [word for word in fine if word != "--dataloader-inter-document-masking"]
    commands.append((4, {}, unpacked))
    answers = parse_all(commands)

    assert isinstance(answers[0], argparse.Namespace), answers[0]
    for name, answer in zip([*FLAGS, "packed_data"], answers[1:], strict=True):
        rule = next(rule for rule in RULES if rule.name == name)
        assert isinstance(answer, list), (name, answer)
        assert any(line.startswith(rule.line.split("{")[0]) for line in answer), (name, answer)
