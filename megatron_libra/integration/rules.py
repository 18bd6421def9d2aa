"""The list of what libra refuses. In: nothing. Out: RULES, each with its condition and its line.

Nothing is refused while training runs, and nothing unsupported trains silently: a feature that
libra does not know how to train exactly has a line here.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

__all__ = ["RULES", "Rule", "Settings", "name_of"]


class Settings:
    """What the run is set to: a script's own transformer config, then Megatron's namespace."""

    def __init__(self, args: argparse.Namespace, transformer: Any = None) -> None:
        self._sources = [source for source in (transformer, args) if source is not None]
        self.args = args

    def __getattr__(self, name: str) -> Any:
        """The value; None where this Megatron has no such setting."""
        for source in self._sources:
            value = getattr(source, name, None)
            if value is not None:
                return value
        return None


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of the list."""

    name: str
    """The setting it is about, as the tests name it."""
    applies: Callable[[Settings], Any]
    """Whether the run breaks the rule."""
    line: str
    """What is wrong and the way out; {name} is replaced by the setting's value."""


def name_of(value: Any) -> str:
    return str(getattr(value, "name", value))


def _graphs(s: Settings) -> bool:
    return bool(
        s.enable_cuda_graph
        or s.external_cuda_graph
        or name_of(s.cuda_graph_impl or "none") != "none"
        or s.optimizer_cuda_graph
    )


_LAYERS = (
    Rule(
        "multi_latent_attention",
        lambda s: s.multi_latent_attention,
        "multi-latent attention keeps K and V compressed; libra moves whole heads. "
        "Drop --multi-latent-attention or use --context-parallel-impl megatron.",
    ),
    Rule(
        "attention_backend",
        lambda s: name_of(s.attention_backend) == "local",
        "--attention-backend local replaces the core attention of every layer after libra has; "
        "drop it (--transformer-impl local is fine).",
    ),
    Rule(
        "mtp_num_layers",
        lambda s: s.mtp_num_layers,
        "--mtp-num-layers {mtp_num_layers}: multi-token prediction rolls tokens over a split "
        "that is not "
        "libra's; drop it.",
    ),
    Rule(
        "softmax_type",
        lambda s: name_of(s.softmax_type or "vanilla") != "vanilla",
        "--softmax-type {softmax_type}: libra computes the plain softmax; use vanilla.",
    ),
    Rule(
        "qk_clip",
        lambda s: s.qk_clip,
        "--qk-clip needs the largest logits, which no kernel here returns; drop it.",
    ),
    Rule(
        "log_max_attention_logit",
        lambda s: s.log_max_attention_logit,
        "--log-max-attention-logit: no kernel here returns the logits; drop it.",
    ),
    Rule(
        "window_size",
        lambda s: s.window_size,
        "--window-size {window_size}: libra plans full causal attention inside a sample; drop it.",
    ),
    Rule(
        "attention_dropout",
        lambda s: s.attention_dropout,
        "attention dropout is {attention_dropout}; the kernels have none: add "
        "--attention-dropout 0.",
    ),
    Rule(
        "experimental_attention_variant",
        lambda s: s.experimental_attention_variant,
        "--experimental-attention-variant {experimental_attention_variant}: only softmax "
        "attention; drop it.",
    ),
    Rule(
        "use_kitchen_attention",
        lambda s: s.use_kitchen_attention,
        "--use-kitchen-attention replaces the core attention; drop it.",
    ),
    Rule(
        "hybrid_model",
        lambda s: s.is_hybrid_model or s.hybrid_layer_pattern or s.hybrid_override_pattern,
        "hybrid models have layers that scan whole sequences; libra trains GPT layers only.",
    ),
    Rule(
        "heterogeneous_layers",
        lambda s: s.heterogeneous_layers_config_path or s.heterogeneous_layers_config_encoded_json,
        "heterogeneous layers may differ in heads, and one plan serves all layers; use "
        "uniform layers.",
    ),
    Rule(
        "position_embedding_type",
        lambda s: s.position_embedding_type in ("mrope", "relative"),
        "--position-embedding-type {position_embedding_type}: positions are one number per "
        "token here; "
        "use rope, yarn, learned_absolute or none.",
    ),
)

_EXECUTION = (
    Rule(
        "cuda_graphs",
        _graphs,
        "CUDA graphs replay one microbatch's exchange for all; add --cuda-graph-impl none.",
    ),
    Rule(
        "overlap_moe_expert_parallel_comm",
        lambda s: s.overlap_moe_expert_parallel_comm,
        "--overlap-moe-expert-parallel-comm builds its schedule without packed-sequence "
        "parameters; drop it.",
    ),
    Rule(
        "hybrid_context_parallel",
        lambda s: s.hybrid_context_parallel or s.hierarchical_context_parallel_sizes,
        "hybrid and hierarchical context parallelism split sequences their own way; drop "
        "their flags.",
    ),
    Rule(
        "fp8_attention",
        lambda s: s.fp8_dot_product_attention or s.fp8_multi_head_attention,
        "attention in fp8 is not supported; keep fp8 to the linear layers.",
    ),
    Rule(
        "batch_invariant_mode",
        lambda s: s.batch_invariant_mode,
        "--batch-invariant-mode needs its own attention kernels; drop it.",
    ),
    Rule(
        "offload_modules",
        lambda s: s.fine_grained_activation_offloading and "core_attn" in (s.offload_modules or ()),
        "--offload-modules core_attn: libra manages what its attention saves; leave core_attn out "
        "(--libra-backward-kv refetch saves memory).",
    ),
    Rule(
        "weight_remat",
        # the first is what Megatron's validation makes of the second
        lambda s: (
            (s.gtp_weight_remat_size or 1) > 1
            or s.tensor_parallel_num_weight_shards not in (None, s.tensor_model_parallel_size)
        ),
        "sharded weights (--tensor-parallel-num-weight-shards) add an axis to the rank grid; "
        "drop it.",
    ),
    Rule(
        "perform_rl_step",
        lambda s: s.perform_rl_step,
        "--perform-rl-step makes its own batches; drop it.",
    ),
    Rule(
        "micro_batch_size",
        lambda s: s.micro_batch_size != 1 or (s.eval_micro_batch_size or 1) != 1,
        "micro batch size is {micro_batch_size} (evaluation {eval_micro_batch_size}); a "
        "microbatch is one "
        "packed sequence: use --micro-batch-size 1 and a longer --seq-length.",
    ),
    Rule(
        "calculate_per_token_loss",
        lambda s: s.context_parallel_size > 1 and not s.calculate_per_token_loss,
        "context parallel ranks hold unequal numbers of loss tokens; add "
        "--calculate-per-token-loss.",
    ),
)

_DATA = (
    Rule(
        "packed_data",
        lambda s: not (s.dataloader_inter_document_masking or s.sft),
        "samples are documents inside a packed sequence: add "
        "--dataloader-inter-document-masking (or --sft).",
    ),
    Rule(
        "dataloader_type",
        lambda s: s.dataloader_type not in (None, "single"),
        "--dataloader-type {dataloader_type}: the order of a step must follow from the "
        "consumed samples; "
        "use single.",
    ),
    Rule(
        "full_validation",
        lambda s: s.full_validation or s.multiple_validation_sets,
        "--full-validation and --multiple-validation-sets pad the last batch their own way; "
        "use --eval-iters.",
    ),
    Rule(
        "iterations_to_skip",
        lambda s: s.iterations_to_skip,
        "--iterations-to-skip reads batches without training; restart from a checkpoint past "
        "them instead.",
    ),
    Rule(
        "decrease_batch_size_if_needed",
        lambda s: s.decrease_batch_size_if_needed,
        "--decrease-batch-size-if-needed changes a step's samples at run time; use a "
        "divisible batch size.",
    ),
    Rule(
        "phase_transition_iterations",
        lambda s: s.phase_transition_iterations and s.step_batch_size_schedule,
        "--phase-transition-iterations starts to count consumed samples anew, and "
        "--step-batch-size-schedule does not, so the samples of a step would be unknown; use one "
        "of them.",
    ),
    Rule(
        "fim_data",
        lambda s: s.fim_data,
        "--fim-data rewrites documents, so their lengths are unknown; drop it.",
    ),
)

RULES = _LAYERS + _EXECUTION + _DATA
"""Everything refused by one setting alone; refusals.py adds the rules that relate several."""
