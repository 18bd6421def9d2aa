"""Background planning: right plans, and a clear error within the timeout for all that breaks.

Layers: the planner process alone, then gloo worlds of two or three ranks.
"""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import time
from dataclasses import replace
from typing import Any

import pytest
import torch.distributed as dist

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.executor import coordinator, local
from megatron_libra.executor.coordinator import PlanCoordinator, ReadyPlan
from megatron_libra.executor.local import WorkerFailed
from megatron_libra.executor.plan_index import PlanIndex, index_plan
from megatron_libra.executor.plan_server import COMMAND, PACKAGE_ROOT, PlanServer, PlanSettings
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from megatron_libra.plan.worker_plan import WorkerPlan
from tests.helpers.distributed import world

TIMEOUT_S = 20.0
SHORT_S = 1.0
SETTINGS = PlanSettings(
    context_parallel_size=2,
    shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
    config=LibraConfig(pool_size=2, block_size=16, chunks=1, plan_timeout_s=TIMEOUT_S),
    seq_length=64,
)
POOLS = ([[64], [20, 1]], [[3, 4, 5], []], [[60], [50]])
BAD_POOLS: dict[str, Any] = {"bad lengths": [[65], []], "no lists": [5, 6]}


def expected(sequences: list[list[int]]) -> str:
    """The digest of a pool planned here."""
    return plan_pool(
        sequences,
        context_parallel_size=2,
        shape=SETTINGS.shape,
        config=SETTINGS.config,
        seq_length=64,
    ).digest


def start(settings: PlanSettings = SETTINGS, coordinator_rank: int = 0) -> PlanCoordinator:
    """A coordinator on a gloo group of the whole world."""
    group = dist.new_group(list(range(dist.get_world_size())), backend="gloo")
    dist.barrier()  # a rank that is done here may end while another still connects to it
    return PlanCoordinator(
        group, settings, worker=dist.get_rank(), coordinator_rank=coordinator_rank
    )


def outcome(coordinator: PlanCoordinator, key: object) -> tuple[str, float]:
    """What take() gives or raises, and after how many seconds."""
    started = time.monotonic()
    try:
        text = coordinator.take(key).pool.digest
    except (PlanError, ValueError) as error:
        text = f"{type(error).__name__}: {error}"
    return text, time.monotonic() - started


def test_planner_process_is_light_and_separate() -> None:
    """It imports no torch, does not run the main module again, and ends when its pipe does."""
    probe = COMMAND.replace("serve()", "print(sorted({'torch', 'numpy'} & set(sys.modules)))")
    loaded = subprocess.run(
        [sys.executable, "-c", probe, str(PACKAGE_ROOT)], capture_output=True, text=True, check=True
    )
    assert loaded.stdout.strip() == "['numpy']"
    server = PlanServer(SETTINGS)
    plan = PoolPlan.from_bytes(server.plan(POOLS[0]))
    assert plan.digest == expected(POOLS[0]) and server.pid != os.getpid()
    with pytest.raises(ValueError, match=r"sequences\[0\] sums to 65"):
        server.plan([[65], []])
    assert PoolPlan.from_bytes(server.plan(POOLS[1])).digest == expected(POOLS[1])
    server.close()
    with pytest.raises(
        PlanError, match=rf"planner process {server.pid} died \(killed by SIGKILL\)"
    ):
        server.plan(POOLS[0])


def test_planner_process_ends_with_its_parent() -> None:
    """A parent that is killed leaves no planner behind."""
    code = (
        "import pickle, sys, time; from megatron_libra.executor.plan_server import PlanServer; "
        "server = PlanServer(pickle.loads(bytes.fromhex(sys.argv[1]))); "
        "server.plan([[8], [8]]); print(server.pid, flush=True); time.sleep(100)"
    )
    arguments = [sys.executable, "-c", code, pickle.dumps(SETTINGS).hex()]
    parent = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    planner = int(parent.stdout.readline())
    os.kill(planner, 0)
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline and _is_running(planner):
        time.sleep(0.05)
    assert not _is_running(planner)


def _is_running(pid: int) -> bool:
    """False for a process that is gone or a zombie nobody has waited for yet."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def alone() -> list[str]:
    """A group of one rank needs no process group."""
    coordinator = PlanCoordinator(None, SETTINGS, worker=0)
    for number, sequences in enumerate(POOLS):
        coordinator.request(number, sequences)
    digests = [coordinator.take(number).pool.digest for number in (2, 0, 1)]
    coordinator.close()
    return digests


def test_one_rank_alone() -> None:
    assert alone() == [expected(POOLS[i]) for i in (2, 0, 1)]


def plan_ahead(coordinator_rank: int) -> tuple[list[str], float]:
    """Three plans asked for at once; only the coordinator knows the sequences."""
    coordinator = start(coordinator_rank=coordinator_rank)
    started = time.monotonic()
    for number, sequences in enumerate(POOLS):
        mine = dist.get_rank() == coordinator_rank
        coordinator.request(("train", number), sequences if mine else None)
    asked_s = time.monotonic() - started
    ready = [coordinator.take(("train", number)) for number in range(3)]
    dist.barrier()  # the training group stays usable beside the plan group
    coordinator.close()
    assert all(same_rows(each, dist.get_rank()) for each in ready)
    return [each.pool.digest for each in ready], asked_s


def same_rows(ready: ReadyPlan, worker: int) -> bool:
    """Whether the row numbers are those of the worker's part, and of no other's."""
    parts = [index_plan(ready.pool.worker_plan(number)) for number in range(4)]
    mine = pickle.dumps(ready.take_index())
    again = ready.index is None and mine == pickle.dumps(ready.take_index())
    found = [again and pickle.dumps(part) == mine for part in parts]
    return [number for number, same in enumerate(found) if same] == [worker]


@pytest.mark.parametrize("coordinator_rank", [0, 2])
def test_every_rank_gets_the_plans(coordinator_rank: int) -> None:
    for digests, asked_s in world(plan_ahead, 3, coordinator_rank):
        assert digests == [expected(sequences) for sequences in POOLS]
        assert asked_s < 1, "request() waited"


def faulty(fault: str) -> tuple[str, float]:
    """Rank 1 (or the planner) does something wrong; what this rank sees of it."""
    wrong = dist.get_rank() == 1
    timeout_s = SHORT_S if fault == "not requested" else TIMEOUT_S
    settings = replace(SETTINGS, config=replace(SETTINGS.config, plan_timeout_s=timeout_s))
    if fault == "settings" and wrong:
        settings = replace(settings, seq_length=128)
    coordinator = start(settings)
    if fault == "planner killed" and coordinator._server is not None:
        os.kill(coordinator._server.pid, signal.SIGKILL)
    if fault == "plan changed" and wrong:
        change_received_plans()
    if fault == "plan unreadable" and wrong or fault == "plan unreadable everywhere":
        PoolPlan.from_bytes = staticmethod(lambda data: 1 / 0)
    key = "other" if fault == "key" and wrong else "asked"
    if not (fault == "not requested" and wrong):
        coordinator.request(key, BAD_POOLS.get(fault, POOLS[0]))
    if fault == "rank gone" and wrong:
        os._exit(0)
    seen = outcome(coordinator, key)
    coordinator.close()
    return seen


def change_received_plans() -> None:
    """Make this rank see another plan than the one that was sent."""
    original = PoolPlan.from_bytes
    other = plan_pool(
        POOLS[1],
        context_parallel_size=2,
        shape=SETTINGS.shape,
        config=SETTINGS.config,
        seq_length=64,
    )
    PoolPlan.from_bytes = staticmethod(lambda data: other if original(data) else other)


EVERY_RANK = {
    "planner killed": r"PlanError: the planner process \d+ died \(killed by SIGKILL\); restart",
    "bad lengths": r"ValueError: sequences\[0\] sums to 65 tokens",
    "no lists": r"PlanError: the planner cannot be asked \(TypeError\(.*int.*\)\)",
    "plan unreadable everywhere": r"PlanError: plan 'asked' cannot be read; see the log",
    "key": r"PlanError: .*ranks differ in the key \(rank 0: 'asked', rank 1: 'other'\); every rank",
    "settings": r"PlanError: .*ranks differ in the settings \(rank 0: \w+, rank 1: \w+\)",
    "plan changed": r"PlanError: .*ranks differ in the digest \(rank 0: \w+, rank 1: \w+\)",
    "plan unreadable": r"PlanError: .*ranks differ in the digest \(rank 0: \w+, rank 1: none\)",
}


@pytest.mark.parametrize("fault", EVERY_RANK)
def test_a_fault_is_named_on_every_rank(fault: str) -> None:
    for text, seconds in world(faulty, 2, fault):
        pytest.raises(PlanError, _raise, text).match(EVERY_RANK[fault])
        assert seconds < TIMEOUT_S


def _raise(text: str) -> None:
    raise PlanError(text)


def test_a_plan_that_a_rank_did_not_request() -> None:
    """The rank itself is told at once, the other one after plan_timeout_s (1 s)."""
    (waiting, waited_s), (forgot, at_once_s) = world(faulty, 2, "not requested")
    assert "plan 'asked' did not come within 1 s (plan_timeout_s)" in waiting and waited_s >= 1
    assert "plan 'asked' was never requested on this rank" in forgot and at_once_s < 1


def test_a_fault_behind_the_exchange_is_named_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error may have no text of its own; its trace is kept."""

    def fail(plan: WorkerPlan) -> PlanIndex:
        raise MemoryError

    monkeypatch.setattr(coordinator, "index_plan", fail)
    plans = PlanCoordinator(None, SETTINGS, worker=0)
    plans.request(0, POOLS[0])
    with pytest.raises(PlanError, match="MemoryError") as error:
        plans.take(0)
    plans.close()
    assert error.value.__cause__ is not None
    assert isinstance(error.value.__cause__.__cause__, MemoryError)


def rank_gone() -> None:
    text, seconds = faulty("rank gone")
    assert seconds < TIMEOUT_S
    raise RuntimeError(f"seen: {text}")


def test_a_rank_that_dies_is_an_error_not_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "GRACE_S", TIMEOUT_S)  # hear the other rank, too
    with pytest.raises(WorkerFailed, match="seen: PlanError: (the plan group failed|plan 'asked')"):
        world(rank_gone, 2)


def after_a_fault() -> list[str]:
    """A bad pool does not stop the next plan; misuse is told at once."""
    coordinator = start()
    coordinator.request(0, [[65], []])
    coordinator.request(1, POOLS[0])
    with pytest.raises(ValueError, match="plan 1 was already requested"):
        coordinator.request(1, POOLS[0])
    texts = [outcome(coordinator, key)[0] for key in (0, 1, 1)]
    if coordinator.is_coordinator:
        with pytest.raises(ValueError, match="needs the sequences of plan 2"):
            coordinator.request(2)
    coordinator.close()
    return texts


def test_the_next_plan_after_a_bad_pool() -> None:
    for bad, good, again in world(after_a_fault, 2):
        assert bad.startswith("ValueError: sequences[0] sums to 65")
        assert good == expected(POOLS[0])
        assert again == "PlanError: plan 1 was never requested on this rank; request() it."


def close_with_a_backlog() -> float:
    """Seconds of close() where numbering the rows of each plan takes half a second."""

    def slow(plan: WorkerPlan) -> PlanIndex:
        time.sleep(0.5)
        return index_plan(plan)

    coordinator.index_plan = slow
    plans = start()
    for number in range(8):
        plans.request(number, POOLS[0])
    started = time.monotonic()
    plans.close()
    assert not plans._thread.is_alive()
    return time.monotonic() - started


def test_plans_that_nobody_takes_do_not_hold_up_the_end() -> None:
    assert max(world(close_with_a_backlog, 2)) < 2


def without_close() -> str:
    """A run that ends with plans still under way, closing nothing."""
    coordinator = start()
    for number in range(4):
        coordinator.request(number, POOLS[0])
    return coordinator.take(0).pool.digest


def test_a_run_that_does_not_close_still_ends() -> None:
    started = time.monotonic()
    assert world(without_close, 2) == [expected(POOLS[0])] * 2
    assert time.monotonic() - started < TIMEOUT_S
