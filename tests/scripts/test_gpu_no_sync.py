"""The count of waits for the device in scripts/gpu/pretrain_no_sync.py, on made-up callers."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatron_libra.executor import attention
from megatron_libra.executor.transport import cuda_peers
from tests.scripts.gpu_scripts import on_path

MESSAGE = "called a synchronizing CUDA operation"
PEERS = cuda_peers.__file__
ATTENTION = attention.__file__


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    yield from on_path(monkeypatch)


def warn_from(watch, filename: str, function: str, message: str = MESSAGE) -> None:
    """Let a function of a file wait once."""
    scope: dict = {}
    exec(compile(f"def {function}(show, text): show(text)", filename, "exec"), scope)
    scope[function](watch.show, message)


def watch_at(now: list[int]):
    """A watch of a training that has done now[0] iterations."""
    from pretrain_no_sync import SyncWatch

    return SyncWatch(lambda: now[0])


def test_waits_are_counted_by_who_waits():
    watch = watch_at([0])
    project = Path(ATTENTION).parents[2]
    warn_from(watch, f"{project}/.venv/lib/site-packages/megatron/training/training.py", "train")
    warn_from(watch, "/home/me/megatron_libra/scripts/pretrain_gpt.py", "loss")
    warn_from(watch, ATTENTION, "forward")
    warn_from(watch, ATTENTION, "forward", "another warning")
    assert watch.total == 3
    assert watch.ours == {f"{ATTENTION}:1": 1}
    assert "attention.py" in watch.problem(train_iters=20)


def test_growth_of_shared_memory_may_wait_while_training_begins():
    now = [0]
    watch = watch_at(now)
    for now[0] in (0, 0, 3, 9):
        warn_from(watch, PEERS, "reserve")
    assert watch.total == 4 and not watch.ours
    assert watch.growths == {0: 2, 3: 1, 9: 1}
    assert watch.problem(train_iters=20) is None
    assert "9" in watch.problem(train_iters=18)


def test_any_other_wait_of_the_peers_is_a_problem():
    watch = watch_at([0])
    warn_from(watch, PEERS, "push")
    assert watch.ours and not watch.growths
    assert watch.problem(train_iters=20)
