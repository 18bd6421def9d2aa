"""Kinds of options that several commands have. In: names, a help text. Out: Typer's option."""

from __future__ import annotations

from typing import Any

import typer

from megatron_libra.config import MAX_INTEGER

__all__ = ["MAX_PROCESSES", "option", "size_option"]

MAX_PROCESSES = 1024
"""All are started before the first pool is planned; more would only take memory."""


def option(names: str, help: str, **settings: Any) -> Any:
    """Names with spaces between them."""
    return typer.Option(*names.split(), help=help, **settings)


def size_option(names: str, help: str, maximum: int = MAX_INTEGER) -> Any:
    """From 1; Typer's refusal then has the option and the value as they were typed."""
    return option(names, help, min=1, max=maximum)
