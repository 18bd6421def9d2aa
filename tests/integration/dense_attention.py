"""The reference: plain dense attention on Megatron's own packed path at CP = 1. In: thd. Out: the
same.

Megatron's local core attention refuses packed sequences and TransformerEngine's needs a GPU. This
one is softmax(Q K^T) V under the mask that its cu_seqlens mean, and nothing else.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from torch import Tensor


class DenseAttention(MegatronModule):
    """Causal attention inside each sample of q (t, heads, d), k and v (t, kv heads, d)."""

    def __init__(self, config: Any, softmax_scale: float | None = None, **unused: Any) -> None:
        super().__init__(config=config)
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        tokens = torch.arange(query.size(0))
        sample = torch.bucketize(tokens, packed_seq_params.cu_seqlens_q[1:].long(), right=True)
        mask = (sample[:, None] == sample[None]) & (tokens[:, None] >= tokens[None])
        repeat = query.size(1) // key.size(1)
        q, k, v = (
            x.transpose(0, 1)
            for x in (query, key.repeat_interleave(repeat, 1), value.repeat_interleave(repeat, 1))
        )
        out = torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, scale=self.scale
        )
        return out.transpose(0, 1).reshape(query.size(0), -1)
