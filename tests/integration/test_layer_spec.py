"""The core attention of any default spec is replaced, all else is kept; the loss function is
found."""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import pytest

from tests.integration.harness import call


def layers(num_experts: int | None) -> list[tuple[str, str, bool]]:
    """(core attention, self attention, everything else as before) of each layer."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.transformer import TransformerConfig

    from megatron_libra.integration.layer_spec import layers_of, wrap_spec

    def make() -> Any:
        if num_experts is None:
            return get_gpt_layer_local_spec()
        config = TransformerConfig(
            num_layers=3, hidden_size=16, num_attention_heads=2, num_moe_experts=num_experts
        )
        return get_gpt_decoder_block_spec(config, use_transformer_engine=False, pp_rank=0)

    plain, ours = layers_of(make()), layers_of(wrap_spec(lambda config: make())(None))
    names = [layer.submodules.self_attention.submodules.core_attention.__name__ for layer in ours]
    for before, after in zip(plain, ours, strict=True):  # MoE blocks share layers among them
        attention = after.submodules.self_attention.submodules
        attention.core_attention = before.submodules.self_attention.submodules.core_attention
    return [
        (name, after.submodules.self_attention.module.__name__, str(after) == str(before))
        for name, before, after in zip(names, plain, ours, strict=True)
    ]


@pytest.mark.parametrize("num_experts", [None, 4])
def test_only_the_core_attention_changes(num_experts: int | None) -> None:
    found = call(layers, num_experts)
    assert found and set(found) == {("LibraAttention", "SelfAttention", True)}


def specs() -> list[str]:
    """How each kind of `transformer_layer_spec` is resolved."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_libra.integration.layer_spec import wrap_spec

    def with_stage(config: Any, vp_stage: int | None) -> Any:
        assert (config, vp_stage) == ("config", 3)
        return get_gpt_layer_local_spec()

    kinds = [get_gpt_layer_local_spec(), with_stage, lambda config: get_gpt_layer_local_spec()]
    names = [
        wrap_spec(kind)("config", vp_stage=3).submodules.self_attention.submodules.core_attention
        for kind in kinds
    ]
    with pytest.raises(ValueError, match="no core attention to replace"):
        wrap_spec(lambda config: SimpleNamespace(submodules=SimpleNamespace()))("config")
    return [name.__name__ for name in names]


def test_every_kind_of_spec_is_resolved() -> None:
    assert call(specs) == ["LibraAttention"] * 3


def loss_func(mask: Any, output: Any, model: Any = None) -> None:
    """Found by the name in this module."""


def forward_step(iterator: Any, model: Any) -> None:
    """A script's."""


def find_loss(kind: str) -> str:
    from megatron_libra.integration.errors import RunError
    from megatron_libra.integration.forward_step import loss_function_of

    if kind == "partial":
        return loss_function_of(functools.partial(forward_step, model=None)).__name__
    if kind == "wrapped":
        return loss_function_of(functools.wraps(forward_step)(lambda *a: None)).__name__
    with pytest.raises(RunError) as error:
        loss_function_of(functools.lru_cache)
    return str(error.value)


def test_the_script_s_loss_function_is_kept() -> None:
    assert call(find_loss, "partial") == call(find_loss, "wrapped") == "loss_func"
    assert "define it beside the forward step" in call(find_loss, "none")


def refused_begin() -> tuple[bool, list[Any], Any]:
    """What is left of a run whose script has no loss function."""
    from megatron_libra.integration import hooks, state
    from megatron_libra.integration.errors import RunError

    hooks.get_args = lambda: SimpleNamespace(context_parallel_impl="libra")
    hooks.refusals = hooks.connections = SimpleNamespace(
        check=lambda *others: None, report=lambda *others: None
    )
    hooks.Session = lambda args: SimpleNamespace(connect=None, telemetry=SimpleNamespace(observe=0))
    model = SimpleNamespace(transformer=None, transformer_layer_spec=None, pre_wrap_hooks=[])
    with pytest.raises(RunError, match="define it beside the forward step"):
        hooks.begin(SimpleNamespace(model=model), functools.lru_cache)
    return state.get() is None, model.pre_wrap_hooks, model.transformer_layer_spec


def test_a_run_that_is_refused_leaves_nothing_behind() -> None:
    assert call(refused_begin) == (True, [], None)


def attention_without_libra_params() -> str:
    import torch
    from megatron.core.packed_seq_params import PackedSeqParams
    from megatron.core.transformer import TransformerConfig

    from megatron_libra.integration.core_attention import LibraAttention

    config = TransformerConfig(num_layers=1, hidden_size=16, num_attention_heads=2)
    attention = LibraAttention(config, 1, None, "self")
    assert not list(attention.parameters()) and not attention.state_dict()
    q = torch.zeros(4, 1, 2, 8)
    with pytest.raises(TypeError) as error:
        attention(q, q, q, None, packed_seq_params=PackedSeqParams(qkv_format="thd"))
    with pytest.raises(ValueError, match="must be self"):
        LibraAttention(config, 1, None, "cross")
    return str(error.value)


def test_a_forward_step_that_was_not_replaced_is_named() -> None:
    assert "forward step was not replaced" in call(attention_without_libra_params)
