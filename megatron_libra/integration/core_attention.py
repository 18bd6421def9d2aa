"""The core attention of every layer. In: a rank's Q, K, V, packed_seq_params. Out: attention rows.

Shapes (T tokens that this rank holds, N query heads, G kv heads, D head dim): Megatron calls with
q_T1ND, k_T1GD, v_T1GD and takes (T, 1, N * D).
"""

from __future__ import annotations

from typing import Any

from megatron.core.transformer.module import MegatronModule
from torch import Tensor

from megatron_libra.executor.attention import libra_attention
from megatron_libra.integration.packed_params import LibraPackedSeqParams

__all__ = ["LibraAttention"]


class LibraAttention(MegatronModule):
    """Attention as the microbatch's plan places it. It has no parameters, so checkpoints do not
    know it.

    Collective: every worker of the pool calls every layer's attention in the same order.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **unused: Any,
    ) -> None:
        super().__init__(config=config)
        if attention_type != "self":
            raise ValueError(f"attention_type ({attention_type}) must be self; libra has no other.")
        self.layer_number = layer_number
        self.softmax_scale = softmax_scale

    def forward(
        self,
        query_T1ND: Tensor,
        key_T1GD: Tensor,
        value_T1GD: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """(T, 1, N * D), causal inside each sample; zero for tokens behind the last sample."""
        if not isinstance(packed_seq_params, LibraPackedSeqParams):
            raise TypeError(
                f"packed_seq_params is {type(packed_seq_params).__name__}, not "
                "LibraPackedSeqParams: this "
                "forward step was not replaced; train through megatron.training.pretrain "
                "after install()."
            )
        out_TND = libra_attention(
            query_T1ND.squeeze(1),
            key_T1GD.squeeze(1),
            value_T1GD.squeeze(1),
            packed_seq_params.bound_plan,
            softmax_scale=self.softmax_scale,
        )
        return out_TND.reshape(out_TND.size(0), 1, -1)
