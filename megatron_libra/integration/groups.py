"""Groups of this rank's pool. In: Megatron's rank lists. Out: PoolGroups and the reporting group.

A pool is a slice of one data x context parallel list, at one tensor-parallel rank and one
pipeline stage. The slices at the other tensor-parallel ranks and stages work on the same samples,
so they use the same plan. For TP = 1, CP = 2, DP = 4, PP = 2, P = 2 (16 ranks):

    pools           [0 1 2 3] [4 5 6 7] | [8 9 10 11] [12 13 14 15]
    plan groups     [0 1 2 3 8 9 10 11]   [4 5 6 7 12 13 14 15]
    report group    0 and 4, the coordinators, and 15, where Megatron writes its logs
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from megatron.core import parallel_state

from megatron_libra.executor.groups import PoolGroups, create_pool_groups, pool_ranks

__all__ = ["RunGroups", "create_run_groups", "plan_ranks", "report_ranks"]


@dataclass(frozen=True, slots=True, eq=False)
class RunGroups:
    """Every process group that libra adds to a run, as this rank sees them."""

    pool: PoolGroups
    report: dist.ProcessGroup | None
    """Gloo: one rank of each pool and the last rank; None on others, or if it is one."""
    report_ranks: tuple[int, ...]

    @property
    def num_created(self) -> int:
        """Process groups that this rank created."""
        return self.pool.num_created + (self.report is not None)


def plan_ranks(rank: int, pool: Sequence[int], model_parallel: Sequence[int]) -> tuple[int, ...]:
    """Ranks that use the plan of a pool, ascending; the first is the coordinator, which holds data.

    Megatron numbers ranks like the digits of a mixed-radix number, so a step in one direction is
    the same difference of ranks everywhere.

    Args:
        rank: this rank, a member of both lists.
        pool: ranks of its pool (same tensor-parallel rank, same stage).
        model_parallel: ranks of its replica (same data and context parallel rank).
    """
    return tuple(sorted(other - rank + member for other in model_parallel for member in pool))


def report_ranks(
    pools: Sequence[Sequence[int]], pool: Sequence[int], coordinator: int, world_size: int
) -> tuple[int, ...]:
    """The coordinators of all pools and the last rank, ascending.

    Args:
        pools: every pool of this rank's list.
        pool: this rank's pool, one of them.
        coordinator: its coordinator.
        world_size: ranks of the job.
    """
    coordinators = {other[0] - pool[0] + coordinator for other in pools}
    return tuple(sorted(coordinators | {world_size - 1}))


def create_run_groups(
    *, pool_size: int, context_parallel_size: int, backend: str, timeout: timedelta
) -> RunGroups:
    """Create this rank's groups through Megatron, which then keeps their timeouts in step with
    its own.

    Collective: every rank of the job calls it once, after Megatron has made its groups.

    Args:
        pool_size: P.
        context_parallel_size: CP.
        backend: nccl or gloo, of the groups that move rows.
        timeout: of every group.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dp_cp = _ranks(parallel_state.get_data_parallel_group(with_context_parallel=True))
    replica = _ranks(parallel_state.get_model_parallel_group())
    pools = pool_ranks(dp_cp, pool_size, context_parallel_size)
    pool = next(candidate for candidate in pools if rank in candidate)
    sharing = plan_ranks(rank, pool, replica)
    all_pools = _shifted(pools, [other - rank for other in replica])
    all_sharing = _shifted([sharing], [other[0] - pool[0] for other in pools])
    groups = create_pool_groups(
        pool,
        backend=backend,
        plan_ranks=sharing,
        new_group=_creator([all_pools, all_sharing]),
        timeout=timeout,
    )
    reporting = report_ranks(pools, pool, sharing[0], world_size)
    report = None
    if len(reporting) > 1:
        report = parallel_state.create_group(
            ranks=list(reporting), timeout=timeout, backend="gloo", group_desc="LIBRA_REPORT"
        )
    return RunGroups(
        pool=groups, report=report if rank in reporting else None, report_ranks=reporting
    )


def _ranks(group: dist.ProcessGroup) -> list[int]:
    return dist.get_process_group_ranks(group)


def _shifted(groups: Sequence[Sequence[int]], shifts: Sequence[int]) -> list[tuple[int, ...]]:
    """All groups of a kind, in the same order on every rank."""
    return sorted(tuple(rank + shift for rank in group) for group in groups for shift in shifts)


def _creator(kinds: Sequence[list[tuple[int, ...]]]) -> Callable[..., Any]:
    """A `new_group` for which every rank of the job creates every group of a kind, as Megatron
    does.

    Creation by the members alone (use_local_synchronization) names a group by the number of
    groups that a rank has; first and last pipeline stages have more than others, and so would
    wait for each other.
    """

    def new_group(ranks: Sequence[int], use_local_synchronization: bool, **options: Any) -> Any:
        kind = next(kind for kind in kinds if tuple(ranks) in kind)
        made = [parallel_state.create_group(ranks=list(group), **options) for group in kind]
        return made[kind.index(tuple(ranks))]

    return new_group
