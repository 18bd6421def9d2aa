"""Faults of a run that its user can repair. The launcher prints them as lines, without a trace."""

from __future__ import annotations

__all__ = ["RunError"]


class RunError(ValueError):
    """A run that cannot start as it is set; the message has one line for each reason."""
