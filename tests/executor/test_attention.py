"""The operator itself: its arguments, autograd, recompute, what it keeps and what it refuses.

Layers: one worker without a process group, then gloo worlds of four.
"""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import checkpoint

from megatron_libra.executor.attention import libra_attention, saved_bytes
from megatron_libra.executor.dense import dense_attention
from megatron_libra.executor.inputs import pool_tensors
from megatron_libra.plan.pool_plan import PoolPlan
from tests.helpers.cases import CASES, plan_of, pool
from tests.helpers.distributed import bound_plan, world
from tests.helpers.layers import ONE, alone, gradients, leaves

FOUR = plan_of(
    pool([[90], [20, 30]], 96, 2, (8, 2, 8), block_size=16, head_split=2, chunks=2, placer="paper")
)
OTHER = plan_of(
    pool(
        [[8], [50, 40, 1]], 96, 2, (8, 2, 8), block_size=16, head_split=2, chunks=2, placer="paper"
    )
)
MODES = ("save", "refetch")


@pytest.mark.parametrize("mode", MODES)
def test_softmax_scale_and_views(mode: str) -> None:
    """Strided q, k, v and dout, and a scale, give what dense attention gives."""
    inputs, dout = leaves(ONE)
    fused = torch.cat([x.detach() for x in inputs], dim=1).requires_grad_()
    q, k, v = fused.split([4, 2, 2], dim=1)
    assert not q.is_contiguous()
    out = libra_attention(q, k, v, alone(backward_kv=mode), softmax_scale=0.7)
    strided_dout = dout.transpose(0, 1).contiguous().transpose(0, 1)
    (grad,) = torch.autograd.grad(out, fused, strided_dout)
    dense = dense_attention(pool_tensors(ONE, 0, torch.float64), ONE.sequences, scale=0.7)
    expected = torch.cat([dense[name][0] for name in ("dq", "dk", "dv")], dim=1)
    torch.testing.assert_close(out, dense["out"][0], rtol=0, atol=1e-12)
    torch.testing.assert_close(grad, expected, rtol=0, atol=1e-12)


def test_only_one_input_needs_gradients() -> None:
    inputs, dout = leaves(ONE)
    whole = gradients(alone(), ONE, 0)
    for index, leaf in enumerate(inputs):
        others = [x.detach() for x in inputs]
        others[index] = leaf
        (grad,) = torch.autograd.grad(libra_attention(*others, alone()), leaf, dout)
        assert torch.equal(grad, whole[1 + index])


def test_same_bits_in_every_run() -> None:
    first, second = (gradients(alone(), ONE, 0) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_inference_keeps_nothing() -> None:
    inputs, _ = leaves(ONE)
    saved: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        with torch.no_grad():
            quiet = libra_attention(*inputs, alone())
        detached = libra_attention(*(x.detach() for x in inputs), alone())
        assert not saved and not quiet.requires_grad and not detached.requires_grad
        loud = libra_attention(*inputs, alone())
    assert saved and torch.equal(loud, quiet) and torch.equal(loud, detached)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    "plan",
    [
        ONE,
        plan_of(CASES["one_worker"], chunks=1, head_split=4),
        plan_of(pool([[20, 28]], 64, 1, (4, 2, 8))),
        plan_of(pool([[3, 13]], 256, 1, (4, 2, 8))),
        plan_of(pool([[]], 64, 1, (4, 2, 8))),
    ],
)
def test_saved_bytes_are_what_autograd_saves(mode: str, plan: PoolPlan) -> None:
    inputs, _ = leaves(plan)
    bound, saved = alone(plan, backward_kv=mode), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        libra_attention(*inputs, bound)
    total = sum(t.numel() * t.element_size() for t in saved)
    assert total == saved_bytes(bound, backward_kv=mode, bytes_per_element=8)


def test_wrong_tensors_are_refused() -> None:
    (q, k, v), _ = leaves(ONE)
    bound = alone()
    with pytest.raises(ValueError, match=r"q \(63, 4, 8\) must be .*\(64, 4, 8\)"):
        libra_attention(q[1:], k, v, bound)
    with pytest.raises(ValueError, match=r"k \(64, 4, 8\) must be .*\(64, 2, 8\)"):
        libra_attention(q, q, v, bound)
    with pytest.raises(ValueError, match=r"v \(torch.float32, cpu\) must match q"):
        libra_attention(q, k, v.float(), bound)
    with pytest.raises(ValueError, match="q is on meta, the plan is bound to cpu"):
        libra_attention(q.to("meta"), k.to("meta"), v.to("meta"), bound)


def test_autocast_does_not_touch_the_reference_kernel() -> None:
    plain = gradients(alone(), ONE, 0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = gradients(alone(), ONE, 0)
    assert all(torch.equal(a, b) for a, b in zip(plain, mixed, strict=True))


def recompute() -> bool:
    """Attention of a checkpointed block, twice, equals the plain one."""
    worker = dist.get_rank()
    for mode, reentrant in product(MODES, (True, False)):
        bound = bound_plan(FOUR, backward_kv=mode)
        plain = gradients(bound, FOUR, worker)
        for _ in range(2):
            inputs, dout = leaves(FOUR, worker)

            def block(q, k, v, bound=bound):
                return libra_attention(q * 1.0, k, v, bound)

            out = checkpoint(block, *inputs, use_reentrant=reentrant)
            out.backward(dout)
            again = (out.detach(), *(x.grad for x in inputs))
            if not all(torch.equal(a, b) for a, b in zip(plain, again, strict=True)):
                return False
    return True


def test_recompute() -> None:
    assert world(recompute, 4) == [True] * 4


def interleaved(mode: str) -> bool:
    """Two microbatches in flight, two layers each: forward 0, forward 1, backward 0, backward 1."""
    worker = dist.get_rank()
    bounds = [bound_plan(FOUR, backward_kv=mode), bound_plan(OTHER, backward_kv=mode)]
    batches = [leaves(plan, worker, seed) for seed, plan in enumerate((FOUR, OTHER))]

    def forward(index: int) -> torch.Tensor:
        q, k, v = batches[index][0]
        return libra_attention(libra_attention(q, k, v, bounds[index]), k, v, bounds[index])

    apart = [torch.autograd.grad(forward(i), batches[i][0], batches[i][1]) for i in (0, 1)]
    outs = [forward(0), forward(1)]
    mixed = [torch.autograd.grad(outs[i], batches[i][0], batches[i][1]) for i in (0, 1)]
    pairs = [(a, b) for i in (0, 1) for a, b in zip(apart[i], mixed[i], strict=True)]
    return all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("mode", MODES)
def test_microbatches_interleave(mode: str) -> None:
    assert world(interleaved, 4, mode) == [True] * 4
