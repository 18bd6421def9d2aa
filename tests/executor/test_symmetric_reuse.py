"""Symmetric transport on the CPU: evaluation before training, what a lost worker leaves behind,
what a runtime that is gone still holds.
"""

from __future__ import annotations

import gc
import os
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.bind import bind
from megatron_libra.executor.groups import create_pool_groups
from megatron_libra.executor.inputs import pool_tensors, worker_tensors
from megatron_libra.executor.local import WorkerFailed
from megatron_libra.executor.runtime import pool_runtime
from tests.helpers.cases import plan_of, pool
from tests.helpers.distributed import bound_plan, world

PLAN = plan_of(
    pool([[90], [20, 30]], 96, 2, (8, 2, 8), block_size=16, head_split=2, chunks=2, placer="paper")
)


def layer() -> tuple[list[torch.Tensor], torch.Tensor]:
    """q, k, v and dO of this worker."""
    tensors = worker_tensors(PLAN, dist.get_rank(), pool_tensors(PLAN, 0, torch.float64))
    return [tensors[name] for name in "qkv"], tensors["dout"]


def evaluate_then_train(transport: str) -> bool:
    """Whether one bound plan gives the same in inference mode and, later, with gradients."""
    bound, (inputs, dout) = bound_plan(PLAN, transport=transport), layer()
    with torch.inference_mode():
        quiet = libra_attention(*inputs, bound)
    leaves = [x.requires_grad_() for x in inputs]
    out = libra_attention(*leaves, bound)
    torch.autograd.grad(out, leaves, dout)
    return torch.equal(quiet, out)


@pytest.mark.parametrize("transport", ["gloo", "symmetric"])
def test_evaluation_in_inference_mode_comes_first(transport: str) -> None:
    assert world(evaluate_then_train, 4, transport) == [True] * 4


def lose_a_worker_at_the_first_layer(folder: str) -> None:
    tempfile.tempdir = folder
    bound, (inputs, _) = bound_plan(PLAN, transport="symmetric"), layer()
    if dist.get_rank() == 1:
        time.sleep(0.5)  # the others wait for this worker's heap by now
        os._exit(7)
    libra_attention(*inputs, bound)


def test_a_lost_worker_leaves_no_heap_behind(tmp_path: Path) -> None:
    with pytest.raises(WorkerFailed, match="worker 1 ended without a result"):
        world(lose_a_worker_at_the_first_layer, 4, str(tmp_path))
    assert list(tmp_path.iterdir()) == []


def open_files(num_runtimes: int) -> list[int]:
    """Open files after each runtime that was made, used and dropped."""
    groups = create_pool_groups(range(4), backend="gloo", plan_ranks=[dist.get_rank()])
    config, counts = replace(PLAN.config, transport="symmetric"), []
    for _ in range(num_runtimes):
        runtime = pool_runtime(
            groups, config, device="cpu", dtype=torch.float64, head_dim=PLAN.shape.head_dim
        )
        inputs, _ = layer()
        libra_attention(*inputs, bind(PLAN.worker_plan(dist.get_rank()), runtime))
        del runtime
        gc.collect()
        counts.append(len(os.listdir("/proc/self/fd")))
    return counts


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_runtime_that_is_gone_holds_no_files() -> None:
    for counts in world(open_files, 4, 3):
        assert counts[-1] == counts[0], counts
