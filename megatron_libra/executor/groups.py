"""Process groups of one sequence pool, as few as possible (paper 3.2: a pool is P replicas x CP
ranks).

In: the ranks of a Megatron data-parallel x context-parallel list. Out: PoolGroups. NCCL keeps a
communicator (several hundred MB) for each group, so a pool gets two, dispatch and return, on
high-priority streams: at normal priority their kernels would queue behind FlashAttention's. They
take few SMs, which attention lacks. A pool of one worker gets none. Plans travel on one gloo group.
The workers of a pool learn here which of them share a node.
"""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from megatron_libra.executor.transport.meeting import Meeting

__all__ = ["PoolGroups", "create_pool_groups", "nccl_options", "pool_ranks"]

NewGroup = Callable[..., Any]
TIMEOUT = timedelta(minutes=10)
MOST_CTAS = 16
"""SMs that a group's transfers may take, a power of two. Between two H200 16 still move 170 GB/s,
more than a NIC, and cost attention half of what NCCL's own choice (260 GB/s) does."""
BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True, slots=True, eq=False)
class PoolGroups:
    """The groups that this rank is a member of."""

    ranks: tuple[int, ...]
    """Global ranks of the pool, in worker order (slot * CP + cp_rank)."""
    worker: int
    """This rank's place in `ranks`."""
    dispatch: dist.ProcessGroup | None
    """Rows on their way to the worker that computes; None for a pool of one worker."""
    return_: dist.ProcessGroup | None
    """Rows on their way home; None for a pool of one worker."""
    plan: dist.ProcessGroup | None
    """Gloo, plans and digests; None if only this rank needs the plan."""
    plan_ranks: tuple[int, ...]
    """Global ranks of the plan group, in group order."""
    nodes: tuple[int, ...]
    """The node of each worker, numbered by their first workers."""
    store: dist.Store
    """Keys of this pool only."""
    timeout: timedelta
    """After which a worker that does not answer is an error."""

    @property
    def node_workers(self) -> tuple[int, ...]:
        """Workers on this worker's node, ascending."""
        here = self.nodes[self.worker]
        return tuple(worker for worker, node in enumerate(self.nodes) if node == here)

    def meeting(self, purpose: str, workers: Sequence[int]) -> Meeting:
        """A new meeting. Local, but every one of `workers` makes the same ones for a purpose."""
        return _meeting(self.store, purpose, workers, self.worker, self.timeout)

    @property
    def num_created(self) -> int:
        """Process groups that this rank created."""
        return sum(group is not None for group in (self.dispatch, self.return_, self.plan))


def pool_ranks(
    dp_cp_ranks: Sequence[int], pool_size: int, context_parallel_size: int
) -> list[tuple[int, ...]]:
    """Cut one data-parallel x context-parallel rank list (CP fastest) into pools of P * CP ranks.

    Example: pool_ranks([0, 2, 4, 6, 8, 10, 12, 14], 2, 2) -> [(0, 2, 4, 6), (8, 10, 12, 14)].

    Raises:
        ValueError: CP does not divide the number of ranks, or P that of replicas.
    """
    data_parallel_size, rest = divmod(len(dp_cp_ranks), context_parallel_size)
    if rest:
        raise ValueError(
            f"context_parallel_size ({context_parallel_size}) must divide the "
            f"{len(dp_cp_ranks)} data x context parallel ranks; pass Megatron's group with context "
            "parallelism."
        )
    if data_parallel_size % pool_size:
        fitting = [p for p in range(1, data_parallel_size + 1) if data_parallel_size % p == 0]
        raise ValueError(
            f"pool_size ({pool_size}) must divide data_parallel_size "
            f"({data_parallel_size}); try one of {fitting}."
        )
    width = pool_size * context_parallel_size
    return [
        tuple(dp_cp_ranks[start : start + width]) for start in range(0, len(dp_cp_ranks), width)
    ]


def create_pool_groups(
    ranks: Sequence[int],
    *,
    backend: str,
    plan_ranks: Sequence[int] | None = None,
    new_group: NewGroup = dist.new_group,
    timeout: timedelta | None = None,
    node: str | None = None,
) -> PoolGroups:
    """Create this rank's groups. Collective: every rank of `ranks` and of `plan_ranks` calls it,
    once.

    Args:
        ranks: global ranks of this rank's pool, in worker order, which must be ascending: torch
            orders a group by global rank.
        backend: "nccl" or "gloo", for dispatch and return.
        plan_ranks: global ranks that need this pool's plan, ascending (with tensor or pipeline
            parallelism more than the pool); by default the pool.
        new_group: dist.new_group or Megatron's parallel_state.create_group, which keeps its timeout
            updates.
        timeout: of every group, by default the backend's own; and of all else that a worker waits
            for, by default ten minutes.
        node: what only workers of one node have in common; by default the host's name.

    Raises:
        ValueError: this rank is not in `ranks`, ranks are out of order, or an unknown backend.
        RuntimeError: a rank of the pool did not come in time.
    """
    if backend not in ("nccl", "gloo"):
        raise ValueError(f"backend ({backend!r}) must be nccl or gloo.")
    rank = dist.get_rank()
    if rank not in ranks:
        raise ValueError(f"rank {rank} must be in its pool's ranks {list(ranks)}.")
    plan_ranks = ranks if plan_ranks is None else plan_ranks
    for name, members in (("ranks", ranks), ("plan_ranks", plan_ranks)):
        if list(members) != sorted(set(members)):
            raise ValueError(
                f"{name} ({list(members)}) must be ascending: torch orders a group by global rank."
            )
    worker, store = list(ranks).index(rank), _pool_store(ranks)
    nodes = _nodes(store, len(ranks), worker, node or _this_node(), timeout or TIMEOUT)

    def create(members: Sequence[int], kind: str, purpose: str) -> dist.ProcessGroup | None:
        if len(members) == 1:
            return None
        return new_group(
            ranks=list(members),
            timeout=timeout,
            backend=kind,
            pg_options=nccl_options() if kind == "nccl" else None,
            use_local_synchronization=True,
            group_desc=f"LIBRA_{purpose}",
        )

    return PoolGroups(
        ranks=tuple(ranks),
        worker=worker,
        dispatch=create(ranks, backend, "DISPATCH"),
        return_=create(ranks, backend, "RETURN"),
        plan=create(plan_ranks, "gloo", "PLAN"),
        plan_ranks=tuple(plan_ranks),
        nodes=nodes,
        store=store,
        timeout=timeout or TIMEOUT,
    )


def nccl_options() -> Any:
    """How the groups of dispatch and return are made; NCCL_MAX_CTAS overrides MOST_CTAS."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    options.config.max_ctas = MOST_CTAS
    return options


def _pool_store(ranks: Sequence[int]) -> dist.Store:
    """Part of the job's store: pools must not read each other's keys."""
    name = hashlib.blake2b(repr(tuple(ranks)).encode(), digest_size=8).hexdigest()
    return dist.PrefixStore(f"libra/{name}", dist.distributed_c10d._get_default_store())


def _meeting(
    store: dist.Store, purpose: str, workers: Sequence[int], worker: int, timeout: timedelta
) -> Meeting:
    """Numbered by the worker's meetings for this purpose, so that none reads another's words."""
    purpose = f"{purpose}/{min(workers)}"
    name = f"{purpose}/{store.add(f'{purpose}/of/{worker}', 1)}"
    return Meeting(dist.PrefixStore(name, store), workers, worker, timeout.total_seconds())


def _nodes(
    store: dist.Store, num_workers: int, worker: int, node: str, timeout: timedelta
) -> tuple[int, ...]:
    names = _meeting(store, "nodes", range(num_workers), worker, timeout).gather(node)
    numbers = {name: number for number, name in enumerate(dict.fromkeys(names))}
    return tuple(numbers[name] for name in names)


def _this_node() -> str:
    """The host's name, and what tells hosts of one name apart."""
    boot = BOOT_ID.read_text().strip() if BOOT_ID.exists() else ""
    return f"{socket.gethostname()} {boot}"
