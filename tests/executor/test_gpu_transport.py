"""Transports between GPUs: the same layers as on the CPU, then many with random delays, and some in
which it is an error if the host waits for a device.

Skipped, never faked, where there are not two GPUs. Worlds are of gloo, so that CUDA starts in the
function under test, with the number of hardware queues that it asks for.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.groups import PoolGroups, create_pool_groups
from megatron_libra.executor.transport import MailboxRequest, RowTraffic, Transport
from megatron_libra.executor.transport.cuda_peers import CudaPeers
from megatron_libra.executor.transport.pick import pick_transports
from megatron_libra.executor.transport.spanning import SpanningTransport
from megatron_libra.executor.transport.symmetric import SymmetricTransport
from tests.helpers.distributed import world
from tests.helpers.exchanges import Case, no_delay, run_layers

NUM_GPUS = torch.cuda.device_count()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs two CUDA devices, not {NUM_GPUS}"),
]
WORLDS = sorted({2, min(max(NUM_GPUS, 2), 8)})
SMALL, LARGE = Case(), Case(num_layers=8, max_rows=2000, width=512)
STRESS = Case(num_layers=200, chunks=4, max_rows=50, width=64, seed=3)
MOST_CYCLES = 2_000_000
"""Of a delay on a device: about a millisecond."""
queues = pytest.mark.parametrize("num_queues", [None, 1], ids=["queues", "one_queue"])
"""Hardware queues that all streams share: the driver's choice, or one, as Megatron demands."""


def device_here(num_queues: int | None) -> torch.device:
    """This worker's GPU; CUDA starts here."""
    assert not torch.cuda.is_initialized(), "the number of queues is read when CUDA starts"
    os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    if num_queues is not None:
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = str(num_queues)
    device = torch.device("cuda", dist.get_rank())
    torch.cuda.set_device(device)
    return device


def groups_here(timeout_s: float = 60.0, node: str | None = None) -> PoolGroups:
    return create_pool_groups(
        range(dist.get_world_size()),
        backend="nccl",
        plan_ranks=[dist.get_rank()],
        timeout=timedelta(seconds=timeout_s),
        node=node,
    )


def random_delay() -> Callable[[], None]:
    """Now and then this worker's stream or its host is late by up to a few milliseconds."""
    chance = random.Random(dist.get_rank())

    def delay() -> None:
        if chance.random() < 0.2:
            torch.cuda._sleep(chance.randrange(MOST_CYCLES))
        if chance.random() < 0.02:
            time.sleep(0.003)

    return delay


def wrong_elements(
    transports: tuple[Transport, Transport], case: Case, device: torch.device, delayed: bool
) -> int:
    """Twice the same layers; the second time, when all is made, a synchronization is an error."""
    delay = random_delay() if delayed else no_delay
    wrong = run_layers(*transports, case, device=device, delay=delay)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        wrong += run_layers(*transports, case, device=device, delay=delay)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return int(wrong)


def exchange(num_queues: int | None, wish: str, case: Case, delayed: bool) -> tuple[str, int]:
    device = device_here(num_queues)
    transports = pick_transports(wish, groups_here(), device)
    return transports[0].name, wrong_elements(transports, case, device, delayed)


@queues
@pytest.mark.parametrize("num_workers", WORLDS)
@pytest.mark.parametrize("wish", ["nccl", "symmetric"])
@pytest.mark.parametrize("case", [SMALL, LARGE], ids=["small", "large"])
def test_rows_arrive(case: Case, wish: str, num_workers: int, num_queues: int | None) -> None:
    outcomes = world(exchange, num_workers, num_queues, wish, case, False)
    assert outcomes == [(wish, 0)] * num_workers


@queues
@pytest.mark.parametrize("num_workers", WORLDS)
def test_many_layers_with_random_delays(num_workers: int, num_queues: int | None) -> None:
    """Workers that are ahead overwrite nothing, and nobody waits for ever."""
    outcomes = world(exchange, num_workers, num_queues, "symmetric", STRESS, True)
    assert outcomes == [("symmetric", 0)] * num_workers


def exchange_between_nodes(num_queues: int | None, nodes: tuple[int, ...]) -> int:
    """Wrong elements of a pool whose workers are said to be on several nodes."""
    device = device_here(num_queues)
    groups = groups_here(node=str(nodes[dist.get_rank()]))
    transports = []
    for purpose, group in (("dispatch", groups.dispatch), ("return", groups.return_)):
        peers = CudaPeers(groups.meeting(purpose, groups.node_workers), device)
        inside = SymmetricTransport(peers, groups.worker, len(nodes))
        transports.append(SpanningTransport(inside, group, nodes))
    dispatch, return_ = transports
    return wrong_elements((dispatch, return_), SMALL, device, True)


@queues
@pytest.mark.parametrize(
    "nodes",
    [
        (0, 1),
        pytest.param(
            (0, 0, 1, 1), marks=pytest.mark.skipif(NUM_GPUS < 4, reason="needs four GPUs")
        ),
        pytest.param(
            (0, 1, 1, 0), marks=pytest.mark.skipif(NUM_GPUS < 4, reason="needs four GPUs")
        ),
    ],
)
def test_pools_that_span_nodes(nodes: tuple[int, ...], num_queues: int | None) -> None:
    assert world(exchange_between_nodes, len(nodes), num_queues, nodes) == [0] * len(nodes)


def late_worker(num_queues: int | None) -> str:
    """Worker 0 starts three seconds after the timeout; the error that worker 1 gets until then."""
    device = device_here(num_queues)
    dispatch, _ = pick_transports("symmetric", groups_here(timeout_s=2.0), device)
    traffic = RowTraffic(np.array([[0, 3], [0, 0]]), dispatch.worker)
    (mailbox,) = dispatch.open([MailboxRequest((traffic,), 8, torch.float32)], device)
    error = ""
    if dispatch.worker == 0:
        time.sleep(5.0)
    dispatch.start([(mailbox, 0)]).wait()
    dispatch.close([mailbox])
    while dispatch.worker == 1 and not error:
        time.sleep(0.1)
        try:
            dispatch.peers.check()
        except RuntimeError as late:
            error = str(late)
    torch.cuda.synchronize()
    return error


@queues
def test_a_worker_that_does_not_come_is_an_error(num_queues: int | None) -> None:
    """The host is told, though only the device waits. With one queue it may not be told whom."""
    first, second = world(late_worker, 2, num_queues)
    assert first == "" and "worker 1 " in second and "after 2 s" in second
    if num_queues is None:
        assert "lacks rows of exchange 1 from workers [0]" in second
