"""Put LibraAttention into a layer spec. In: the spec that a config would use. Out: one with ours.

Whatever the default builder makes is kept (TransformerEngine or local layers, dense or MoE blocks).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from megatron.core.transformer.spec_utils import ModuleSpec

from megatron_libra.integration.core_attention import LibraAttention

__all__ = ["layers_of", "replace_core_attention", "wrap_spec"]


def wrap_spec(spec: Any) -> Callable[..., Any]:
    """A callable spec for `GPTModelConfig.transformer_layer_spec`.

    Args:
        spec: what that field held: None (the default builder), a spec, or a callable that makes
        one.
    """

    def libra_layer_spec(model_config: Any, vp_stage: int | None = None) -> Any:
        return replace_core_attention(_resolve(spec, model_config, vp_stage))

    return libra_layer_spec


def _resolve(spec: Any, model_config: Any, vp_stage: int | None) -> Any:
    if spec is None:
        from megatron.training.models.gpt import default_layer_spec

        return default_layer_spec(model_config, vp_stage)
    if callable(spec) and not isinstance(spec, ModuleSpec):
        takes_stage = "vp_stage" in inspect.signature(spec).parameters
        return spec(model_config, vp_stage=vp_stage) if takes_stage else spec(model_config)
    return spec


def layers_of(spec: Any) -> list[Any]:
    """The layer specs of a layer spec (itself) or of a block spec."""
    return list(getattr(spec, "layer_specs", [spec]))


def replace_core_attention(spec: Any) -> Any:
    """Set the core attention of a layer spec, or of each layer of a block spec, in place.

    Raises:
        ValueError: a layer has no self attention with a core attention (MLA's has another
        interface).
    """
    for layer in layers_of(spec):
        attention = getattr(layer.submodules, "self_attention", None)
        submodules = getattr(attention, "submodules", None)
        if not hasattr(submodules, "core_attention"):
            raise ValueError(
                f"self_attention ({attention}) of a layer spec has no core attention to replace; "
                "libra needs GPT layers with Megatron's SelfAttention."
            )
        submodules.core_attention = LibraAttention
    return spec
