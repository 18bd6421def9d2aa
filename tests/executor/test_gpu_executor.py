"""The executor on CUDA. Layers: one GPU, two over every transport, no synchronization.

Skipped, never faked, where there is no GPU (or one where two are needed).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.inputs import pool_tensors, worker_tensors
from megatron_libra.executor.verify import verify_plans
from megatron_libra.plan.pool_plan import PoolPlan
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


@pytest.mark.parametrize("mode", ["save", "refetch"])
def test_one_gpu(mode: str) -> None:
    case = pool([[3000, 500, 1, 40]], 4096, 1, (8, 2, 128), block_size=512, head_split=2, chunks=2)
    (outcome,) = verify_plans([plan_of(case, backward_kv=mode)], device="cuda")
    assert outcome.passed, outcome.report


@two_gpus
@pytest.mark.parametrize("transport", ["nccl", "symmetric"])
@pytest.mark.parametrize("mode", ["save", "refetch"])
def test_two_gpus(mode: str, transport: str) -> None:
    """Data parallel pool, context parallel pool, empty slot, every worker but one idle."""
    split = {**LONG["libra"], "pool_size": 1}
    cases = [
        plan_of(case, backward_kv=mode, transport=transport)
        for case in (
            LONG,
            {**LONG, "sequences": [[3000, 500]], "context_parallel_size": 2, "libra": split},
            {**LONG, "sequences": [[], [4000]]},
            {**LONG, "sequences": [[1], []]},
        )
    ]
    for outcome in verify_plans(cases, device="cuda"):
        assert outcome.passed, outcome.report


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
