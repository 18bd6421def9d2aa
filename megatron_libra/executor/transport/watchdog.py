"""Ends a process whose GPU waits for a peer that will never write: no other timeout sees that.

In: conditions that must come true. Out: an error at the next call of the transport and, as the host
may be blocked in CUDA where no error can reach it, the end of the process a little later, with a
log message; torch's watchdog of NCCL does the same.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable

__all__ = ["Watchdog"]

logger = logging.getLogger(__name__)
GRACE_S = 30.0
LONGEST_NAP_S = 1.0


class Watchdog:
    """Watches conditions in the order in which they are added, in a thread while there are any."""

    def __init__(
        self, timeout_s: float, describe: Callable[[], str], *, grace_s: float = GRACE_S
    ) -> None:
        """Local.

        Args:
            timeout_s: seconds from add() on in which a condition must come true.
            describe: what is missing; called in the thread, when it is too late.
            grace_s: seconds for the error of check() to end the process in order.
        """
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self._describe = describe
        self._failure: str | None = None
        self._pending: deque[tuple[float, Callable[[], bool]]] = deque()
        self._lock = threading.Lock()
        self._running = False

    def add(self, done: Callable[[], bool]) -> None:
        """Watch one more condition.

        Args:
            done: true at the latest when the timeout is over; called in the thread.
        """
        with self._lock:
            self._pending.append((time.monotonic() + self.timeout_s, done))
            if self._running:
                return
            self._running = True
        threading.Thread(target=self._watch, name="libra-watchdog", daemon=True).start()

    def check(self) -> None:
        """Raise RuntimeError if a condition did not come true in time."""
        if self._failure is not None:
            raise RuntimeError(self._failure)

    def _watch(self) -> None:
        while not self._idle():
            deadline, done = self._pending[0]
            if done():
                self._pending.popleft()
            elif time.monotonic() > deadline:
                self._fail()
            else:
                time.sleep(min(LONGEST_NAP_S, self.timeout_s / 10))

    def _idle(self) -> bool:
        """Whether nothing is left to watch; then the thread ends, and add() starts another."""
        with self._lock:
            self._running = bool(self._pending)
            return not self._running

    def _fail(self) -> None:
        self._failure = f"{self._describe()} after {self.timeout_s:g} s; see their logs."
        logger.critical("%s The process ends in %g s.", self._failure, self.grace_s)
        time.sleep(self.grace_s)
        os.kill(os.getpid(), signal.SIGABRT)
