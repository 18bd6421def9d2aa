"""Words that a command cannot take. In: an error of Typer. Out: one line with the way to the help.

Typer's classes moved between its versions, so errors are told by what they have.
"""

from __future__ import annotations

from typing import Any

__all__ = ["is_usage_error", "usage_line"]


def is_usage_error(error: Exception) -> bool:
    """Whether Typer refused the command line, and no code of ours failed."""
    return hasattr(error, "format_message")


def usage_line(error: Any) -> str:
    """What is wrong, with the value, and the help of the command that was called."""
    text = " ".join(error.format_message().replace("Value error, ", "").split()).rstrip(".")
    value = _refused_value(error)
    if value is not None and repr(value) not in text:
        text += f", not {value!r}"
    way_out = f"try {_command(getattr(error, 'ctx', None))} --help."
    # A question of its own, such as "Did you mean 'plan'?", ends a sentence.
    return f"{text} {way_out.capitalize()}" if text.endswith("?") else f"{text}; {way_out}"


def _refused_value(error: Any) -> object:
    """The value that newer versions leave to the error of Pydantic below; None if there is none."""
    errors = getattr(error.__cause__, "errors", None)
    return errors()[0].get("input") if errors else None


def _command(context: Any) -> str:
    """libra and the names of its commands down to this context."""
    names: list[str] = []
    while context is not None and context.parent is not None:
        names.insert(0, str(context.info_name))
        context = context.parent
    return " ".join(["libra", *names])
