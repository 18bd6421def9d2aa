"""What the symmetric transport needs of a node: heaps that peers can write, flags, a push queue.

In: copies and flags to write, flags to wait for. Out: the same, in order. Each worker has a heap
and, apart from it, two flags for each member: ARRIVAL and CREDIT, counters that only grow. `Peers`
is implemented on CUDA by copy engines and stream memory operations, on the CPU by shared files.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Protocol

import torch

__all__ = ["ARRIVAL", "CREDIT", "MODULUS", "Copy", "Flag", "Peers", "late", "reached"]

Flag = Literal[0, 1]
ARRIVAL: Flag = 0
"""The last exchange whose rows a member has written here."""
CREDIT: Flag = 1
"""The last layer that a member has closed, so that its heap may be overwritten."""
MODULUS = 2**32
Copy = tuple[torch.Tensor, torch.Tensor]
"""Destination in a peer's heap, source."""


def reached(flag: int, value: int) -> bool:
    """Whether a 32-bit counter has come to the value; it may have wrapped around since."""
    return (flag - value) % MODULUS < MODULUS // 2


def late(worker: int, flag: Flag, value: int, peers: Sequence[int]) -> str:
    """What a worker lacks whose peers have not set a flag."""
    what = f"rows of exchange {value} from" if flag == ARRIVAL else f"the end of layer {value} at"
    return f"worker {worker} lacks {what} workers {list(peers)}"


class Peers(Protocol):
    """Memory of the members of one node, as one of them sees it.

    "Here" is the caller (CPU) or its current stream (CUDA); the push queue runs beside it.
    """

    name: str
    workers: tuple[int, ...]
    """The members, ascending; heaps and flags are named by worker."""

    def reserve(self, num_bytes: int, device: torch.device) -> None:
        """Give every member a heap of num_bytes instead of the one it has; contents undefined.

        Collective over the members, with the same number, when nothing is written any more.
        """

    def heap(self, worker: int) -> torch.Tensor:
        """(bytes,) uint8: the heap of a member, which may be written here, or this worker's own."""

    def fork(self) -> None:
        """What is pushed from now on runs after the work enqueued here so far."""

    def join(self) -> None:
        """What is enqueued here from now on runs after all that was pushed."""

    def push(self, copies: Sequence[Copy]) -> None:
        """Copy rows into views of peers' heaps, on the push queue."""

    def post(self, worker: int, flag: Flag, value: int) -> None:
        """Set this worker's flag at a member, after all that was pushed before."""

    def hold(self, worker: int, flag: Flag, value: int) -> None:
        """The push queue goes on when the flag that the member sets here has come to the value."""

    def wait(self, workers: Sequence[int], flag: Flag, value: int) -> None:
        """The work enqueued here goes on when the flags of all these members have."""

    def watch(self) -> None:
        """All that was pushed so far must be done within the timeout."""

    def check(self) -> None:
        """Raise RuntimeError if something that is watched was not done in time; the message names
        the members."""
