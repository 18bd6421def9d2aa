"""The order of starts, waits and computation in time, with recorded stages."""

from __future__ import annotations

import pytest
import torch

from megatron_libra.executor.pipeliner import run_chunks
from megatron_libra.executor.transport import LoopbackTransport, PendingExchange, RowSplits


class Recorder:
    """Stages that write down what happens."""

    def __init__(self) -> None:
        self.events: list[str] = []

    def _start(self, name: str) -> Transfer:
        self.events.append(f"start {name}")
        return Transfer(name, self.events)

    def dispatch(self, chunk: int) -> list[Transfer]:
        return [self._start(f"in {chunk}")]

    def compute(self, chunk: int, arrived: list[torch.Tensor]) -> int:
        assert len(arrived) == 1 and int(arrived[0]) == chunk
        self.events.append(f"compute {chunk}")
        return chunk

    def send_home(self, chunk: int, computed: int) -> list[Transfer]:
        assert computed == chunk
        return [self._start(f"out {chunk}")]


class Transfer:
    def __init__(self, name: str, events: list[str]) -> None:
        self.name, self.events = name, events

    def wait(self) -> torch.Tensor:
        self.events.append(f"wait {self.name}")
        return torch.tensor(int(self.name.split()[1]))


def test_time_order() -> None:
    """Dispatch m + 1 starts before chunk m is waited for; returns are waited for at the end."""
    recorder = Recorder()
    run_chunks(3, recorder)
    assert recorder.events == [
        "start in 0",
        "start in 1", "wait in 0", "compute 0", "start out 0",
        "start in 2", "wait in 1", "compute 1", "start out 1",
        "wait in 2", "compute 2", "start out 2",
        "wait out 0", "wait out 1", "wait out 2",
    ]  # fmt: skip


def test_one_chunk() -> None:
    recorder = Recorder()
    run_chunks(1, recorder)
    expected = ["start in 0", "wait in 0", "compute 0", "start out 0", "wait out 0"]
    assert recorder.events == expected


def test_an_exchange_is_waited_for_once() -> None:
    rows = torch.ones(0, 4)
    pending = LoopbackTransport().start(rows, rows, RowSplits((0,), (0,)))
    assert pending.wait() is rows
    with pytest.raises(RuntimeError, match="already called"):
        pending.wait()
    with pytest.raises(RuntimeError, match="already called"):
        exchange = PendingExchange(rows, rows)
        exchange.wait()
        exchange.wait()
