"""Timing calls: on the CPU with the reference kernel, and with a kernel that counts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.executor.kernels.reference import ReferenceKernel
from megatron_libra.plan.parts import EARLY, FAR, LATE, NEAR
from megatron_libra.plan.pool_plan import plan_pool
from megatron_libra.replay.calls import KernelCall, call_of, worker_calls
from megatron_libra.replay.measure import CallSeconds, CallTimer, gather_gb_s, measure_worker
from megatron_libra.replay.timing import median_seconds, run_seconds

CPU = torch.device("cpu")


class CountingKernel(ReferenceKernel):
    """Counts its calls and keeps the shapes of the last one."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, q: Any, k: Any, v: Any, *rest: Any) -> Any:
        self.forwards += 1
        self.shapes = [tuple(each.shape) for each in (q, k, v)]
        return super().forward(q, k, v, *rest)

    def backward(self, *tensors: Any) -> Any:
        self.backwards += 1
        return super().backward(*tensors)


def _call(queries: int = 4, keys: int = 8) -> KernelCall:
    return call_of([queries], [keys], query_heads=4, kv_heads=2, head_dim=8)


def test_a_call_runs_with_its_own_shapes() -> None:
    kernel = CountingKernel()
    seconds = CallTimer(kernel, CPU, repeats=3).seconds(_call())
    assert kernel.shapes == [(4, 4, 8), (8, 2, 8), (8, 2, 8)]
    assert seconds.forward > 0 and seconds.backward > 0
    assert kernel.forwards == 1 + 3 and kernel.backwards == 1 + 3


def test_a_shape_is_run_once() -> None:
    kernel = CountingKernel()
    timer = CallTimer(kernel, CPU, repeats=1)
    first = timer.seconds(_call())
    runs = kernel.forwards
    assert timer.seconds(_call()) == first and kernel.forwards == runs
    timer.seconds(_call(queries=5))
    assert kernel.forwards > runs


def test_long_calls_are_run_less_often() -> None:
    kernel = CountingKernel()
    CallTimer(kernel, CPU, repeats=50, call_budget_s=0.0).seconds(_call())
    assert kernel.forwards == 2  # a warm-up and one


def test_the_cpu_is_labelled_as_no_gpu() -> None:
    timer = CallTimer(ReferenceKernel(), CPU)
    assert timer.label == "CPU, reference kernel (no GPU was measured)"
    assert timer.dtype == torch.float32


def test_a_kernel_s_limit_is_passed_on() -> None:
    class Small(ReferenceKernel):
        def check_sizes(self, *sizes: Any) -> None:
            raise ValueError("too large")

    with pytest.raises(ValueError, match="too large"):
        CallTimer(Small(), CPU).seconds(_call())


def test_a_local_call_that_is_too_large_is_divided_by_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At most two query heads a call: two calls, of which one is run."""

    class TwoHeads(CountingKernel):
        def check_sizes(self, plan_round: Any, query_heads: int, *sizes: int) -> None:
            if query_heads > 2:
                raise ValueError("too many heads")

    kernel = TwoHeads()
    timer = CallTimer(kernel, CPU, repeats=1)
    timer.seconds(replace(_call(), part=EARLY))
    assert kernel.shapes == [(4, 2, 8), (8, 1, 8), (8, 1, 8)]
    monkeypatch.setattr(timer, "_measured", lambda call: CallSeconds(1.0, call.query_heads))
    assert timer.seconds(replace(_call(queries=2), part=EARLY)) == CallSeconds(2.0, 4.0)
    with pytest.raises(ValueError, match="too many heads"):
        timer.seconds(replace(_call(queries=3), part=FAR))


def test_a_worker_is_the_sum_of_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call takes its query rows x heads in seconds, backward twice that."""
    plan = plan_pool(
        [[100, 28], [20] * 6],
        context_parallel_size=2,
        shape=AttentionShape(query_heads=8, kv_heads=2, head_dim=8),
        config=LibraConfig(pool_size=2, block_size=16, head_split=2, chunks=2),
    )
    timer = CallTimer(ReferenceKernel(), CPU)

    def rows(call: KernelCall) -> CallSeconds:
        work = call.round.query_stop * call.query_heads
        return CallSeconds(work, 2 * work)

    monkeypatch.setattr(timer, "seconds", rows)
    for worker in range(4):
        part = plan.worker_plan(worker)
        seconds = measure_worker(worker_calls(part), timer)
        local, chunk = 8 * part.local.query.num_rows, 2 * part.num_query_rows
        assert seconds.forward[EARLY] + seconds.forward[LATE] == local
        assert seconds.forward[NEAR] == 2 * part.near.query.num_rows
        assert seconds.forward[FAR] == 2 * part.far.query.num_rows
        assert seconds.chunks == (2 if chunk else 1)
        assert seconds.forward_s == local + 2 * chunk
        assert seconds.backward_s == 2 * seconds.forward_s
        early = sum(rows(call).forward for call in worker_calls(part) if call.part == EARLY)
        assert seconds.forward[EARLY] == early


def test_host_seconds_and_gathers_are_measured() -> None:
    host = CallTimer(ReferenceKernel(), CPU, repeats=2).host_seconds(_call())
    assert host.forward > 0 and host.backward > 0
    assert gather_gb_s(CPU) > 0


def test_runs_are_timed_one_by_one() -> None:
    count = [0]

    def run() -> None:
        count[0] += 1

    assert len(run_seconds(run, CPU, 4)) == 4 and count[0] == 4
    assert median_seconds(run, CPU, repeats=3, budget_s=10) >= 0
    assert count[0] == 4 + 1 + 3


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_runs_near_its_usual_rate() -> None:
    """8K causal tokens, 32 heads of 128 on any recent data-centre GPU: 50 to 2,000 TFLOP/s."""
    from megatron_libra.executor.kernels import pick_kernel

    device = torch.device("cuda")
    kernel = pick_kernel("auto", device=device, dtype=torch.bfloat16, head_dim=128)
    call = call_of([8192], [8192], query_heads=32, kv_heads=4, head_dim=128)
    seconds = CallTimer(kernel, device).seconds(call)
    assert 50e12 < call.flops / seconds.forward < 2000e12
    assert seconds.forward < seconds.backward < 8 * seconds.forward
