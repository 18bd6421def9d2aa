"""RoPE by position inside the sample. In: a model's rotary module. Out: one for the local tokens.

Megatron slices one zigzag of the whole sequence, or of every document; neither fits documents of
any length. Its modules compute row i of the table from the number i alone, so the rows of any
positions are one call:

    positions of local tokens   0 1 2 0 1 | 5 6 0   (four samples, a zigzag home)
    get_emb(1, offset=positions)                    the rows of the full table, bit for bit
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from megatron_libra.integration.packed_params import LibraPackedSeqParams

__all__ = ["LocalRotaryEmbedding", "attach"]


class _Length(int):
    """The length that Megatron asks its rotary module for; it carries the positions."""

    positions: Tensor


class LocalRotaryEmbedding(nn.Module):
    """Wraps RotaryEmbedding or YarnRotaryEmbedding; everything else of the wrapped module shows
    through.

    The wrapped module is no submodule, so the state dict is the one of a model without Libra.
    """

    def __init__(self, wrapped: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "wrapped", wrapped)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["wrapped"], name)

    def get_rotary_seq_len(
        self,
        context: Any,
        block: Any,
        inputs: Any,
        config: Any,
        packed_seq_params: Any = None,
        **rest: Any,
    ) -> int:
        """The length of the table; it remembers whose positions will be asked for."""
        if not isinstance(packed_seq_params, LibraPackedSeqParams):
            return self.wrapped.get_rotary_seq_len(
                context, block, inputs, config, packed_seq_params, **rest
            )
        length = _Length(packed_seq_params.max_seqlen_q)
        length.positions = packed_seq_params.positions
        return length

    def forward(self, length: int, *args: Any, **kwargs: Any) -> Any:
        """(T_local, 1, 1, d) float32 angles; with YaRN the pair of them and its scale."""
        if not isinstance(length, _Length):
            return self.wrapped(length, *args, **kwargs)
        with torch.no_grad():
            return self.wrapped.get_emb(1, length.positions)


def attach(model: nn.Module) -> None:
    """Wrap the rotary module of one model chunk, if it has one."""
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None and not isinstance(rotary, LocalRotaryEmbedding):
        model.rotary_pos_emb = LocalRotaryEmbedding(rotary)
