"""What a microbatch carries through Megatron's layers. In: a bound plan. Out: packed parameters.

Megatron hands its PackedSeqParams from the model to every core attention, and both kinds of
activation recompute keep the object they were called with. So a plan that rides on it is the
right one in forward, in backward and in recompute under every schedule; a global "current plan"
would not be (1F1B and interleaving run the forward of later microbatches before the backward of
this one).

`qkv_format` is "sbhd", although the sequence is packed: then Megatron applies RoPE element by
element with the frequencies it is given (rope.py gives those of the local tokens) and leaves all
packing to the core attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

__all__ = ["LibraPackedSeqParams"]


@dataclass(eq=False)
class LibraPackedSeqParams(PackedSeqParams):
    """Megatron's parameters and, beside them, this worker's part of the microbatch's plan."""

    bound_plan: Any = None
    """BoundPlan of the microbatch: what this worker sends, computes and returns in every layer."""
    positions: Tensor | None = None
    """(T_local,) int64 on the device: position of each local token inside its own sample."""
