"""Leave no process behind. In: a process that another one started. Out: it ends with that one.

A parent that is killed runs no `finally`: its children would compute on, or wait for it for ever.
"""

from __future__ import annotations

import multiprocessing
import os
import threading
from multiprocessing.process import BaseProcess

__all__ = ["end_with_parent"]


def end_with_parent() -> None:
    """From now on this process ends at once when the one that started it ends, however it does.

    Called in a process of multiprocessing, spawned or from a fork server.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None, "not a process of multiprocessing"
    threading.Thread(target=_follow, args=(parent,), name="libra-parent", daemon=True).start()


def _follow(parent: BaseProcess) -> None:
    parent.join()
    os._exit(1)
