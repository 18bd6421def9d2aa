"""Local worlds: results in order, and every way in which a worker can fail ends the run at once."""

from __future__ import annotations

import os
import signal
import threading
import time
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor import local
from megatron_libra.executor.local import WorkerFailed, run_workers


def rank_times(factor: int) -> tuple[int, int, int]:
    total = torch.tensor(dist.get_rank())
    dist.all_reduce(total)
    return dist.get_rank() * factor, int(total), torch.get_num_threads()


def fail_on(rank: int, how: str) -> None:
    """One rank fails while the others wait for it in a collective."""
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("the reason")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
        time.sleep(1000)
    dist.barrier()


def run(how: str, timeout_s: float = 60.0) -> float:
    """Seconds until the run fails."""
    started = time.monotonic()
    try:
        run_workers(fail_on, 3, 1, how, timeout_s=timeout_s)
    finally:
        seconds = time.monotonic() - started
    return seconds


def test_results_in_worker_order() -> None:
    assert run_workers(rank_times, 3, 10) == [(0, 3, 1), (10, 3, 1), (20, 3, 1)]
    assert run_workers(rank_times, 1, 10, num_threads=2) == [(0, 0, 2)]


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("raise", "worker 1 failed:\nTraceback .*fail_on.*ValueError: the reason"),
        ("kill", r"worker 1 ended without a result \(killed by SIGKILL\)"),
        ("exit", r"worker 1 ended without a result \(exit code 3\)"),
    ],
)
def test_a_failing_worker_ends_the_run(how: str, message: str) -> None:
    """The peers hang in a barrier with a timeout of 60 s; the run does not wait for it."""
    started = time.monotonic()
    with pytest.raises(WorkerFailed, match=f"(?s){message}"):
        run(how)
    assert time.monotonic() - started < 30


def test_a_hanging_worker_times_out() -> None:
    with pytest.raises(TimeoutError, match=r"workers \[.*1.*\] did not finish within 3 s"):
        run("hang", timeout_s=3.0)


def dies_while_it_sends(rank: int) -> torch.Tensor:
    """More than a pipe holds; the parent reads nothing before the worker is killed."""
    if dist.get_rank() == rank:
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGKILL)).start()
    return torch.zeros(2**22)


def test_a_worker_killed_while_it_sends_is_named(monkeypatch) -> None:
    def late(readers: list[Connection], timeout: float) -> list[Any]:
        time.sleep(3.0)
        return wait(readers, timeout)

    monkeypatch.setattr(local, "wait", late)
    with pytest.raises(WorkerFailed, match=r"worker 1 ended .*killed by SIGKILL"):
        run_workers(dies_while_it_sends, 2, 1, timeout_s=60)


def a_tensor() -> torch.Tensor:
    return torch.arange(3.0) + dist.get_rank()


def test_tensors_outlive_their_worker(monkeypatch) -> None:
    """Nobody looks at the results before all workers are gone."""

    def late(readers: list[Connection], timeout: float) -> list[Any]:
        time.sleep(2.0)
        return wait(readers, timeout)

    monkeypatch.setattr(local, "wait", late)
    found = run_workers(a_tensor, 2, timeout_s=60)
    assert [each.tolist() for each in found] == [[0, 1, 2], [1, 2, 3]]
