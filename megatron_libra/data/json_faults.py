"""Why a JSON text cannot be read. In: what Python's reader raised. Out: a few words of our own."""

from __future__ import annotations

import json

__all__ = ["json_fault"]


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
