"""The groups of a pool: which ranks, how many groups, who shares a node. gloo, 1 to 4 ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron_libra.executor.groups import create_pool_groups, pool_ranks
from tests.helpers.distributed import world


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


def nodes_of_pools(names: list[str]) -> list[Any]:
    """Nodes of a pool of this rank, twice, with other names the second time; then by host name."""
    rank = dist.get_rank()
    ranks = [0, 2] if rank % 2 == 0 else [1, 3]
    found = []
    for node in (names[rank], "same", None):
        groups = create_pool_groups(ranks, backend="gloo", plan_ranks=[rank], node=node)
        found.append((groups.nodes, groups.node_workers))
    return found


def test_workers_know_who_shares_their_node() -> None:
    """Numbered by their first workers; a second pool of the same ranks reads no old names."""
    together = ((0, 0), (0, 1))
    for rank, found in enumerate(world(nodes_of_pools, 4, ["b", "x", "a", "x"])):
        apart = ((0, 1), (rank // 2,))
        assert found == [apart if rank % 2 == 0 else together, together, together]


def meet() -> list[list[str]]:
    """Two meetings for one purpose, with two words each."""
    me = dist.get_rank()
    groups = create_pool_groups(range(2), backend="gloo", plan_ranks=[me])
    meetings = [groups.meeting("test", range(2)) for _ in range(2)]
    return [meeting.gather(f"{me} {i} {j}") for j in range(2) for i, meeting in enumerate(meetings)]


def test_meetings_do_not_hear_each_other() -> None:
    expected = [[f"0 {i} {j}", f"1 {i} {j}"] for j in range(2) for i in range(2)]
    assert world(meet, 2) == [expected] * 2
