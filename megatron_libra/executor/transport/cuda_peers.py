"""Peers on CUDA: copy engines move the rows, stream memory operations set and await the flags.

In and out: see `peers`. Nothing here takes a multiprocessor away from attention, and the host never
waits, but for reserve(). Memory comes from torch's symmetric memory; its rendezvous needs a group
with a name, a store and ranks, which is made here without any backend, so no NCCL communicator is
added. Flags are written and awaited by cuStreamWriteValue32 and cuStreamWaitValue32: a write is
fenced system-wide against earlier work of its stream, so rows are there before their flag.
"""

from __future__ import annotations

import threading
import uuid
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron_libra.executor.transport.meeting import Meeting
from megatron_libra.executor.transport.peers import MODULUS, Copy, Flag, late, reached
from megatron_libra.executor.transport.watchdog import Watchdog

__all__ = ["CudaPeers", "device_identity", "peer_access_problem", "software_problem"]

FLAG_BYTES = 4
READ_S = 5.0
NO_FLAGS = 0  # of the stream memory operations: a fenced write; a wait for a cyclic >=


class CudaPeers:
    """Satisfies Peers. "Here" is the current stream; the push queue a high-priority stream."""

    name = "cuda"

    def __init__(self, meeting: Meeting, device: torch.device) -> None:
        """Local.

        Args:
            meeting: of the workers of this node; its timeout is also that of every wait.
            device: of this worker.
        """
        from cuda.bindings import driver

        self.workers, self._worker, self._meeting = meeting.workers, meeting.worker, meeting
        self._driver, self._device = driver, device
        self._queue = torch.cuda.Stream(device, priority=-1)
        self._queue_handle = driver.CUstream(self._queue.cuda_stream)
        self._forked, self._joined = torch.cuda.Event(), torch.cuda.Event()
        self._group: Any = None
        self._group_name = f"libra-{uuid.uuid4()}"  # known in this process only
        self._flags: list[torch.Tensor] = []
        self._heaps: list[torch.Tensor] = []
        self._kept: dict[str, Any] = {}
        self._awaited: dict[tuple[Flag, int], int] = {}
        self._watchdog = Watchdog(meeting.timeout_s, self._missing)

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """See Peers.reserve. The host waits until all that was pushed, and all that read what
        arrived, is done."""
        if device != self._device:
            raise ValueError(f"heaps are on {self._device}, not on {device}.")
        torch.cuda.current_stream(device).synchronize()
        self._queue.synchronize()
        self._heaps = []
        self._kept.pop("heap", None)
        self._meeting.gather()  # now nobody has the old heaps mapped, so their memory is free
        if self._group is None:
            self._group = self._join_group()
            self._flags = self._share("flags", 2 * len(self.workers) * FLAG_BYTES)
        self._heaps = self._share("heap", num_bytes)

    def heap(self, worker: int) -> torch.Tensor:
        """See Peers.heap."""
        return self._heaps[self.workers.index(worker)]

    def fork(self) -> None:
        """See Peers.fork."""
        self._forked.record(torch.cuda.current_stream(self._device))
        self._queue.wait_event(self._forked)

    def join(self) -> None:
        """See Peers.join."""
        self._joined.record(self._queue)
        torch.cuda.current_stream(self._device).wait_event(self._joined)

    def push(self, copies: Sequence[Copy]) -> None:
        """See Peers.push. Contiguous on both sides, so each is one cudaMemcpyAsync."""
        with torch.cuda.stream(self._queue):
            for destination, source in copies:
                destination.copy_(source, non_blocking=True)

    def post(self, worker: int, flag: Flag, value: int) -> None:
        """See Peers.post."""
        address = self._address(worker, self._worker, flag)
        write = self._driver.cuStreamWriteValue32
        _check(write(self._queue_handle, address, value % MODULUS, NO_FLAGS))

    def hold(self, worker: int, flag: Flag, value: int) -> None:
        """See Peers.hold."""
        self._wait_on(self._queue_handle, worker, flag, value)

    def wait(self, workers: Sequence[int], flag: Flag, value: int) -> None:
        """See Peers.wait."""
        if workers:
            current = torch.cuda.current_stream(self._device).cuda_stream
            stream = self._driver.CUstream(current)
            for worker in workers:
                self._wait_on(stream, worker, flag, value)

    def watch(self) -> None:
        """See Peers.watch. A push queue that has come to its end has waited for every credit, and,
        as close() forks it, for the work of the caller, so for every arrival too."""
        done = torch.cuda.Event()
        done.record(self._queue)
        self._watchdog.add(done.query)

    def check(self) -> None:
        """See Peers.check."""
        self._watchdog.check()

    def _wait_on(self, stream: Any, worker: int, flag: Flag, value: int) -> None:
        self._awaited[flag, worker] = value
        address = self._address(self._worker, worker, flag)
        _check(self._driver.cuStreamWaitValue32(stream, address, value % MODULUS, NO_FLAGS))

    def _address(self, owner: int, setter: int, flag: Flag) -> int:
        base: int = self._flags[self.workers.index(owner)].data_ptr()
        return base + FLAG_BYTES * self._slot(setter, flag)

    def _slot(self, setter: int, flag: Flag) -> int:
        return flag * len(self.workers) + self.workers.index(setter)

    def _join_group(self) -> Any:
        """A process group of the members that has no backend, registered under its name."""
        from torch._C._distributed_c10d import ProcessGroup, _register_process_group

        store = dist.PrefixStore("symmetric_memory", self._meeting.store)
        group = ProcessGroup(store, self._meeting.place, len(self.workers))
        group._set_group_name(self._group_name)
        _register_process_group(self._group_name, group)  # which does not keep it alive
        return group

    def _share(self, key: str, num_bytes: int) -> list[torch.Tensor]:
        """Zeroed memory of every member, by member. Collective over the members."""
        from torch._C._distributed_c10d import _SymmetricMemory

        def allocate() -> torch.Tensor:
            return _SymmetricMemory.empty_strided_p2p((num_bytes,), (1,), torch.uint8, self._device)

        with torch.inference_mode(False):  # evaluation may come first, training later
            try:
                own = allocate()
            except RuntimeError:  # out of memory, which torch's cache may have
                torch.cuda.empty_cache()
                own = allocate()
            own.zero_()
            torch.cuda.current_stream(self._device).synchronize()  # before any member may write
            shared = _SymmetricMemory.rendezvous(own, self._group_name)
            self._kept[key] = (own, shared)
            places = range(len(self.workers))
            return [shared.get_buffer(place, (num_bytes,), torch.uint8) for place in places]

    def _missing(self) -> str:
        """The flags that have not come; called when the device may hang."""
        awaited, flags = dict(self._awaited), self._read_flags()
        if flags is None:
            return f"worker {self._worker} waits for workers {list(self.workers)} of its node"
        missing = [
            late(self._worker, flag, value, [worker])
            for (flag, worker), value in awaited.items()
            if not reached(flags[self._slot(worker, flag)], value)
        ]
        return "; ".join(missing) or f"the pushes of worker {self._worker} are not done"

    def _read_flags(self) -> list[int] | None:
        """This worker's flags; None if they cannot be read, as streams may share a queue."""
        read: list[int] = []

        def copy() -> None:
            with torch.cuda.device(self._device), torch.cuda.stream(torch.cuda.Stream()):
                own = self._flags[self.workers.index(self._worker)]
                read.extend(own.view(torch.int32).tolist())

        thread = threading.Thread(target=copy, daemon=True)
        thread.start()
        thread.join(READ_S)
        return read or None


def _check(answer: tuple[Any, ...]) -> None:
    """Raise RuntimeError unless a call of the driver succeeded."""
    if answer[0] != 0:
        raise RuntimeError(f"symmetric transport: the CUDA driver answered {answer[0]!r}.")


def software_problem() -> str | None:
    """Why torch or its companions cannot push into peers' memory here; None if they can."""
    try:
        from cuda.bindings import driver  # noqa: F401
    except ImportError:
        return "needs the package cuda-bindings (pip install cuda-bindings)"
    try:
        from torch._C._distributed_c10d import _SymmetricMemory
    except ImportError:
        return "needs a torch with symmetric memory (2.10 or later, for CUDA)"
    backend = _SymmetricMemory.get_backend(torch.device("cuda"))
    if backend != "CUDA":
        return f"needs TORCH_SYMMMEM=CUDA, not {backend}"
    return None


def device_identity(device: torch.device) -> str:
    """A GPU's index in this process and its name everywhere."""
    return f"{device.index} {torch.cuda.get_device_properties(device).uuid}"


def peer_access_problem(device: torch.device, identities: Sequence[str]) -> str | None:
    """Why a GPU cannot write into the memory of others of its node; None if it can.

    Args:
        device: of this worker.
        identities: device_identity of all workers of the node.
    """
    if len({identity.split()[0] for identity in identities}) < len(identities):
        return "needs every worker of a node to see all its GPUs (CUDA_VISIBLE_DEVICES hides some)"
    count = torch.cuda.device_count()
    visible = {device_identity(torch.device("cuda", i)).split()[1]: i for i in range(count)}
    for identity in identities:
        index = visible.get(identity.split()[1])
        if index is None:
            return f"needs to see the GPU {identity}; CUDA_VISIBLE_DEVICES hides it"
        if index != device.index and not torch.cuda.can_device_access_peer(device, index):
            return f"needs peer access from {device} to the GPU {identity}"
    return None
