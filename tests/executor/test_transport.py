"""Transports between processes of worlds of one to four on the CPU: collectives, memory that
workers share, and both at once where a pool spans nodes.
"""

from __future__ import annotations

import random
import time
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.groups import PoolGroups, create_pool_groups
from megatron_libra.executor.transport import MailboxRequest, RowTraffic, Transport
from megatron_libra.executor.transport.pick import pick_transports
from tests.helpers.distributed import world
from tests.helpers.exchanges import Case, no_delay, run_layers

CPU = torch.device("cpu")
NODES = [(0, 0, 1, 1), (1, 0, 0, 1), (0, 1, 0), (0, 0, 0, 1), (0, 1)]


def groups_of(nodes: tuple[int, ...] | None = None, timeout_s: float = 60.0) -> PoolGroups:
    """One pool of the whole world; nodes by worker, or the one that this machine is."""
    return create_pool_groups(
        range(dist.get_world_size()),
        backend="gloo",
        plan_ranks=[dist.get_rank()],
        timeout=timedelta(seconds=timeout_s),
        node=None if nodes is None else f"node {nodes[dist.get_rank()]}",
    )


def exchange(
    wish: str, nodes: tuple[int, ...] | None, case: Case, delay_s: float
) -> tuple[str, int]:
    """The transport's name and the wrong elements; a delay makes all workers slow in turns."""
    chance = random.Random(dist.get_rank())

    def delay() -> None:
        if chance.random() < 0.2:
            time.sleep(delay_s)

    dispatch, return_ = pick_transports(wish, groups_of(nodes), CPU)
    wrong = run_layers(dispatch, return_, case, device=CPU, delay=delay if delay_s else no_delay)
    return dispatch.name, int(wrong)


@pytest.mark.parametrize("num_workers", [1, 2, 3, 4])
@pytest.mark.parametrize("wish", ["gloo", "symmetric"])
def test_rows_arrive(wish: str, num_workers: int) -> None:
    """Several mailboxes, widths and dtypes, all chunks started at once, layers of all sizes."""
    name = "loopback" if num_workers == 1 else wish
    assert world(exchange, num_workers, wish, None, Case(), 0.0) == [(name, 0)] * num_workers


@pytest.mark.parametrize("nodes", NODES)
def test_pools_that_span_nodes(nodes: tuple[int, ...]) -> None:
    wish = "symmetric" if len(set(nodes)) < len(nodes) else "auto"
    name = "symmetric + gloo" if wish == "symmetric" else "gloo"
    assert world(exchange, len(nodes), wish, nodes, Case(), 0.0) == [(name, 0)] * len(nodes)


@pytest.mark.parametrize("nodes", [None, (0, 0, 1)])
def test_slow_workers_are_not_overwritten(nodes: tuple[int, ...] | None) -> None:
    """A worker that reads late keeps its rows, however far ahead its peers are."""
    case = Case(num_layers=30, chunks=2, seed=1)
    outcomes = world(exchange, 3, "symmetric", nodes, case, 0.01)
    assert [wrong for _, wrong in outcomes] == [0, 0, 0]


def one_way(transport: Transport, rows: int, *, dtype: torch.dtype = torch.float32) -> Any:
    """An open mailbox in which worker 0 sends rows to the last worker; nobody else does."""
    matrix = np.zeros((transport.num_workers, transport.num_workers), dtype=np.int64)
    matrix[0, -1] = rows
    request = MailboxRequest((RowTraffic(matrix, transport.worker),), 8, dtype)
    (mailbox,) = transport.open([request], CPU)
    return mailbox


def heap_sizes() -> list[int]:
    """Bytes of every worker's heap after layers of growing, then of small sizes."""
    dispatch, _ = pick_transports("symmetric", groups_of(), CPU)
    sizes = []
    for rows in (0, 10, 20, 200, 10):
        mailbox = one_way(dispatch, rows)
        dispatch.start([(mailbox, 0)]).wait()
        dispatch.close([mailbox])
        sizes.append(
            sum(dispatch.peers.heap(w).numel() for w in dispatch.peers.workers) if rows else 0
        )
    return sizes


def test_heaps_grow_alike_and_not_for_every_layer() -> None:
    """Rows of 32 bytes and one more; at least half as much again; nothing moves: no heap."""
    small, large = 512, 201 * 32
    aligned = -(-large // 256) * 256
    for sizes in world(heap_sizes, 3):
        assert sizes == [0, 3 * small, 3 * 768, 3 * aligned, 3 * aligned]


def calls_of(nodes: tuple[int, ...] | None, wish: str) -> list[int]:
    """Collectives and sends of layers: nothing moves, one pair in worker order moves."""
    counts = {"n": 0}

    def counted(name: str) -> None:
        original = getattr(dist, name)

        def call(*args: Any, **options: Any) -> Any:
            counts["n"] += 1
            return original(*args, **options)

        setattr(dist, name, call)

    for name in ("all_to_all_single", "isend", "irecv"):
        counted(name)
    dispatch, _ = pick_transports(wish, groups_of(nodes), CPU)
    made = []
    for rows in (0, 3):
        counts["n"] = 0
        mailbox = one_way(dispatch, rows)
        dispatch.start([(mailbox, 0)]).wait()
        dispatch.close([mailbox])
        made.append(counts["n"])
    return made


def test_no_collective_where_nothing_moves() -> None:
    assert world(calls_of, 2, None, "gloo") == [[0, 1]] * 2
    assert world(calls_of, 2, None, "symmetric") == [[0, 0]] * 2
    assert world(calls_of, 3, (0, 0, 1), "symmetric") == [[0, 1], [0, 0], [0, 1]]


def abandoned(step: str) -> str:
    """The error of the last worker when worker 0 does not go on; nothing on the others."""
    dispatch, _ = pick_transports("symmetric", groups_of(timeout_s=1.5), CPU)
    if step == "open" and dispatch.worker == 0:
        return ""
    if dispatch.worker == dispatch.num_workers - 1:
        with pytest.raises(RuntimeError) as error:
            mailbox = one_way(dispatch, 3)
            dispatch.start([(mailbox, 0)]).wait()
        return str(error.value)
    if step == "start":
        one_way(dispatch, 3)
    return ""


@pytest.mark.parametrize(
    ("step", "message"),
    [
        ("open", "worker 1 waited 1.5 s for workers [0] of its pool"),
        ("start", "worker 1 lacks rows of exchange 1 from workers [0] after 1.5 s"),
    ],
)
def test_a_lost_worker_is_an_error_in_time(step: str, message: str) -> None:
    first, last = world(abandoned, 2, step)
    assert first == "" and message in last
