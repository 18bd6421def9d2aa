"""The executor on CUDA. Layers: torch_flash against float64, one GPU without synchronization, NCCL.

Skipped, never faked, where there is no GPU (or one where two are needed).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.inputs import pool_tensors, worker_tensors
from megatron_libra.executor.kernels import BoundRound, pick_kernel
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.executor.verify import verify_plans
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.worker_plan import Round
from tests.helpers.cases import plan_of, pool
from tests.helpers.distributed import runtime_here, world

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 1, reason="needs a CUDA device; this machine has none"),
]
two_gpus = pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, not {NUM_GPUS}")

LONG = pool(
    [[3000, 500], [200] * 15], 4096, 1, (8, 2, 128), block_size=512, head_split=2, chunks=2,
    placer="paper",
)  # fmt: skip
QUERIES, KEYS = [0, 512, 0, 300, 1], [100, 1500, 900, 300, 40]


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def rounds(queries: list[int], keys: list[int], device: torch.device) -> tuple[Round, BoundRound]:
    """One round on the device, prepared for the reference kernel."""
    cu_q, cu_k = (np.cumsum([0, *n]).astype(np.int32) for n in (queries, keys))
    plan_round = Round(0, int(cu_q[-1]), 0, int(cu_k[-1]), cu_q, cu_k, max(queries), max(keys))
    prepared = ReferenceKernel().prepare(plan_round, device)
    on_device = (torch.from_numpy(cu).to(device) for cu in (cu_q, cu_k))
    return plan_round, BoundRound(
        0, int(cu_q[-1]), 0, int(cu_k[-1]), *on_device, max(queries), max(keys), prepared
    )


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("heads", [(8, 2), (4, 4), (8, 1)])
@pytest.mark.parametrize("deterministic", [False, True])
def test_torch_flash_equals_reference(
    head_dim: int, heads: tuple[int, int], deterministic: bool
) -> None:
    """bf16 against float64 of the same inputs; fillers get exact zeros; ordered sums repeat."""
    device = torch.device("cuda", 0)
    flash = pick_kernel(
        "auto", device=device, dtype=torch.bfloat16, head_dim=head_dim, deterministic=deterministic
    )
    assert flash.name == "torch_flash" and flash.deterministic is deterministic
    _, r = rounds(QUERIES, KEYS, device)

    def rows(count: int, num_heads: int) -> torch.Tensor:
        wide = torch.randn(count, 2, num_heads, head_dim, device=device)
        return wide.to(torch.bfloat16)[:, 1]  # strided, as K and V arrive

    q, dout = rows(r.query_stop, heads[0]), rows(r.query_stop, heads[0])
    k, v = rows(r.key_stop, heads[1]), rows(r.key_stop, heads[1])
    scale = head_dim**-0.5
    out, lse = flash.forward(q, k, v, r, scale)
    grads = flash.backward(dout, q, k, v, out, lse, r, scale)
    reference, wide = ReferenceKernel(), [x.double() for x in (q, k, v)]
    out64, lse64 = reference.forward(*wide, r, scale)
    grads64 = reference.backward(dout.double(), *wide, out64, lse64, r, scale)
    assert relative(out, out64) < 4e-3 and float((lse - lse64).abs().max()) < 1e-2
    assert all(relative(a, b) < 6e-3 for a, b in zip(grads, grads64, strict=True))
    for key_grad in grads[1:]:
        assert not key_grad[:100].any() and not key_grad[1600:2500].any()
    if deterministic:
        again = flash.backward(dout, q, k, v, out, lse, r, scale)
        assert all(torch.equal(a, b) for a, b in zip(grads, again, strict=True))
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize("mode", ["save", "refetch"])
def test_one_gpu(mode: str) -> None:
    case = pool([[3000, 500, 1, 40]], 4096, 1, (8, 2, 128), block_size=512, head_split=2, chunks=2)
    (outcome,) = verify_plans([plan_of(case, backward_kv=mode)], device="cuda")
    assert outcome.passed and outcome.report["kernel"] == "torch_flash", outcome.report


@two_gpus
@pytest.mark.parametrize("mode", ["save", "refetch"])
def test_two_gpus(mode: str) -> None:
    """NCCL: data parallel pool, context parallel pool, empty slot, every worker but one idle."""
    cases = [
        plan_of(LONG, backward_kv=mode),
        plan_of({**LONG, "sequences": [[3000, 500]], "context_parallel_size": 2,
                 "libra": {**LONG["libra"], "pool_size": 1}}, backward_kv=mode),
        plan_of({**LONG, "sequences": [[], [4000]]}, backward_kv=mode),
        plan_of({**LONG, "sequences": [[1], []]}, backward_kv=mode),
    ]  # fmt: skip
    for outcome in verify_plans(cases, device="cuda"):
        assert outcome.passed and outcome.report["kernel"] == "torch_flash", outcome.report


def step_without_sync(plan_bytes: bytes, mode: str) -> bool:
    """bind, forward and backward where any synchronization of the device is an error."""
    plan, worker = PoolPlan.from_bytes(plan_bytes), dist.get_rank()
    device = torch.device("cuda", worker)
    runtime = runtime_here(plan, device=f"cuda:{worker}", dtype=torch.bfloat16, backward_kv=mode)
    tensors = worker_tensors(plan, worker, pool_tensors(plan, 0, torch.bfloat16))
    on_device: dict[str, Any] = {name: x.to(device) for name, x in tensors.items()}
    leaves = [on_device[name].requires_grad_() for name in "qkv"]
    worker_plan = plan.worker_plan(worker)
    for attempt in range(3):  # the first warms up: NCCL and the allocators may wait
        torch.cuda.set_sync_debug_mode("error" if attempt else "default")
        try:
            out = libra_attention(*leaves, bind(worker_plan, runtime))
            gradients = torch.autograd.grad(out, leaves, on_device["dout"])
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    return all(bool(x.isfinite().all()) for x in (out, *gradients))


@pytest.mark.parametrize("mode", ["save", "refetch"])
@pytest.mark.parametrize("num_gpus", [1, pytest.param(2, marks=two_gpus)])
def test_no_synchronization(mode: str, num_gpus: int) -> None:
    case = LONG if num_gpus == 2 else {**LONG, "sequences": [[3000, 500]]}
    case = {**case, "libra": {**case["libra"], "pool_size": num_gpus}}
    data = plan_of(case).to_bytes()
    assert world(step_without_sync, num_gpus, data, mode, backend="nccl") == [True] * num_gpus
