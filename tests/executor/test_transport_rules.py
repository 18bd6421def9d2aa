"""Transports without processes: what misuse raises, where rows stand, counters, the watchdog, who
is refused which transport. Collectives of a layer are counted with processes.
"""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.local import WorkerFailed
from megatron_libra.executor.transport import LoopbackTransport, MailboxRequest, RowTraffic
from megatron_libra.executor.transport import pick as pick_module
from megatron_libra.executor.transport.cuda_peers import peer_access_problem
from megatron_libra.executor.transport.heap import Push, heap_layout
from megatron_libra.executor.transport.peers import reached
from megatron_libra.executor.transport.pick import pick_transports
from megatron_libra.executor.transport.watchdog import Watchdog
from tests.helpers.distributed import world

CPU = torch.device("cpu")
EXAMPLE = np.array([[3, 2, 0], [1, 0, 4], [0, 5, 6]])
"""Rows from worker to worker; the diagonal stays."""


def request(worker: int, *, chunks: int = 2, width: int = 4) -> MailboxRequest:
    return MailboxRequest((RowTraffic(EXAMPLE, worker),) * chunks, width, torch.float32)


def test_traffic_of_a_worker() -> None:
    traffic = RowTraffic(EXAMPLE, 1)
    assert (traffic.send, traffic.receive) == ((1, 0, 4), (2, 0, 5))
    assert (traffic.num_sent, traffic.num_received, traffic.num_local, traffic.num_own) == (
        5, 7, 0, 5,
    )  # fmt: skip
    assert (traffic.inverse.send, traffic.inverse.receive) == (traffic.receive, traffic.send)
    assert traffic.moves and not RowTraffic(np.diag([1, 2]), 0).moves


def test_parts_of_a_mailbox_cover_it() -> None:
    """Received by chunk, then own by chunk, then one row; sent rows are the first own ones."""
    transport = LoopbackTransport()
    local = MailboxRequest((RowTraffic(np.array([[3]]), 0),) * 2, 4, torch.float32)
    (mailbox,) = transport.open([local], CPU)
    assert mailbox.rows.shape == (7, 4)
    mailbox.rows.copy_(torch.arange(28.0).view(7, 4))
    assert torch.equal(mailbox.own(1, 2), mailbox.rows[3:6])
    assert torch.equal(mailbox.own(0, 2), mailbox.rows[:6])
    assert mailbox.received(0).shape == mailbox.sent(1).shape == (0, 4)


def test_misuse_is_refused() -> None:
    """What would read, overwrite or wait for rows that are not there."""
    transport = LoopbackTransport()
    local = MailboxRequest((RowTraffic(np.array([[3]]), 0),) * 2, 4, torch.float32)
    with pytest.raises(RuntimeError, match="worker 1 of 3, the transport that of worker 0 of 1"):
        transport.open([request(1)], CPU)
    (mailbox,) = transport.open([local], CPU)
    with pytest.raises(RuntimeError, match="1 mailboxes are still open"):
        transport.open([local], CPU)
    pending = transport.start([(mailbox, 0)])
    for chunk in (0, 2, -1):
        with pytest.raises(RuntimeError, match=f"chunk {chunk} of a mailbox of 2 must be started"):
            transport.start([(mailbox, chunk)])
    with pytest.raises(RuntimeError, match="1 exchanges were not waited for"):
        transport.close([mailbox])
    pending.wait()
    with pytest.raises(RuntimeError, match="was called before"):
        pending.wait()
    with pytest.raises(RuntimeError, match="names 0 mailboxes, not the 1 that are open"):
        transport.close([])
    transport.close([mailbox])
    with pytest.raises(RuntimeError, match="not open"):
        transport.start([(mailbox, 1)])
    (again,) = transport.open([local], CPU)
    with pytest.raises(RuntimeError, match="not open"):
        transport.start([(mailbox, 1)])
    transport.close([again])


def test_where_rows_go_in_the_heap_of_a_peer() -> None:
    """Rows of 16 bytes, two chunks. Worker 0 gets 1 row a chunk, 1 gets 2 + 5, 2 gets 4."""
    narrow = MailboxRequest((RowTraffic(EXAMPLE.T.copy(), 1),), 1, torch.float16)
    layout = heap_layout([narrow, request(1)], (0, 1, 2))
    # rows: 1 * (2 + 4) + 1 and 1 * (5 + 7) + 1 and 1 * (4 + 11) + 1, of 2 bytes: one piece each
    # then 2 * (1 + 5) + 1 = 13, 2 * (7 + 5) + 1 = 25 and 2 * (4 + 11) + 1 = 31 rows of 16 bytes
    assert layout.offsets == (0, 256)
    assert layout.num_bytes == 256 + 512
    assert layout.sources == (((0, 2),), ((0, 2), (0, 2)))
    assert layout.pushes[1] == tuple(
        (
            Push(peer=2, first_row=1, num_rows=4, offset=256 + chunk * 4 * 16),
            Push(peer=0, first_row=0, num_rows=1, offset=256 + chunk * 1 * 16),
        )
        for chunk in range(2)
    )
    from_2 = heap_layout([request(2)], (0, 1, 2))
    assert from_2.pushes == (
        tuple(
            (Push(peer=1, first_row=0, num_rows=5, offset=(2 + chunk * 7) * 16),)
            for chunk in range(2)
        ),
    )


def test_only_the_rows_of_a_node_are_in_its_heap() -> None:
    """Workers 0 and 2 exchange nothing, so as one node they need no heap; 1 and 2 do."""
    still = heap_layout([request(0)], (0, 2))
    assert (still.offsets, still.uses_heap, still.pushes) == ((None,), False, (((), ()),))
    layout = heap_layout([request(1)], (1, 2))
    assert layout.sources == (((2,), (2,)),)
    # received and sent rows of worker 0 stand in the same mailbox, so offsets do not change
    first, second = layout.pushes[0]
    assert first == (Push(peer=2, first_row=1, num_rows=4, offset=0),)
    assert second == (Push(peer=2, first_row=1, num_rows=4, offset=64),)


def test_counters_may_wrap_around() -> None:
    assert reached(5, 5) and reached(6, 5) and not reached(4, 5)
    assert reached(3, 2**32 - 2) and not reached(2**32 - 2, 3)
    assert reached(3, 2**32 + 3) and reached(4, 2**32 + 3) and not reached(2, 2**32 + 3)


def watched(late: bool) -> bool:
    """A process that is watched; true if it goes on and the watchdog is content."""
    start = time.monotonic()
    dog = Watchdog(0.2, lambda: "rows are missing", grace_s=0.5)
    for _ in range(3):
        dog.add(lambda: time.monotonic() > start + (9.0 if late else 0.1))
    dog.check()
    time.sleep(0.45)
    if late:
        with pytest.raises(RuntimeError, match=r"rows are missing after 0.2 s"):
            dog.check()
    time.sleep(0.6)
    dog.check()
    return True


def test_the_watchdog_ends_a_process_that_waits_for_ever() -> None:
    """First the transport's next call raises; a process that does not care is ended."""
    assert world(watched, 1, False) == [True]
    with pytest.raises(WorkerFailed, match="SIGABRT"):
        world(watched, 1, True)


def wishes() -> list[str]:
    """Errors of wishes that cannot be met by a pool of two on the CPU, each worker on its node."""
    from megatron_libra.executor.groups import create_pool_groups

    rank = dist.get_rank()
    groups = create_pool_groups(range(2), backend="gloo", plan_ranks=[rank], node=str(rank))
    errors = []
    for wish in ("nccl", "symmetric"):
        with pytest.raises(ValueError) as error:
            pick_transports(wish, groups, CPU)
        errors.append(str(error.value))
    return errors


def test_a_wish_that_cannot_be_met_is_an_error() -> None:
    expected = [
        "transport (nccl) does not fit groups of gloo, as a run on cpu makes them; try "
        "transport=auto.",
        "transport (symmetric) needs two workers of the pool on a node; or try transport=auto.",
    ]
    assert world(wishes, 2) == [expected] * 2


def agree(problem_of: int | None) -> Any:
    """What two workers with GPUs decide, if one of them finds a problem."""
    from megatron_libra.executor.groups import create_pool_groups

    rank = dist.get_rank()
    groups = create_pool_groups(range(2), backend="gloo", plan_ranks=[rank], node="n")
    pick_module.device_identity = lambda device: f"{device.index} GPU-{rank}"
    pick_module.software_problem = lambda: "lacks a part" if rank == problem_of else None
    pick_module.peer_access_problem = lambda device, identities: None
    return pick_module._is_symmetric("auto", groups, torch.device("cuda", rank))


def test_all_workers_agree_on_the_transport() -> None:
    told = "symmetric lacks a part, says worker 1"
    assert world(agree, 2, 1) == [(False, told)] * 2
    yes = (True, "peers on a node write into each other's memory")
    assert world(agree, 2, None) == [yes] * 2


def test_gpus_must_see_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Same index twice: hidden devices. Unknown name: hidden too. No link: no peer access."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda,
        "get_device_properties",
        lambda device: SimpleNamespace(uuid=f"GPU-{device.index}"),
    )
    links = {1}
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda _, peer: peer in links)
    first = torch.device("cuda", 0)
    assert peer_access_problem(first, ["0 GPU-0", "1 GPU-1"]) is None
    hidden = peer_access_problem(first, ["0 GPU-0", "0 GPU-1"])
    assert hidden is not None and "CUDA_VISIBLE_DEVICES hides some" in hidden
    unknown = peer_access_problem(first, ["0 GPU-0", "1 GPU-7"])
    assert unknown is not None and "needs to see the GPU 1 GPU-7" in unknown
    links.clear()
    apart = peer_access_problem(first, ["0 GPU-0", "1 GPU-1"])
    assert apart == "needs peer access from cuda:0 to the GPU 1 GPU-1"


def collectives_of_a_layer(plan_bytes: bytes) -> int:
    """Collectives that one layer's forward and backward make."""
    from megatron_libra.executor.attention import libra_attention
    from megatron_libra.executor.inputs import pool_tensors, worker_tensors
    from megatron_libra.plan.pool_plan import PoolPlan
    from tests.helpers.distributed import bound_plan

    plan, calls = PoolPlan.from_bytes(plan_bytes), 0
    original = dist.all_to_all_single

    def counted(*args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        return original(*args, **options)

    dist.all_to_all_single = counted
    tensors = worker_tensors(plan, dist.get_rank(), pool_tensors(plan, 0, torch.float64))
    leaves = [tensors[name].requires_grad_() for name in "qkv"]
    libra_attention(*leaves, bound_plan(plan)).backward(tensors["dout"])
    return calls


def test_number_of_collectives() -> None:
    """M = 4 chunks, U = 2 K/V pieces: 4 + 2 in and 4 out, then 4 in and 4 + 2 out, in the near and
    in the far part; none alone."""
    from tests.helpers.cases import CASES, plan_of

    many = plan_of(CASES["chunks_share_kv_heads"], placer="paper")  # moves queries of both parts
    one = plan_of(CASES["one_worker"])
    assert world(collectives_of_a_layer, 4, many.to_bytes()) == [40] * 4
    assert world(collectives_of_a_layer, 1, one.to_bytes()) == [0]
