"""Every fast kernel on a GPU against float64: forward, backward, fillers, key starts, strided
heads, repeated bits, no copies of K and V, no waiting. Skipped where a kernel cannot run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from megatron_libra.executor.kernels import AttentionKernel
from megatron_libra.executor.kernels.interface import KernelUnavailable, bind_round
from megatron_libra.executor.kernels.pick import BEST_FIRST
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.plan.worker_plan import Round
from tests.helpers.kernels import make_round, strided_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        torch.cuda.device_count() < 1, reason="needs a CUDA device; this machine has none"
    ),
]
each_kernel = pytest.mark.parametrize("name", list(BEST_FIRST))

KEY_START, ROWS_BEHIND = 50, 20
ROUNDS: dict[str, tuple[list[int], list[int]]] = {
    "fillers": ([0, 512, 0, 300, 1], [100, 1500, 900, 300, 40]),
    "one entry": ([700], [1900]),
    "short entries": ([1, 2, 0, 3, 60], [40, 2, 7, 64, 64]),
    "queries without keys": ([300, 0, 500, 40, 0, 7], [0, 300, 500, 0, 40, 7]),
    "more than 256 entries": ([3, 0, 20, 1] * 80, [3, 9, 31, 50] * 80),
}
SHAPES = [  # heads with one ratio and different counts share a compiled kernel
    ((8, 2), 64), ((4, 1), 64), ((8, 2), 128), ((4, 1), 128), ((8, 1), 128), ((16, 2), 128),
    ((4, 4), 128), ((1, 1), 128), ((32, 1), 128), ((8, 2), 256), ((4, 4), 256), ((32, 1), 256),
    ((8, 2), 96), ((8, 2), 192),
]  # fmt: skip
Rows = dict[str, torch.Tensor]


def kernel_here(name: str, head_dim: int, deterministic: bool = False) -> AttentionKernel:
    """The kernel, or a skip that says why it cannot run."""
    try:
        return BEST_FIRST[name](torch.device("cuda", 0), head_dim, deterministic)
    except KernelUnavailable as reason:
        pytest.skip(f"{name}: {reason}")


def rows_of(
    plan_round: Round,
    heads: tuple[int, int],
    head_dim: int,
    dtype: torch.dtype,
    device: str = "cuda",
) -> Rows:
    """q, k, v, dout of a round: strided rows, K and V a part of a longer buffer."""
    generator = torch.Generator(device).manual_seed(0)
    num_queries = plan_round.query_stop - plan_round.query_start
    buffer = plan_round.key_stop + ROWS_BEHIND
    rows = {
        n: strided_rows(num_queries, heads[0], head_dim, generator, dtype) for n in ("q", "dout")
    }
    resident = {n: strided_rows(buffer, heads[1], head_dim, generator, dtype) for n in "kv"}
    for x in resident.values():  # rows of other rounds must not be read
        x[: plan_round.key_start], x[plan_round.key_stop :] = torch.nan, torch.nan
    return rows | {n: x[plan_round.key_start : plan_round.key_stop] for n, x in resident.items()}


def run(kernel: AttentionKernel, plan_round: Round, rows: Rows) -> dict[str, torch.Tensor]:
    """out, lse, dq, dk, dv."""
    q, k, v = (rows[name] for name in "qkv")
    bound_round = bind_round(plan_round, kernel, q.device)
    scale = q.shape[-1] ** -0.5
    out, lse = kernel.forward(q, k, v, bound_round, scale)
    dq, dk, dv = kernel.backward(rows["dout"], q, k, v, out, lse, bound_round, scale)
    return {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}


def check(actual: Rows, plan_round: Round, rows: Rows) -> None:
    """Against float64 of the same numbers; fillers' gradients are exactly zero."""
    expected = run(ReferenceKernel(), plan_round, {n: x.double() for n, x in rows.items()})
    sees = np.repeat(np.diff(plan_round.cu_keys) > 0, np.diff(plan_round.cu_queries))
    for results in (actual, expected):  # rows without keys are not defined
        for n, is_query_major in (("out", True), ("dq", True), ("lse", False)):
            defined = torch.from_numpy(sees).to(results[n].device)
            results[n] = results[n][defined] if is_query_major else results[n][:, defined]
    errors = {n: float((actual[n].double() - x).norm() / x.norm()) for n, x in expected.items()}
    assert errors["out"] < 4e-3, errors
    assert float((actual["lse"] - expected["lse"]).abs().max()) < 1e-2
    assert max(errors[n] for n in ("dq", "dk", "dv")) < 6e-3, errors
    counts = zip(plan_round.cu_keys[:-1], plan_round.cu_keys[1:], strict=True)
    empty = plan_round.cu_queries[:-1] == plan_round.cu_queries[1:]
    for filler, (start, stop) in zip(empty, counts, strict=True):
        if filler:
            assert not actual["dk"][start:stop].any() and not actual["dv"][start:stop].any()


def poison_memory() -> None:
    """What is allocated next holds NaN: a row that a kernel leaves unwritten shows."""
    torch.cuda.empty_cache()
    blocks = [torch.full((size,), torch.nan, device="cuda") for size in (2**17,) * 64 + (2**26,)]
    del blocks


@each_kernel
@pytest.mark.parametrize(("heads", "head_dim"), SHAPES)
@pytest.mark.parametrize("deterministic", [False, True])
def test_equals_float64(
    name: str, heads: tuple[int, int], head_dim: int, deterministic: bool
) -> None:
    kernel = kernel_here(name, head_dim, deterministic)
    assert kernel.name == name and kernel.deterministic is deterministic
    for queries, keys in ROUNDS.values():
        plan_round = make_round(queries, keys, key_start=KEY_START)
        rows = rows_of(plan_round, heads, head_dim, torch.bfloat16)
        poison_memory()
        actual = run(kernel, plan_round, rows)
        check(dict(actual), plan_round, rows)
        if deterministic:
            again = run(kernel, plan_round, rows)
            assert all(torch.equal(again[n], actual[n]) for n in ("dk", "dv"))
            check(again, plan_round, rows)
    assert not torch.are_deterministic_algorithms_enabled()


@each_kernel
def test_float16(name: str) -> None:
    kernel = kernel_here(name, 128)
    plan_round = make_round(*ROUNDS["fillers"], key_start=KEY_START)
    rows = rows_of(plan_round, (8, 2), 128, torch.float16)
    check(run(kernel, plan_round, rows), plan_round, rows)


@each_kernel
def test_head_slices_give_the_same_bits(name: str) -> None:
    """A chunk is a slice of the heads of a larger buffer; its output is the larger call's."""
    kernel = kernel_here(name, 128)
    plan_round = make_round(*ROUNDS["fillers"])
    rows = rows_of(plan_round, (8, 2), 128, torch.bfloat16)
    whole = run(kernel, plan_round, rows)
    heads = {"q": slice(4, 8), "dout": slice(4, 8), "k": slice(1, 2), "v": slice(1, 2)}
    part = run(kernel, plan_round, {n: x[:, heads[n]] for n, x in rows.items()})
    assert torch.equal(part["out"], whole["out"][:, 4:])
    assert torch.equal(part["lse"], whole["lse"][4:])
    check(part, plan_round, {n: x[:, heads[n]] for n, x in rows.items()})


@each_kernel
def test_keys_are_not_copied(name: str) -> None:
    """Few queries and many strided keys: forward takes no memory of the size of K."""
    kernel = kernel_here(name, 128)
    plan_round = make_round([256], [32768], key_start=KEY_START)
    rows = rows_of(plan_round, (8, 2), 128, torch.bfloat16)
    bound_round = bind_round(plan_round, kernel, "cuda")
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    out, _ = kernel.forward(*(rows[n] for n in "qkv"), bound_round, 0.1)
    assert torch.cuda.max_memory_allocated() - before < rows["k"].numel() * 2 // 4
    assert bool(out.isfinite().all())


@contextmanager
def no_waiting() -> Iterator[None]:
    """Where waiting for the device is an error."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@each_kernel
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("entries", list(ROUNDS))
def test_calls_do_not_wait_for_the_device(name: str, deterministic: bool, entries: str) -> None:
    kernel = kernel_here(name, 128, deterministic)
    plan_round = make_round(*ROUNDS[entries])
    rows: Any = rows_of(plan_round, (8, 2), 128, torch.bfloat16)
    run(kernel, plan_round, rows)  # the first call loads kernels
    bound_round = bind_round(plan_round, kernel, "cuda")
    with no_waiting():
        out, lse = kernel.forward(rows["q"], rows["k"], rows["v"], bound_round, 0.1)
        kernel.backward(rows["dout"], rows["q"], rows["k"], rows["v"], out, lse, bound_round, 0.1)
