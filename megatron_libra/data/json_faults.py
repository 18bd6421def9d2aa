"""Read a JSON text strictly. In: bytes or text. Out: its value, or why not in words of our own.

A key given twice, NaN and Infinity are refused; Python's reader lets them through.
"""

from __future__ import annotations

import json
from typing import Any, NoReturn

from megatron_libra.data.words import shortened

__all__ = ["json_fault", "parse_json"]


class _Fault(ValueError):
    """A reason that parse_json found itself."""


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it has none; the reason is to be put behind a name, as that of json_fault.
    """
    try:
        return json.loads(text, parse_constant=_refuse_constant, object_pairs_hook=_unique_keys)
    except _Fault:
        raise
    except (ValueError, RecursionError) as error:
        raise ValueError(json_fault(error)) from None


def json_fault(error: ValueError | RecursionError) -> str:
    """The reason, to be put behind a name: no full stop, and no word on Python's settings.

    Args:
        error: of json.loads, given bytes or text.
    """
    if isinstance(error, RecursionError):
        return "nests too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8: byte {error.start} is 0x{error.object[error.start]:02x}"
    if not isinstance(error, json.JSONDecodeError):  # the only other one
        return "has an integer of some thousand digits"
    if not error.doc.strip():
        return "is empty"
    return f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}"


def _refuse_constant(name: str) -> NoReturn:
    raise _Fault(f"{name} is not a number")


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise _Fault(f"key {shortened(json.dumps(key))} is given twice")
        values[key] = value
    return values
