"""Values of a JSON file. In: a value and its name. Out: the value with its type, or what is wrong.

Every fault is a ValueError with the name, the value and the rule, in one line.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import Any

from megatron_libra.config import MAX_INTEGER
from megatron_libra.data.words import shortened

__all__ = [
    "as_integer",
    "as_number",
    "as_numbers",
    "as_object",
    "as_text",
    "short",
]

LONGEST = 60


def short(value: object) -> str:
    """A value for an error message."""
    return shortened(json.dumps(value, default=repr), LONGEST)


def as_object(value: Any, name: str, keys: Collection[str]) -> dict[str, Any]:
    """An object with exactly these keys."""
    if not isinstance(value, dict):
        raise ValueError(f"{name} ({short(value)}) must be an object with {', '.join(keys)}")
    missing, unknown = sorted(set(keys) - set(value)), sorted(set(value) - set(keys))
    if missing or unknown:
        raise ValueError(f"{name} must have {', '.join(keys)}; missing {missing}, "
                         f"unknown {short(unknown)}")  # fmt: skip
    return value


def as_integer(value: Any, name: str, maximum: int = MAX_INTEGER, *, minimum: int = 1) -> int:
    """An integer of minimum to maximum; 8.0 and true are none."""
    if type(value) is not int or not minimum <= value <= maximum:
        raise ValueError(f"{name} ({short(value)}) must be an integer from {minimum} to {maximum}")
    return value


def as_number(value: Any, name: str, *, can_be_0: bool = False) -> float:
    """A finite number above 0, or of at least 0."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max or not (value or can_be_0):
        rule = "a number of at least 0" if can_be_0 else "a number above 0"
        raise ValueError(f"{name} ({short(value)}) must be {rule}")
    return float(value)


def as_numbers(
    value: Any, name: str, keys: Collection[str], *, can_be_0: Collection[str]
) -> dict[str, float]:
    """An object of numbers, by key."""
    given = as_object(value, name, keys)
    return {key: as_number(given[key], f"{name}.{key}", can_be_0=key in can_be_0) for key in keys}


def as_text(value: Any, name: str, choices: Collection[str] = ()) -> str:
    """A string, one of the choices if there are any."""
    if not isinstance(value, str) or (choices and value not in choices):
        rule = f"one of {', '.join(choices)}" if choices else "a string"
        raise ValueError(f"{name} ({short(value)}) must be {rule}")
    return value
