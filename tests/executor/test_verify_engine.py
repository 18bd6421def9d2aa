"""The engine of `libra verify`: what it reports and refuses, and that it sees wrong results."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch

from megatron_libra.executor import inputs as pool_inputs
from megatron_libra.executor import verify
from megatron_libra.executor.dense import dense_attention
from megatron_libra.executor.inputs import PoolInputs, gather_workers, pool_tensors, worker_tensors
from megatron_libra.executor.verify import error_of, verify_plans, verify_pool
from tests.helpers.cases import CASES, plan_of


def test_report_and_arrays() -> None:
    case = CASES["odd_documents"]
    outcome = verify_pool(case, seed=5)
    report = json.loads(json.dumps(outcome.report, allow_nan=False))
    assert report["passed"] is True and outcome.passed
    assert (report["workers"], report["device"], report["dtype"]) == (4, "cpu", "float64")
    assert (report["kernel"], report["seed"], report["tolerance"]) == ("reference", 5, 1e-10)
    assert report["digest"] == plan_of(case).digest
    assert report["max_error"] == max(report["errors"].values())
    shapes = {name: array.shape for name, array in outcome.arrays.items()}
    query, kv = (2, 8, 4, 8), (2, 8, 2, 8)
    assert shapes == {
        "q": query, "k": kv, "v": kv, "dout": query, "out": query, "dq": query, "dk": kv, "dv": kv,
    }  # fmt: skip


def test_the_seed_decides_the_inputs() -> None:
    plan = plan_of(CASES["one_token"])
    first, again, other = (pool_tensors(plan, seed, torch.float64) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first)


@pytest.mark.parametrize("layout", ["zigzag", "contiguous"])
def test_workers_hold_every_token_once(layout: str) -> None:
    plan = plan_of(CASES["tail_padding"], layout=layout)
    tensors = pool_tensors(plan, 0, torch.float32)
    parts = [worker_tensors(plan, worker, tensors)["k"] for worker in range(plan.num_workers)]
    assert torch.equal(gather_workers(plan, parts), tensors["k"])


@pytest.mark.parametrize("name", ["out", "dq", "dk", "dv"])
def test_one_wrong_row_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A single wrong number, a NaN, and a swapped pair of tokens each fail the comparison."""
    plan = plan_of(CASES["one_worker"])
    ((_, right),) = verify_of_one(plan)
    for change in ("number", "nan", "swap"):
        wrong = {key: array.copy() for key, array in right.items()}
        if change == "swap":
            wrong[name][[10, 11]] = wrong[name][[11, 10]]
        else:
            wrong[name][20, 1, 3] += 1e-3 if change == "number" else np.nan
        monkeypatch.setattr(
            verify, "run_workers", lambda *_, w=wrong, **__: [[("reference", "gloo", w)]]
        )
        outcome = verify_plans([plan])[0]
        assert not outcome.passed and outcome.report["errors"][name] > 1e-6
        json.dumps(outcome.report, allow_nan=False)


def verify_of_one(plan):
    """What the one worker of a plan returns, computed here by dense attention."""
    tensors = pool_tensors(plan, 0, torch.float64)
    dense = dense_attention(tensors, plan.sequences)
    local = worker_tensors(plan, 0, dense)
    return [("reference", {name: x.numpy() for name, x in local.items()})]


def test_error_of_forgives_by_row() -> None:
    """Long rows may be off in proportion; rows of zeros and vanishing tensors may not."""
    expected = torch.zeros(4, 8, dtype=torch.float64)
    expected[0] = 1000.0
    near = expected.clone()
    near[0, 0] += 1.0
    assert error_of(near, expected) < 1e-3
    near[2, 0] += 1.0
    assert 1e-4 < error_of(near, expected) < 1e-2
    assert error_of(torch.full((4, 8), 1e-3), torch.zeros(4, 8)) > 1e-2
    assert error_of(expected, expected) == 0


def test_dense_reference_is_causal_and_apart() -> None:
    """Two samples: changing a later token, or the other sample, changes nothing before."""
    generator = torch.Generator().manual_seed(0)
    q, k, v, dout = (torch.randn(1, 12, 2, 4, generator=generator) for _ in range(4))
    base = dense_attention({"q": q, "k": k, "v": v, "dout": dout}, [[5, 6]])
    v2 = v.clone()
    v2[0, 7] += 1
    changed = dense_attention({"q": q, "k": k, "v": v2, "dout": dout}, [[5, 6]])
    same = (base["out"] == changed["out"]).all(dim=-1).all(dim=-1)[0]
    assert same.tolist() == [True] * 7 + [False] * 4 + [True]
    assert not base["out"][0, 11].any() and torch.equal(base["out"][0, 0], v[0, 0].double())


@pytest.mark.parametrize("heads", [(8, 8, 16), (8, 2, 16), (6, 3, 8), (4, 1, 32)])
@pytest.mark.parametrize("most_scores", [1, 5_000, 100_000, 2**26])
def test_pieces_equal_autograd(heads: tuple[int, int, int], most_scores: int) -> None:
    """What runs on a GPU, here on the CPU: pieces of one row, of some rows, of whole samples."""
    num_tokens = 60 if most_scores == 1 else 620
    generator = torch.Generator().manual_seed(2)
    tensors = {
        name: torch.randn(2, num_tokens, count, heads[2], generator=generator).bfloat16()
        for name, count in zip(
            ("q", "k", "v", "dout"), (heads[0], *[heads[1]] * 2, heads[0]), strict=True
        )
    }
    sequences = [[num_tokens - 20, 1, 17], [7, num_tokens // 2, 1]]
    whole = dense_attention(tensors, sequences)
    pieces = dense_attention(tensors, sequences, most_scores=most_scores)
    for name, expected in whole.items():
        torch.testing.assert_close(pieces[name], expected, rtol=0, atol=1e-12)
        assert expected.any() and pieces[name].dtype == torch.float64


def test_no_piece_has_more_scores_than_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = []
    softmax = torch.Tensor.softmax
    monkeypatch.setattr(
        torch.Tensor, "softmax", lambda x, dim: sizes.append(x.numel()) or softmax(x, dim)
    )
    q, kv = torch.ones(1, 900, 8, 4), torch.ones(1, 900, 2, 4)
    tensors = {"q": q, "k": kv, "v": kv, "dout": q}
    for most_scores in (4 * 900, 100_000, 2_000_000):
        sizes.clear()
        dense_attention(tensors, [[900]], most_scores=most_scores)
        assert most_scores / 4 < max(sizes) <= most_scores
    assert sum(sizes) < 8 * 900 * 900


def test_inputs_are_made_again_only_for_other_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(
        pool_inputs, "pool_tensors", lambda *args: made.append(args) or pool_tensors(*args)
    )
    inputs = PoolInputs(3, torch.float64, torch.device("cpu"))
    plan, other = plan_of(CASES["odd_documents"]), plan_of(CASES["one_worker"])
    first = inputs.of(plan)
    assert inputs.of(plan_of(CASES["odd_documents"], layout="contiguous")) is first
    for each in (other, plan):
        expected = pool_tensors(each, 3, torch.float64)
        assert all(torch.equal(x, expected[name]) for name, x in inputs.of(each).items())
    assert len(made) == 3


def test_what_is_refused() -> None:
    plan = plan_of(CASES["odd_documents"])
    with pytest.raises(ValueError, match="device .'tpu'. must be one of cpu, cuda"):
        verify_plans([plan], device="tpu")
    with pytest.raises(ValueError, match="dtype .'int8'. must be one of"):
        verify_plans([plan], dtype="int8")
    with pytest.raises(ValueError, match="same number of workers"):
        verify_plans([plan, plan_of(CASES["one_worker"])])


def test_more_workers_than_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    plan = plan_of(CASES["odd_documents"])
    with pytest.raises(
        ValueError, match="4 workers needs 4 GPUs and this machine has 2; try --device cpu"
    ):
        verify_plans([plan], device="cuda")
