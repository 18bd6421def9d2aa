"""Attention kernels behind one small interface; `pick_kernel` chooses, never silently.

In: query and key/value rows of one head chunk and one round. Out: output rows, log-sum-exp,
gradients.
"""

from megatron_libra.executor.kernels.interface import AttentionKernel, BoundRound, bind_round
from megatron_libra.executor.kernels.pick import pick_kernel

__all__ = ["AttentionKernel", "BoundRound", "bind_round", "pick_kernel"]
