"""The reference kernel against naive attention; sizes that torch_flash refuses. On a GPU:
test_gpu_kernels.py."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from megatron_libra.executor.kernels.interface import bind_round
from megatron_libra.executor.kernels.reference import (
    MERGED_AREA,
    QUERY_BLOCK,
    ReferenceKernel,
)
from megatron_libra.executor.kernels.torch_flash import TorchFlashKernel
from megatron_libra.plan.worker_plan import Round
from tests.helpers.kernels import make_round, strided_rows

CPU = torch.device("cpu")
ROUNDS = {
    "one sample": ([40], [40]),
    "suffix of a prefix": ([10], [37]),
    "fillers around": ([0, 5, 0, 3, 0], [4, 9, 6, 3, 2]),
    "many short": ([1, 2, 3, 1, 1, 7] * 20, [1, 2, 5, 1, 4, 7] * 20),
    "long then short": ([600, 3, 3, 2], [700, 3, 4, 2]),
    "short then long": ([3, 2, 300], [3, 9, 300]),
}


def naive(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan_round: Round, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """out and lse with one full mask over all rows."""
    mask = torch.zeros(len(q), len(k), dtype=torch.bool)
    cu_q, cu_k = plan_round.cu_queries.tolist(), plan_round.cu_keys.tolist()
    for entry in range(len(cu_q) - 1):
        rows, columns = range(cu_q[entry], cu_q[entry + 1]), range(cu_k[entry], cu_k[entry + 1])
        for row in rows:
            visible = len(columns) - (rows.stop - row) + 1
            mask[row, columns.start : columns.start + visible] = True
    group = q.shape[1] // k.shape[1]
    keys, values = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, keys) * scale
    scores = scores.masked_fill(~mask, -torch.inf)
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values), scores.logsumexp(-1)


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1), (1, 1)])
def test_reference_equals_naive(name: str, heads: tuple[int, int]) -> None:
    plan_round, kernel = make_round(*ROUNDS[name]), ReferenceKernel()
    generator = torch.Generator().manual_seed(0)
    q, dout = (strided_rows(plan_round.query_stop, heads[0], 8, generator) for _ in range(2))
    k, v = (strided_rows(plan_round.key_stop, heads[1], 8, generator) for _ in range(2))
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected, expected_lse = naive(*leaves, plan_round, 0.3)
    expected_grads = torch.autograd.grad(expected, leaves, dout)
    r = bind_round(plan_round, kernel)
    out, lse = kernel.forward(q, k, v, r, 0.3)
    grads = kernel.backward(dout, q, k, v, out, lse, r, 0.3)
    torch.testing.assert_close((out, lse), (expected, expected_lse), rtol=0, atol=1e-12)
    torch.testing.assert_close(tuple(grads), expected_grads, rtol=0, atol=1e-12)


def test_filler_keys_get_exact_zeros() -> None:
    plan_round, kernel = make_round(*ROUNDS["fillers around"]), ReferenceKernel()
    q, k, v = (torch.randn(n, 2, 8) for n in (8, 24, 24))
    k[:4], v[:4] = torch.nan, torch.nan  # a filler's rows are never read
    r = bind_round(plan_round, kernel)
    out, lse = kernel.forward(q, k, v, r, 0.3)
    dq, dk, dv = kernel.backward(torch.ones_like(q), q, k, v, out, lse, r, 0.3)
    assert not out.isnan().any() and not dq.isnan().any()
    used = torch.zeros(24, dtype=torch.bool)
    used[4:13] = used[19:22] = True
    assert not dk[~used].any() and not dv[~used].any() and dv[used].all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_narrow_inputs_sum_in_float32(dtype: torch.dtype) -> None:
    """Equal keys: every output is v's mean, which a narrow running sum of 2000 would miss."""
    plan_round, kernel = make_round([1], [2000]), ReferenceKernel()
    q, k, v = torch.zeros(1, 1, 8), torch.zeros(2000, 1, 8), torch.ones(2000, 1, 8)
    r = bind_round(plan_round, kernel)
    out, lse = kernel.forward(q.to(dtype), k.to(dtype), v.to(dtype), r, 1.0)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out.float(), torch.ones(1, 1, 8))
    assert float(lse) == pytest.approx(np.log(2000), rel=1e-6)
    *_, dv = kernel.backward(out, q.to(dtype), k.to(dtype), v.to(dtype), out, lse, r, 1.0)
    assert dv.dtype == torch.float32 and float(dv.sum()) == pytest.approx(8, rel=1e-5)


def test_blocks_stay_small_and_few() -> None:
    """No O(L^2) scores for one long sample, few blocks for many short ones, every row once."""
    long, short = make_round([20000], [20000]), make_round([40] * 500, [40] * 500)
    for plan_round, most in ((long, 20000 // QUERY_BLOCK + 1), (short, 120)):
        blocks = ReferenceKernel().prepare(plan_round, CPU)
        assert len(blocks) <= most
        assert [b.start for b in blocks] == [0, *(b.stop for b in blocks[:-1])]
        assert blocks[-1].stop == 20000
        assert max(b.stop - b.start for b in blocks) <= QUERY_BLOCK
        assert max(b.hidden.numel() for b in blocks) <= MERGED_AREA


def test_flash_refuses_sizes_beyond_int32() -> None:
    """410,923 rows x 16 heads x 96 fit; four times as many heads do not."""
    plan_round, kernel = make_round([410_923], [410_923]), TorchFlashKernel()
    kernel.check_sizes(plan_round, 16, 16, 96)
    with pytest.raises(ValueError, match="raise chunks"):
        kernel.check_sizes(plan_round, 64, 16, 96)


def test_queries_without_keys_and_keys_without_queries_are_skipped() -> None:
    """As a call over home tensors has them: results of the other entries are the same."""
    kernel = ReferenceKernel()
    gaps = make_round([3, 0, 5, 2, 0, 4], [0, 3, 5, 0, 2, 4])
    dense = make_round([5, 4], [5, 4])
    kept = [*range(3, 8), *range(10, 14)]
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(14, 4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    k, v = (torch.randn(14, 2, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    results = []
    for plan_round, rows in ((gaps, list(range(14))), (dense, kept)):
        bound = bind_round(plan_round, kernel)
        out, lse = kernel.forward(q[rows], k[rows], v[rows], bound, 0.3)
        grads = kernel.backward(dout[rows], q[rows], k[rows], v[rows], out, lse, bound, 0.3)
        results.append((out, *grads))
    for whole, part in zip(*results, strict=True):
        torch.testing.assert_close(whole[kept], part, rtol=0, atol=1e-12)
    skipped = [row for row in range(14) if row not in kept]
    assert not results[0][2][skipped].any() and not results[0][3][skipped].any()
