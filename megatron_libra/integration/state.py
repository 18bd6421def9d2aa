"""The run in progress: the only global of the package. In: a Session. Out: the same, for hooks.

Megatron calls the hooks by name and hands them nothing of ours; everything else receives what it
needs. Beside the run stands how CUDA was started, once in a process and before any run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_libra.integration.session import Session

__all__ = ["clear", "get", "has_queues", "note_queues", "put"]

_session: Session | None = None
_has_queues = False


def get() -> Session | None:
    """The run in progress, or None if this process trains without libra."""
    return _session


def put(session: Session) -> None:
    """Remember the run. ValueError if there is one already."""
    global _session
    if _session is not None:
        raise ValueError(
            "a libra run is in progress in this process; close it before starting another."
        )
    _session = session


def clear() -> None:
    """Forget the run."""
    global _session
    _session = None


def has_queues() -> bool:
    """Whether libra has started CUDA in this process with several hardware queues."""
    return _has_queues


def note_queues() -> None:
    """Remember that it has."""
    global _has_queues
    _has_queues = True
