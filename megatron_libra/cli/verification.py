"""Run a plan and compare it with dense attention. In: PoolPlan. Out: Verification, FILE.npz.

torch is loaded here and only here, so that the other commands start fast and without it.
"""

from __future__ import annotations

import enum
import importlib.util
import os
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from megatron_libra.extras import install_hint
from megatron_libra.plan.pool_plan import PoolPlan

if TYPE_CHECKING:
    from megatron_libra.executor.verify import Verification

__all__ = ["Device", "VerificationFailed", "run_verification"]

WORKER_BYTES = 400 * 2**20
"""Memory of a worker process before it holds any tensor."""


class VerificationFailed(RuntimeError):
    """A worker failed or hung; the message has its trace."""


class Device(enum.StrEnum):
    """Where the workers run."""

    cpu = "cpu"
    cuda = "cuda"


def run_verification(plan: PoolPlan, *, device: str, seed: int, dump: Path | None) -> Verification:
    """Run the executor on one local process per worker.

    Raises:
        ValueError: torch is missing, the pool is too large for this machine, the kernel cannot run
            here, or the file cannot be written after all.
        VerificationFailed: a worker failed or did not end in time.
    """
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"libra verify needs torch; {install_hint('megatron')}.")
    _check_memory(plan)
    from megatron_libra.executor import verify
    from megatron_libra.executor.local import WorkerFailed

    _check_kernel(plan, device)
    _check_transport(plan, device)
    try:
        (result,) = verify.verify_plans([plan], device=device, seed=seed)
    except (WorkerFailed, TimeoutError) as error:
        raise VerificationFailed(str(error)) from error
    if dump is not None:
        _write(dump, result)
    return result


def _check_memory(plan: PoolPlan) -> None:
    """Each worker makes the whole pool's tensors, so that all see the same random numbers."""
    shape = plan.shape
    heads = 2 * (shape.query_heads + shape.kv_heads)
    pool_bytes = len(plan.sequences) * plan.seq_length * heads * shape.head_dim * 8
    needed = plan.num_workers * (WORKER_BYTES + 2 * pool_bytes) + 4 * pool_bytes
    present = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > present:
        raise ValueError(
            f"{plan.num_workers} workers with {plan.seq_length} tokens a sequence need about "
            f"{needed / 2**30:.1f} GiB and this machine has {present / 2**30:.1f} GiB; use fewer "
            "workers, or shorter sequences of the same proportions."
        )


def _check_kernel(plan: PoolPlan, device: str) -> None:
    """Ask for the kernel here, where the answer is one line and not the trace of a worker."""
    import torch

    from megatron_libra.executor.kernels import pick_kernel

    if device == "cuda" and not torch.cuda.is_available():
        return  # verify_plans says that there are too few GPUs
    pick_kernel(
        plan.config.kernel,
        device=torch.device(device),
        dtype=torch.bfloat16 if device == "cuda" else torch.float64,
        head_dim=plan.shape.head_dim,
        deterministic=plan.config.deterministic,
    )


def _check_transport(plan: PoolPlan, device: str) -> None:
    wish, others = plan.config.transport, {"cpu": "nccl", "cuda": "gloo"}
    if wish == others[device]:
        raise ValueError(
            f"transport ({wish}) moves no tensors of --device {device}; try auto or symmetric."
        )


def _write(dump: Path, result: Verification) -> None:
    try:
        with dump.open("wb") as file:
            np.savez(file, **result.arrays)
    except OSError as error:
        raise ValueError(
            f"--dump {dump}: {error.strerror}; give a file that can be written."
        ) from None
