"""Words that a command cannot take. In: an error of Typer. Out: one line with the way to the help.

Typer's classes moved between its versions, so errors are told by what they have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_libra.cli.json_reader import short

__all__ = ["is_usage_error", "usage_line"]


def is_usage_error(error: Exception) -> bool:
    """Whether Typer refused the command line, and no code of ours failed."""
    return hasattr(error, "format_message")


def usage_line(error: Any, command: Any, words: Sequence[str]) -> str:
    """What is wrong, with the value, and the help of the command that was called.

    Args:
        error: Typer's.
        command: the whole command line, as Typer builds it.
        words: of the command line, without the program's name.
    """
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    value = _refused_value(error)
    if value is not None and repr(value) not in text:
        text += f", not {short(value)}"
    way_out = f"try {' '.join(_names(command, words))} --help."
    # A question of its own, such as "Did you mean 'plan'?", ends a sentence.
    return f"{text} {way_out.capitalize()}" if text.endswith("?") else f"{text}; {way_out}"


def _refused_value(error: Any) -> object:
    """The value that newer versions leave to the error of Pydantic below; None if there is none."""
    errors = getattr(error.__cause__, "errors", None)
    return errors()[0].get("input") if errors else None


def _names(command: Any, words: Sequence[str]) -> list[str]:
    """libra and the commands that the first words name; not every error knows where it arose."""
    names = ["libra"]
    for word in words:
        command = getattr(command, "commands", {}).get(word)
        if command is None:
            break
        names.append(word)
    return names
