"""Faults of a run that its user can repair. The launcher prints them as lines, without a trace."""

from __future__ import annotations

import difflib
from collections.abc import Collection

__all__ = ["RunError", "did_you_mean"]

MOST = 4
"""Flags in a suggestion."""


class RunError(ValueError):
    """A run that cannot start as it is set; the message has one line for each reason."""


def did_you_mean(name: str, known: Collection[str]) -> str:
    """The end of a line that refuses a flag: the flags that begin with the name, or the nearest.

    Args:
        name: the flag that does not exist, and
        known: those that do; all with their dashes or all without.
    """
    near = [flag for flag in sorted(known) if flag.startswith(name)]
    if not 0 < len(near) <= MOST:
        near = difflib.get_close_matches(name, known, n=1, cutoff=0.7)
    return f"did you mean {' or '.join(near)}?" if near else "the script's --help lists the flags."
