"""The local part of a layer: in place, in copies, divided by heads, with kernels that take little.

Layers: one worker without a process group, then gloo worlds of two.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor import plan_index
from megatron_libra.executor.attention import libra_attention
from megatron_libra.executor.dense import dense_attention
from megatron_libra.executor.inputs import pool_tensors
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.plan import worker_plan
from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.worker_plan import Round
from tests.helpers.cases import plan_of, pool
from tests.helpers.distributed import bound_plan, world
from tests.helpers.layers import ONE, alone, gradients, leaves

MODES = ("save", "refetch")


class SmallKernel(ReferenceKernel):
    """Takes a limited number of query heads in one call."""

    def __init__(self, most_heads: int) -> None:
        self.most_heads = most_heads

    def check_sizes(
        self, plan_round: Round, query_heads: int, kv_heads: int, head_dim: int
    ) -> None:
        if query_heads > self.most_heads:
            raise ValueError(f"{query_heads} heads are too many")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("most_heads", [2, 1])
def test_local_heads_are_cut_where_one_call_would_be_too_large(mode: str, most_heads: int) -> None:
    """Also where the calls then share a kv head: 4 query heads on 2 kv heads."""
    expected = gradients(alone(backward_kv=mode), ONE, 0)
    bound = alone(kernel=SmallKernel(most_heads), backward_kv=mode)
    assert len(bound.local.calls) == len(ONE.worker_plan(0).local.rounds) * 4 // most_heads
    assert bound.local.calls.shares_kv is (most_heads == 1)
    for actual, wanted in zip(gradients(bound, ONE, 0), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=0, atol=1e-12)
    with pytest.raises(ValueError, match="1 heads are too many"):
        alone(kernel=SmallKernel(0))


class StrictKernel(ReferenceKernel):
    """Refuses what AttentionKernel does not promise: a last axis that is not contiguous."""

    def forward(self, q, k, v, *others: Any, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        assert all(x.stride(-1) == 1 for x in (q, k, v))
        return super().forward(q, k, v, *others, **options)

    def backward(
        self, dout, q, k, v, out, *others: Any, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        assert all(x.stride(-1) == 1 for x in (dout, q, k, v, out))
        return super().backward(dout, q, k, v, out, *others, **options)


@pytest.mark.parametrize("mode", MODES)
def test_kernels_get_rows_whose_elements_are_neighbours(mode: str) -> None:
    """Also in place: dout of a sum has no strides at all, and q may be a transposed view."""
    (q, k, v), dout = leaves(ONE)
    bound = alone(kernel=StrictKernel(), backward_kv=mode)
    assert bound.local.rows.index is None
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in (q, k, v)]
    out = libra_attention(*(x.transpose(1, 2) for x in turned), bound)
    actual = torch.autograd.grad(out.sum(), turned)
    plain = libra_attention(q, k, v, alone(backward_kv=mode))
    expected = torch.autograd.grad(plain, (q, k, v), torch.ones_like(dout))
    assert torch.equal(out, plain)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one.transpose(1, 2), other, rtol=0, atol=1e-12)


SCATTERED = plan_of(
    pool([[5, 9] * 5, [8]], 80, 1, (8, 2, 8), block_size=1, head_split=2, chunks=2,
         load_slack=0.0)
)  # fmt: skip


def with_gaps(data: bytes, mode: str, largest_gap: int, most_gaps: int) -> tuple[Any, ...]:
    """Body of a worker: how the local part is computed, and the results."""
    plan_index.LARGEST_GAP, worker_plan.MOST_GAPS = largest_gap, most_gaps
    plan, worker = PoolPlan.from_bytes(data), dist.get_rank()
    bound = bound_plan(plan, backward_kv=mode)
    in_place = bound.local.rows.index is None
    return in_place, len(bound.local.calls), gradients(bound, plan, worker)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("largest_gap", "most_gaps", "in_place", "num_calls"),
    [(0, 32, True, "many"), (8 * 80, 32, True, "few"), (0, 0, False, "few")],
)
def test_local_work_between_gaps(
    mode: str, largest_gap: int, most_gaps: int, in_place: bool, num_calls: str
) -> None:
    """Gaps that calls skip, gaps at which calls end, and copies give what dense attention gives."""
    outcomes = world(with_gaps, 2, SCATTERED.to_bytes(), mode, largest_gap, most_gaps)
    assert outcomes[0][0] is in_place
    assert (outcomes[0][1] > 2) is (num_calls == "many")
    dense = dense_attention(pool_tensors(SCATTERED, 0, torch.float64), SCATTERED.sequences)
    for worker, (_, _, results) in enumerate(outcomes):
        for name, actual in zip(("out", "dq", "dk", "dv"), results, strict=True):
            torch.testing.assert_close(actual, dense[name][worker], rtol=0, atol=1e-12)


FEW_SAMPLES = plan_of(
    pool([[9] * 30, [33]], 288, 1, (8, 4, 8), block_size=9, chunks=2, load_slack=0.0)
)


def with_late_heads(data: bytes, mode: str, most_gaps: int) -> tuple[Any, ...]:
    """Body of a worker: late calls of the local part, and the results."""
    worker_plan.MOST_GAPS = most_gaps
    plan, worker = PoolPlan.from_bytes(data), dist.get_rank()
    bound = bound_plan(plan, backward_kv=mode)
    return len(bound.local.calls.late), gradients(bound, plan, worker)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("most_gaps", [32, -1])
def test_local_work_divided_by_heads(mode: str, most_gaps: int) -> None:
    """In place and in copies; what a worker with one sample computes last is some of its heads."""
    assert FEW_SAMPLES.local.late_kv_heads.tolist() == [0, 2]
    outcomes = world(with_late_heads, 2, FEW_SAMPLES.to_bytes(), mode, most_gaps)
    assert all(late == 1 for late, _ in outcomes)
    dense = dense_attention(pool_tensors(FEW_SAMPLES, 0, torch.float64), FEW_SAMPLES.sequences)
    for worker, (_, results) in enumerate(outcomes):
        for name, actual in zip(("out", "dq", "dk", "dv"), results, strict=True):
            torch.testing.assert_close(actual, dense[name][worker], rtol=0, atol=1e-12)
