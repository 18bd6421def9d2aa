"""The GPTs that are trained. In: a name. Out: a model, its flags, parameters and FLOPs.

small   most of its work is attention
dense   1.07 billion parameters
moe     1.41 billion, of which a token uses 0.58: 8 experts, 2 of them for a token. Megatron's
        alltoall dispatcher and SequentialMLP, no expert parallelism: no Transformer Engine, grouped
        GEMM or network package is needed. No auxiliary loss: it is of a microbatch, so its value
        would depend on the order of the samples.

dense and moe recompute every layer (--recompute-granularity full), so that a pack of 131,072 tokens
fits a GPU of 139 GiB. Estimated, not measured, in GiB at DP 1 (8 KiB a token are 1 GiB a pack):

    weights, float32 gradients, Adam     18 B a parameter           dense 18    moe 24
    inputs of all layers                 4 KiB a token and layer          10         8
    one layer again, KiB a token:                                         14        17
      attention   norm 4, QKV 10, with RoPE 9, O 8, projection 4, sum 4: 39
      what libra receives of others and keeps for backward, at most Q 8, KV 2, O 8: 18
      MLP         norm 4, FC1 22, SiLU 11, product 11, FC2 4, sum 4: 56
      or experts  norm 4, tokens twice 8, FC1 11, SiLU, product and weighted 17, FC2 and joined 16,
                  sorted back 16, sums 8: 80
    gradients of that, at most as much                                    14        17
    outside torch's allocator: context, NCCL, mailboxes                    7         7
    sum                                                                   63        73
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from megatron_libra import AttentionShape

__all__ = ["MODELS", "VOCAB_SIZE", "Model"]

VOCAB_SIZE = 257
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"
EXPERTS = "--moe-router-load-balancing-type none --moe-token-dispatcher-type alltoall"


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A GPT with RMSNorm, SwiGLU and grouped queries."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    """Of the MLP, or of each expert."""
    query_heads: int
    kv_heads: int
    head_dim: int
    num_experts: int = 0
    """0: an MLP."""
    experts_per_token: int = 0
    recompute: bool = False
    """Backward computes the forward of every layer again."""

    @property
    def flags(self) -> list[str]:
        """Megatron's flags."""
        sizes = {
            "num-layers": self.num_layers,
            "hidden-size": self.hidden_size,
            "ffn-hidden-size": self.ffn_size,
            "num-attention-heads": self.query_heads,
            "num-query-groups": self.kv_heads,
            "kv-channels": self.head_dim,
        }
        words = RECOMPUTE if self.recompute else ""
        if self.num_experts:
            sizes |= {
                "num-experts": self.num_experts,
                "moe-ffn-hidden-size": self.ffn_size,
                "moe-router-topk": self.experts_per_token,
            }
            words += f" {EXPERTS}"
        return [*(f"--{name}={value}" for name, value in sizes.items()), *shlex.split(words)]

    @property
    def tiny(self) -> Model:
        """For dry runs: the same kind of model."""
        sizes = {"num_layers": 2, "hidden_size": 64, "ffn_size": 128}
        heads = {"query_heads": 4, "kv_heads": 2, "head_dim": 16}
        return replace(self, **sizes, **heads, num_experts=min(4, self.num_experts))

    @property
    def shape(self) -> AttentionShape:
        """Heads of one layer."""
        return AttentionShape(
            query_heads=self.query_heads, kv_heads=self.kv_heads, head_dim=self.head_dim
        )

    @property
    def num_parameters(self) -> int:
        """Of all experts, without norms."""
        matrices = self._layer_parameters(max(1, self.num_experts))
        return self.num_layers * matrices + 2 * self.hidden_size * VOCAB_SIZE

    def _layer_parameters(self, num_mlps: int) -> int:
        heads = 2 * (self.query_heads + self.kv_heads) * self.head_dim
        return self.hidden_size * (heads + 3 * self.ffn_size * num_mlps + self.num_experts)

    @property
    def num_forwards(self) -> int:
        """Of every layer in a step."""
        return 2 if self.recompute else 1

    @property
    def dense_flops(self) -> int:
        """Of one token, all matrix products but attention's: 2 for a parameter in each forward of a
        layer, 4 in backward. Experts that a token does not use do not count; the output layer is
        not recomputed."""
        layer = self._layer_parameters(self.experts_per_token if self.num_experts else 1)
        layers = (2 * self.num_forwards + 4) * self.num_layers * layer
        return layers + 6 * self.hidden_size * VOCAB_SIZE

    @property
    def attention_flops(self) -> int:
        """Of one causal pair, each forward (4 d h) and backward (2.5 times that), all layers."""
        return (4 * self.num_forwards + 10) * self.head_dim * self.query_heads * self.num_layers


HEADS = {"query_heads": 32, "kv_heads": 4, "head_dim": 128}
MODELS = {
    "small": Model(num_layers=8, hidden_size=1024, ffn_size=2816, **HEADS),
    "dense": Model(num_layers=20, hidden_size=2048, ffn_size=5632, recompute=True, **HEADS),
    "moe": Model(
        num_layers=16, hidden_size=2048, ffn_size=1408, num_experts=8, experts_per_token=2,
        recompute=True, **HEADS,
    ),
}  # fmt: skip
"""By --model."""
