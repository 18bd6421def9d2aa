"""Give Megatron's own packed path a core attention that runs on CPU."""

from __future__ import annotations

from typing import Any


def dense_reference() -> None:
    """Put DenseAttention into the default layer spec of this process (implementation megatron)."""
    from megatron.training.models import gpt

    from megatron_libra.integration import layer_spec
    from tests.integration.dense_attention import DenseAttention

    default = gpt.default_layer_spec

    def with_dense_attention(config: Any, vp_stage: int | None) -> Any:
        spec = default(config, vp_stage)
        for layer in layer_spec.layers_of(spec):
            layer.submodules.self_attention.submodules.core_attention = DenseAttention
        return spec

    gpt.default_layer_spec = with_dense_attention
