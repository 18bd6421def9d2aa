"""Which options a user gave. In: the command's context. Out: their spellings, or a refusal.

An option that a command would not look at is refused, never ignored: its user expects an effect.
"""

from __future__ import annotations

from collections.abc import Collection

import typer

__all__ = ["given_options", "refuse_given"]


def given_options(context: typer.Context) -> dict[str, str]:
    """Spelling by parameter name, of what the command line has; defaults are not in it."""
    spellings = {str(each.name): each.opts[0] for each in context.command.params}
    return {name: text for name, text in spellings.items() if _is_given(context, name)}


def _is_given(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def refuse_given(given: dict[str, str], names: Collection[str], why: str) -> None:
    """ValueError if one of these parameters was given; it names all that were, and why not."""
    found = [text for name, text in given.items() if name in names]
    if found:
        raise ValueError(f"{', '.join(found)}: {why}; leave out what is named.")
