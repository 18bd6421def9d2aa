"""Peers on the CPU: every worker's heap and flags are files in memory that its peers map (Linux).

In and out: see `peers`. For `libra verify --device cpu` and tests: the protocol of `symmetric` with
real processes. The push queue is the caller itself, so everything runs in program order, the
strictest that a GPU may choose. Flags are read and written by system calls, which also order them
after the rows that were written before.
"""

from __future__ import annotations

import os
import time
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from megatron_libra.executor.transport.meeting import Meeting
from megatron_libra.executor.transport.peers import MODULUS, Copy, Flag, late, reached

__all__ = ["HostPeers"]

FLAG_BYTES = 4
FIRST_NAP_S, LONGEST_NAP_S = 2e-5, 1e-3


class HostPeers:
    """Satisfies Peers."""

    name = "host"

    def __init__(self, meeting: Meeting) -> None:
        """Local.

        Args:
            meeting: of the workers of this node; its timeout is that of every wait.
        """
        self.workers, self._worker, self._meeting = meeting.workers, meeting.worker, meeting
        self._flags: list[int] = []
        self._heaps: list[torch.Tensor] = []

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """See Peers.reserve."""
        if device.type != "cpu":
            raise ValueError(f"heaps in files are for the CPU, not {device}.")
        if not self._flags:
            with self._shared(2 * len(self.workers) * FLAG_BYTES) as paths:
                self._flags = [os.open(path, os.O_RDWR) for path in paths]
            weakref.finalize(self, _close, self._flags)
        with self._shared(num_bytes) as paths:
            self._heaps = [
                torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
                for path in paths
            ]

    def heap(self, worker: int) -> torch.Tensor:
        """See Peers.heap."""
        return self._heaps[self.workers.index(worker)]

    def fork(self) -> None:
        """See Peers.fork."""

    def join(self) -> None:
        """See Peers.join."""

    def push(self, copies: Sequence[Copy]) -> None:
        """See Peers.push."""
        for destination, source in copies:
            destination.copy_(source)

    def post(self, worker: int, flag: Flag, value: int) -> None:
        """See Peers.post."""
        written = (value % MODULUS).to_bytes(FLAG_BYTES, "little")
        os.pwrite(self._flags[self.workers.index(worker)], written, self._at(self._worker, flag))

    def hold(self, worker: int, flag: Flag, value: int) -> None:
        """See Peers.hold."""
        self.wait([worker], flag, value)

    def wait(self, workers: Sequence[int], flag: Flag, value: int) -> None:
        """See Peers.wait.

        Raises:
            RuntimeError: a member did not set its flag within the timeout; the message names it.
        """
        deadline, nap = time.monotonic() + self._meeting.timeout_s, FIRST_NAP_S
        for worker in workers:
            while not reached(self._read(worker, flag), value):
                if time.monotonic() > deadline:
                    raise RuntimeError(
                        f"{late(self._worker, flag, value, [worker])} after "
                        f"{self._meeting.timeout_s:g} s; see its log, it may have failed."
                    )
                time.sleep(nap)
                nap = min(2 * nap, LONGEST_NAP_S)

    def watch(self) -> None:
        """See Peers.watch; here each wait has the timeout."""

    def check(self) -> None:
        """See Peers.check."""

    def _read(self, worker: int, flag: Flag) -> int:
        own = self._flags[self.workers.index(self._worker)]
        return int.from_bytes(os.pread(own, FLAG_BYTES, self._at(worker, flag)), "little")

    def _at(self, worker: int, flag: Flag) -> int:
        return FLAG_BYTES * (flag * len(self.workers) + self.workers.index(worker))

    @contextmanager
    def _shared(self, num_bytes: int) -> Iterator[list[str]]:
        """Paths of a file of zeros for each member, by member, until all have opened them. The
        files have no name of their own: nothing is left behind, whoever dies."""
        handle = os.memfd_create("libra-heap")
        try:
            os.posix_fallocate(handle, 0, num_bytes)  # full memory is an error here, not later
            yield self._meeting.gather(f"/proc/{os.getpid()}/fd/{handle}")
            self._meeting.gather()
        finally:
            os.close(handle)


def _close(handles: list[int]) -> None:
    for handle in handles:
        os.close(handle)
