"""Give the device its work queues back. In: a validated namespace. Out: the environment.

Before Blackwell, Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 with context or tensor parallelism
(validate_args): one work queue keeps kernels in the order of their launch. Its tensor-parallel
linear layers count on that, to start a collective before a matrix product
(core/tensor_parallel/layers.py); with TP = 1 nothing of Megatron does. But a transfer of NCCL then
starts only when all attention launched before it has, so none of it is hidden.

    validate_args   asserts it and asks for device properties, which makes no CUDA context
    begin           lift: unset, which means the driver's 8 queues
    initialize      torch.cuda.set_device makes the context, and with it the queues
"""

from __future__ import annotations

import argparse
import os

import torch

from megatron_libra.integration.arguments import config_from_args

__all__ = ["lift"]

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


def lift(args: argparse.Namespace) -> str | None:
    """Unset CUDA_DEVICE_MAX_CONNECTIONS=1 where only Megatron's check wants it. Every rank, after
    that check and before a CUDA context exists. Other values are the user's, and stay.

    Returns:
        A line for the log; None if there is nothing to say.
    """
    if os.environ.get(VARIABLE) != "1" or args.libra_keep_one_queue or not _in_the_way(args):
        return None
    if _has_context():
        return (
            f"> libra: {VARIABLE}=1 stays, so NCCL's transfers wait for attention: a CUDA context "
            "was made before pretrain(); make none, or unset it where Megatron does not check"
        )
    del os.environ[VARIABLE]
    return (
        f"> libra: {VARIABLE}=1 is lifted: without tensor parallelism only Megatron's check wants "
        "it, and it keeps NCCL's transfers behind attention (--libra-keep-one-queue leaves it)"
    )


def _in_the_way(args: argparse.Namespace) -> bool:
    """Whether rows may travel by NCCL, which they do between nodes with any transport, while no
    collective of tensor parallelism needs the order.
    """
    num_workers = config_from_args(args).pool_size * args.context_parallel_size
    return not args.libra_cpu and args.tensor_model_parallel_size == 1 and num_workers > 1


def _has_context() -> bool:
    """Whether this process holds a CUDA context, on any device; asking makes none."""
    return any(torch._C._cuda_hasPrimaryContext(i) for i in range(torch.cuda.device_count()))
