"""The engine of `libra verify`: run plans on local processes and compare with dense attention.

In: PoolPlans. Out: a Verification for each, with the errors of out, dQ, dK, dV and the arrays. On
the CPU all is float64 with the reference kernel; on CUDA bfloat16 with FlashAttention, against
float64 attention of the same rounded inputs on the first GPU. Kernel and transport are those that
the plans ask for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.dense import dense_attention
from megatron_libra.executor.groups import create_pool_groups
from megatron_libra.executor.inputs import RESULTS, PoolInputs, gather_workers, worker_tensors
from megatron_libra.executor.local import run_workers
from megatron_libra.executor.runtime import pool_runtime
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool

__all__ = ["TOLERANCES", "Verification", "error_of", "verify_plans", "verify_pool"]

TOLERANCES = {"float64": 1e-10, "float32": 1e-4, "bfloat16": 1e-1, "float16": 1e-2}
"""Largest accepted error of a row by dtype; see `error_of`. In half precision dq is the worst: its
softmax term subtracts a number computed from the rounded output."""
WHOLE_FACTOR = 10
"""A whole tensor (Frobenius norm) must be this much closer than its worst row may be."""
SMALL_NORM = 0.1
BACKENDS = {"cpu": "gloo", "cuda": "nccl"}


@dataclass(frozen=True, slots=True, eq=False)
class Verification:
    """One plan's outcome."""

    plan: PoolPlan
    report: dict[str, Any]
    """workers, kernel, transport, device, dtype, seed, tolerance, errors (worst row), relative
    (Frobenius) and max_abs by tensor, max_error, passed, digest; all of it JSON."""
    arrays: dict[str, NDArray[Any]]
    """q, k, v, dout, out, dq, dk, dv as (slot, token, head, dim); float32 for half precision."""

    @property
    def passed(self) -> bool:
        """True if every error is within the tolerance."""
        return bool(self.report["passed"])


def verify_pool(pool: Mapping[str, Any], **options: Any) -> Verification:
    """Verify one pool given as a POOL.json mapping; options and errors as in verify_plans.

    Raises:
        ValueError: the pool breaks a rule; the message names it.
    """
    plan = plan_pool(
        pool["sequences"],
        context_parallel_size=pool["context_parallel_size"],
        shape=AttentionShape(**pool["attention"]),
        config=LibraConfig(**pool["libra"]),
        seq_length=pool.get("seq_length"),
    )
    return verify_plans([plan], **options)[0]


def verify_plans(
    plans: Sequence[PoolPlan],
    *,
    device: str = "cpu",
    dtype: str | None = None,
    seed: int = 0,
    tolerance: float | None = None,
    timeout_s: float = 600.0,
) -> list[Verification]:
    """Run the real executor on local processes and compare with dense attention.

    Args:
        plans: all with the same number of workers; they share one set of processes.
        device: "cpu" (gloo, float64 by default) or "cuda" (NCCL, bfloat16 by default, one GPU for
            each worker).
        dtype: float64, float32, bfloat16 or float16.
        tolerance: of the worst row; by default TOLERANCES[dtype].

    Raises:
        ValueError: too few GPUs, an unknown device or dtype, or a kernel that cannot run there.
        WorkerFailed: a worker failed; the message has its trace.
        TimeoutError: the run took longer than timeout_s.
    """
    dtype = dtype or ("bfloat16" if device == "cuda" else "float64")
    _check(plans, device, dtype)
    work = [plan.to_bytes() for plan in plans]
    by_worker = run_workers(
        _run_plans, plans[0].num_workers, work, device, dtype, seed,
        backend=BACKENDS[device], timeout_s=timeout_s,
    )  # fmt: skip
    limit = TOLERANCES[dtype] if tolerance is None else tolerance
    settings = {"device": device, "dtype": dtype, "seed": seed, "tolerance": limit}
    inputs = PoolInputs(seed, getattr(torch, dtype), torch.device(device))
    return [
        _compare(plan, parts, inputs.of(plan), settings)
        for plan, *parts in zip(plans, *by_worker, strict=True)
    ]


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The worst row's error over its norm plus the mean row norm; a row is one token and head.

    One wrong row is seen however many are right; rounding of long rows is forgiven in proportion.
    Inputs are standard normal, so gradients that vanish (samples of one token) are measured
    against SMALL_NORM.
    """
    row_norm = expected.norm(dim=-1)
    scale = (row_norm + row_norm.mean()).clamp_min(SMALL_NORM)
    return _largest((actual - expected).norm(dim=-1) / scale)


def _largest(values: torch.Tensor) -> float:
    """The maximum; a value that is not finite counts as the largest float: JSON has no NaN."""
    top = torch.finfo(values.dtype).max
    return float(values.nan_to_num(nan=top, posinf=top).max())


def _check(plans: Sequence[PoolPlan], device: str, dtype: str) -> None:
    if dtype not in TOLERANCES:
        raise ValueError(f"dtype ({dtype!r}) must be one of {', '.join(TOLERANCES)}.")
    if device not in BACKENDS:
        raise ValueError(f"device ({device!r}) must be one of {', '.join(BACKENDS)}.")
    num_workers = plans[0].num_workers
    if any(plan.num_workers != num_workers for plan in plans):
        raise ValueError("plans that are verified together must have the same number of workers.")
    num_gpus = torch.cuda.device_count() if device == "cuda" else num_workers
    if num_gpus < num_workers:
        raise ValueError(
            f"a pool of {num_workers} workers needs {num_workers} GPUs and this machine has "
            f"{num_gpus}; try --device cpu, or a pool_size * context_parallel_size that fits."
        )


def _run_plans(
    work: list[bytes], device: str, dtype: str, seed: int
) -> list[tuple[str, str, dict[str, NDArray[Any]]]]:
    """Body of a worker: names of kernel and transport, results of its share of every plan."""
    worker = dist.get_rank()
    groups = create_pool_groups(
        range(dist.get_world_size()), backend=BACKENDS[device], plan_ranks=[worker]
    )
    here = torch.device("cuda", worker) if device == "cuda" else torch.device("cpu")
    inputs = PoolInputs(seed, getattr(torch, dtype), here)
    return [_run_plan(PoolPlan.from_bytes(data), groups, inputs) for data in work]


def _run_plan(
    plan: PoolPlan, groups: Any, inputs: PoolInputs
) -> tuple[str, str, dict[str, NDArray[Any]]]:
    runtime = pool_runtime(
        groups,
        plan.config,
        device=inputs.device,
        dtype=inputs.dtype,
        head_dim=plan.shape.head_dim,
    )
    tensors = worker_tensors(plan, groups.worker, inputs.of(plan))
    q, k, v, dout = (tensors[name] for name in ("q", "k", "v", "dout"))
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    out = libra_attention(*leaves, bind(plan.worker_plan(groups.worker), runtime))
    gradients = torch.autograd.grad(out, leaves, dout)
    results = zip(RESULTS, (out.detach(), *gradients), strict=True)
    arrays = {name: _to_numpy(tensor) for name, tensor in results}
    return runtime.kernel.name, runtime.dispatch.name, arrays


def _to_numpy(tensor: torch.Tensor) -> NDArray[Any]:
    half = tensor.dtype in (torch.bfloat16, torch.float16)
    return (tensor.float() if half else tensor).cpu().numpy()


def _compare(
    plan: PoolPlan,
    parts: Sequence[tuple[str, str, dict[str, NDArray[Any]]]],
    inputs: dict[str, torch.Tensor],
    settings: dict[str, Any],
) -> Verification:
    dense = dense_attention(inputs, plan.sequences)
    results, errors, relative, max_abs = {}, {}, {}, {}
    for name in RESULTS:
        gathered = gather_workers(plan, [torch.from_numpy(arrays[name]) for *_, arrays in parts])
        results[name] = gathered.numpy()
        expected = dense[name]
        actual = gathered.to(expected.device).double()
        errors[name] = error_of(actual, expected)
        difference = actual - expected
        relative[name] = _largest(difference.norm() / expected.norm().clamp_min(SMALL_NORM))
        max_abs[name] = _largest(difference.abs())
    worst, worst_whole = max(errors.values()), max(relative.values())
    limit = settings["tolerance"]
    report = {
        "workers": plan.num_workers,
        "kernel": parts[0][0],
        "transport": parts[0][1],
        **settings,
        "errors": errors,
        "relative": relative,
        "max_abs": max_abs,
        "max_error": worst,
        "passed": worst <= limit and worst_whole <= limit / WHOLE_FACTOR,
        "digest": plan.digest,
    }
    named = {name: _to_numpy(tensor) for name, tensor in inputs.items()}
    return Verification(plan, report, {**named, **results})
