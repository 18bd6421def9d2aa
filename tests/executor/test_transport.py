"""Exchanges between processes, and the groups that they run on. gloo, worlds of one to four."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.groups import create_pool_groups, pool_ranks
from megatron_libra.executor.transport import AllToAllTransport, LoopbackTransport, RowSplits
from tests.helpers.distributed import world

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def exchange_uneven() -> bool:
    """Worker s sends (s + 2 d) % 3 rows to worker d; rows name both. All dtypes, two in flight."""
    size, me = dist.get_world_size(), dist.get_rank()
    transport = AllToAllTransport(dist.group.WORLD)

    def count(source: int, destination: int) -> int:
        return 0 if source == destination else (source + 2 * destination) % 3

    splits = RowSplits(
        send=tuple(count(me, d) for d in range(size)),
        receive=tuple(count(s, me) for s in range(size)),
    )
    pending = []
    for dtype in DTYPES:
        sent = [torch.full((count(me, d), 5), 10 * me + d, dtype=dtype) for d in range(size)]
        received = torch.full((splits.num_received, 5), -1, dtype=dtype)
        pending.append(transport.start(received, torch.cat(sent), splits))
    expected = torch.tensor([10 * s + me for s in range(size) for _ in range(count(s, me))])
    return all(torch.equal(p.wait()[:, 4].long(), expected) for p in pending)


def exchange_nothing() -> list[int]:
    """Only worker 0 sends, only to worker 1; then nobody sends anything."""
    me, size = dist.get_rank(), dist.get_world_size()
    transport = AllToAllTransport(dist.group.WORLD)
    none = (0,) * size
    one = tuple(int(d == 1) for d in range(size)) if me == 0 else none
    from_zero = tuple(int(s == 0) for s in range(size)) if me == 1 else none
    results = []
    for splits in (RowSplits(one, from_zero), RowSplits(none, none)):
        received = torch.empty(splits.num_received, 3)
        sent = torch.ones(splits.num_sent, 3)
        results.append(int(transport.start(received, sent, splits).wait().sum()))
    return results


def test_uneven_exchange() -> None:
    assert world(exchange_uneven, 4) == [True] * 4


def test_empty_parts_and_empty_exchanges() -> None:
    assert world(exchange_nothing, 3) == [[0, 0], [3, 0], [0, 0]]


def test_misuse_is_refused() -> None:
    """What would hang or corrupt a collective is an error before it starts."""
    loop, rows = LoopbackTransport(), torch.ones(2, 3)
    with pytest.raises(RuntimeError, match="splits name 2 workers, the pool has 1"):
        loop.start(rows[:0], rows[:0], RowSplits((0, 0), (0, 0)))
    with pytest.raises(RuntimeError, match="must not send rows to itself"):
        loop.start(rows, rows, RowSplits((2,), (2,)))
    with pytest.raises(RuntimeError, match="hold 2 and 0 rows, the splits say 0 and 0"):
        loop.start(rows[:0], rows, RowSplits((0,), (0,)))
    loop.num_workers, loop.worker = 2, 0
    with pytest.raises(RuntimeError, match="contiguous"):
        loop.start(rows[:0], torch.ones(3, 2).t(), RowSplits((0, 2), (0, 0)))


def test_pool_ranks() -> None:
    """Slices of P * CP ranks of the data x context parallel list, CP fastest."""
    ranks = list(range(0, 16, 2))
    assert pool_ranks(ranks, 2, 2) == [(0, 2, 4, 6), (8, 10, 12, 14)]
    assert pool_ranks(ranks, 8, 1) == [tuple(ranks)]
    assert pool_ranks(ranks, 1, 1) == [(rank,) for rank in ranks]
    with pytest.raises(
        ValueError, match=r"pool_size \(3\) must divide .*\(4\); try one of \[1, 2, 4\]"
    ):
        pool_ranks(ranks, 3, 2)
    with pytest.raises(ValueError, match=r"context_parallel_size \(3\) must divide the 8"):
        pool_ranks(ranks, 2, 3)


def create(split: bool) -> tuple[int, int, list[str], bool]:
    """Groups of this rank, made through a recording new_group; whether each can be used."""
    rank, calls = dist.get_rank(), []

    def new_group(**options: Any) -> Any:
        calls.append(f"{options['group_desc']} {options['backend']} {options['ranks']}")
        return dist.new_group(**options)

    ranks = [rank] if split else [0, 2] if rank % 2 == 0 else [1, 3]
    groups = create_pool_groups(ranks, backend="gloo", plan_ranks=[0, 1, 2, 3], new_group=new_group)
    total = torch.ones(1)
    for group in (groups.dispatch, groups.return_, groups.plan):
        if group is not None:
            dist.all_reduce(total, group=group)
    usable = int(total) == (4 if split else 2 * 2 * 4)
    return groups.worker, groups.num_created, calls, usable


def test_groups_of_two_pools() -> None:
    """Two groups for the rows of each pool, one for plans, made by members only."""
    for rank, (worker, created, calls, usable) in enumerate(world(create, 4, False)):
        members = [0, 2] if rank % 2 == 0 else [1, 3]
        assert (worker, created, usable) == (members.index(rank), 3, True)
        assert calls == [
            f"LIBRA_DISPATCH gloo {members}",
            f"LIBRA_RETURN gloo {members}",
            "LIBRA_PLAN gloo [0, 1, 2, 3]",
        ]


def test_a_pool_of_one_worker_needs_no_group() -> None:
    for worker, created, calls, usable in world(create, 4, True):
        assert (worker, created, usable) == (0, 1, True)
        assert calls == ["LIBRA_PLAN gloo [0, 1, 2, 3]"]


def outside() -> str:
    """A rank that is not in its pool."""
    with pytest.raises(ValueError, match=r"rank 0 must be in its pool's ranks \[1, 2\]") as error:
        create_pool_groups([1, 2], backend="gloo")
    with pytest.raises(ValueError, match=r"ranks \(\[2, 0\]\) must be ascending"):
        create_pool_groups([2, 0], backend="gloo")
    with pytest.raises(ValueError, match=r"plan_ranks \(\[1, 0\]\) must be ascending"):
        create_pool_groups([0], backend="gloo", plan_ranks=[1, 0])
    with pytest.raises(ValueError, match="backend"):
        create_pool_groups([0], backend="mpi")
    return str(error.value)


def test_a_rank_outside_the_pool_is_refused() -> None:
    assert world(outside, 1)


def sets_of_collectives(plan_bytes: bytes) -> int:
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
    """M = 4 chunks, U = 2 K/V pieces: 4 + 2 in and 4 out, then 4 in and 4 + 2 out; none alone."""
    from tests.helpers.cases import CASES, plan_of

    many, one = plan_of(CASES["chunks_share_kv_heads"]), plan_of(CASES["one_worker"])
    assert world(sets_of_collectives, 4, many.to_bytes()) == [20] * 4
    assert world(sets_of_collectives, 1, one.to_bytes()) == [0]
