"""Workers tell each other small things through torch's key-value store, without a process group.

In: what this worker says. Out: what all members said, in member order.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta

import torch.distributed as dist

__all__ = ["Meeting"]


class Meeting:
    """Members that call gather() in the same order, each as often."""

    def __init__(
        self, store: dist.Store, workers: Sequence[int], worker: int, timeout_s: float
    ) -> None:
        """Local.

        Args:
            store: reached by all members, with keys of this meeting only.
            workers: the members, ascending.
            worker: this one of them.
            timeout_s: seconds that a member may come later than this one.
        """
        self.store, self.timeout_s = store, timeout_s
        self.workers, self.worker = tuple(workers), worker
        self.place = self.workers.index(worker)
        """This member's index."""
        self._num_gathers = 0

    def gather(self, word: str = "") -> list[str]:
        """What every member said. Collective: every member calls it, so it is a barrier as well.

        Raises:
            RuntimeError: a member did not come in time; the message names it.
        """
        keys = [f"{self._num_gathers}/{worker}" for worker in self.workers]
        self._num_gathers += 1
        self.store.set(keys[self.place], word)
        try:
            self.store.wait(keys, timedelta(seconds=self.timeout_s))
        except RuntimeError as error:
            missing = [w for w, key in zip(self.workers, keys, strict=True) if not self._has(key)]
            raise RuntimeError(
                f"worker {self.worker} waited {self.timeout_s:g} s for workers {missing} of its "
                "pool; see their logs, they may have failed."
            ) from error
        return [self.store.get(key).decode() for key in keys]

    def _has(self, key: str) -> bool:
        return bool(self.store.check([key]))
