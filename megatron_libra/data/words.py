"""Values in messages. In: a text. Out: the text, cut where it is long."""

from __future__ import annotations

__all__ = ["MAX_DIGITS", "shortened"]

MAX_DIGITS = 20
"""Of an integer that is read: Python refuses some thousand digits, in words of its own."""


def shortened(text: str, limit: int = 40) -> str:
    """At most limit characters, the last three of which are dots where it is cut."""
    return text if len(text) <= limit else text[: limit - 3] + "..."
