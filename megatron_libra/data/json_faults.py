"""Read a JSON text strictly. In: bytes or text. Out: its value, or why not in words of our own.

A key given twice, NaN, Infinity and 1e999 are refused: Python's reader lets them through, and they
would fail much later with a puzzling message.
"""

from __future__ import annotations

import json
import math
from typing import Any, NoReturn

from megatron_libra.data.words import shortened

__all__ = ["JsonFault", "json_fault", "parse_json"]


class JsonFault(ValueError):
    """Why a text has no value: the reason, to be put behind a name; no full stop."""

    def __init__(self, reason: str, way_out: str | None = None) -> None:
        super().__init__(reason)
        self.way_out = way_out
        """For whoever has none of its own; None: an example of a right text is one."""


def parse_json(text: bytes | str) -> Any:
    """The value of a JSON text; bytes are UTF-8, with or without a byte order mark.

    Raises:
        JsonFault: it has none.
    """
    try:
        return json.loads(
            text.decode("utf-8-sig") if isinstance(text, bytes) else text,
            parse_constant=_refuse_constant,
            parse_float=_number,
            object_pairs_hook=_unique_keys,
        )
    except JsonFault:
        raise
    except (ValueError, RecursionError) as error:
        raise json_fault(error) from None


def json_fault(error: ValueError | RecursionError) -> JsonFault:
    """An error of json.loads, given bytes or text, without a word on Python's settings."""
    if isinstance(error, RecursionError):
        return JsonFault("nests too deeply", "lists of lists of numbers are enough")
    if isinstance(error, UnicodeDecodeError):
        byte = f"byte {error.start} is 0x{error.object[error.start]:02x}"
        return JsonFault(f"is not UTF-8: {byte}", "save it as UTF-8 text")
    if not isinstance(error, json.JSONDecodeError):  # the only other one
        return JsonFault("has an integer of some thousand digits", "give a smaller one")
    if not error.doc.strip():
        return JsonFault("is empty")
    return JsonFault(
        f"is not JSON: line {error.lineno}, column {error.colno}: {error.msg}",
        "check it with: python3 -m json.tool FILE",
    )


def _refuse_constant(name: str) -> NoReturn:
    raise JsonFault(f"{name} is not a number", "give a finite one")


def _number(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise JsonFault(f"{shortened(text)} is too large for a number", "give a smaller one")
    return number


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for key, value in pairs:
        if key in values:
            raise JsonFault(f"key {shortened(json.dumps(key))} is given twice", "keep one of them")
        values[key] = value
    return values
