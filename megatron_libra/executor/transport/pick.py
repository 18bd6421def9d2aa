"""Choose how the rows of a pool travel. In: the wish, the pool's groups, the device. Out: the two
transports, dispatch and return, of the same kind on every worker.
"""

from __future__ import annotations

import logging
from typing import Literal

import torch
import torch.distributed as dist

from megatron_libra.executor.groups import PoolGroups
from megatron_libra.executor.transport.all_to_all import AllToAllTransport
from megatron_libra.executor.transport.cuda_peers import (
    CudaPeers,
    device_identity,
    peer_access_problem,
    software_problem,
)
from megatron_libra.executor.transport.host_peers import HostPeers
from megatron_libra.executor.transport.interface import Transport
from megatron_libra.executor.transport.loopback import LoopbackTransport
from megatron_libra.executor.transport.spanning import SpanningTransport
from megatron_libra.executor.transport.symmetric import SymmetricTransport

__all__ = ["pick_transports"]

logger = logging.getLogger(__name__)
Purpose = Literal["dispatch", "return"]


def pick_transports(
    wish: str, groups: PoolGroups, device: torch.device
) -> tuple[Transport, Transport]:
    """The transports of the two directions. `auto` is symmetric on CUDA where all GPUs of a node
    reach each other and a node has several workers, else that of the groups: nccl or gloo.

    Collective over the pool's workers if the wish is auto or symmetric and the device CUDA.

    Raises:
        ValueError: the wish cannot be met; the message names the way out.
    """
    if groups.dispatch is None or groups.return_ is None:
        return LoopbackTransport(), LoopbackTransport()
    symmetric, reason = _is_symmetric(wish, groups, device)
    if symmetric:
        dispatch = _symmetric("dispatch", groups, groups.dispatch, device)
        return_ = _symmetric("return", groups, groups.return_, device)
    else:
        dispatch, return_ = AllToAllTransport(groups.dispatch), AllToAllTransport(groups.return_)
    if groups.worker == 0:
        logger.info("pool of ranks %s: transport %s (%s)", groups.ranks, dispatch.name, reason)
    return dispatch, return_


def _is_symmetric(wish: str, groups: PoolGroups, device: torch.device) -> tuple[bool, str]:
    """Whether rows are pushed inside nodes, and why; the same on every worker."""
    backend = dist.get_backend(groups.dispatch)
    if wish in ("nccl", "gloo"):
        if wish != backend:
            raise ValueError(
                f"transport ({wish}) does not fit groups of {backend}, as a run on {device.type} "
                "makes them; try transport=auto."
            )
        return False, "as configured"
    if wish == "auto" and device.type == "cpu":
        return False, "on the CPU"
    problem = _symmetric_problem(groups, device)
    if problem is None:
        return True, "peers on a node write into each other's memory"
    if wish == "symmetric":
        raise ValueError(f"transport (symmetric) {problem}; or try transport=auto.")
    return False, f"symmetric {problem}"


def _symmetric_problem(groups: PoolGroups, device: torch.device) -> str | None:
    """Why this pool cannot use the symmetric transport; the same on every worker."""
    if len(set(groups.nodes)) == len(groups.nodes):
        return "needs two workers of the pool on a node"
    if device.type == "cpu":
        return None
    workers = range(len(groups.ranks))
    meeting = groups.meeting("gpus", workers)
    identities = meeting.gather(device_identity(device))
    near = [identities[worker] for worker in groups.node_workers]
    own = software_problem() or peer_access_problem(device, near) or ""
    problems = meeting.gather(own)
    found = [f"{text}, says worker {worker}" for worker, text in enumerate(problems) if text]
    return found[0] if found else None


def _symmetric(
    purpose: Purpose, groups: PoolGroups, group: dist.ProcessGroup, device: torch.device
) -> Transport:
    meeting = groups.meeting(purpose, groups.node_workers)
    peers = HostPeers(meeting) if device.type == "cpu" else CudaPeers(meeting, device)
    inside = SymmetricTransport(peers, groups.worker, len(groups.ranks))
    spans = len(set(groups.nodes)) > 1
    return SpanningTransport(inside, group, groups.nodes) if spans else inside
