"""Read a JSON file and name every fault. In: a path. Out: JsonObject, whose getters check types."""

from __future__ import annotations

import difflib
import json
import sys
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_libra.config import MAX_INTEGER
from megatron_libra.data.json_faults import JsonFault, parse_json
from megatron_libra.data.words import MAX_DIGITS, shortened

__all__ = ["JsonObject", "read_json", "short"]

MAX_FILE_BYTES = 256 * 2**20
EXAMPLE = 'give a JSON object such as {"sequences": [[1200, 3000], [4200]], ...}'


def short(value: object, limit: int = 60) -> str:
    """A value for an error message: as JSON writes it, on one line, cut at limit characters."""
    text = repr(value) if isinstance(value, str) else json.dumps(value, default=repr)
    return shortened(text, limit)


def read_json(path: Path) -> Any:
    """The value in a JSON file.

    Raises:
        ValueError: the file cannot be read or is not strict JSON; the message says what and where,
            but not which file, which the caller knows.
    """
    try:
        return parse_json(_read_bytes(path))
    except JsonFault as fault:
        raise ValueError(f"{fault}; {fault.way_out or EXAMPLE}.") from None


def _read_bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except FileNotFoundError:
        raise ValueError("does not exist; give the path of a JSON file.") from None
    except IsADirectoryError:
        raise ValueError("is a directory; give the path of a JSON file in it.") from None
    except OSError as error:
        raise ValueError(
            f"cannot be read ({error.strerror}); check the path and its permissions."
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ValueError(
            f"is larger than {MAX_FILE_BYTES // 2**20} MiB; give one pool or one window."
        )
    return data


def _whole_number(value: object) -> int | None:
    """The number that 4292, 4292.0 and "4292" mean; none for true and 1.5."""
    if type(value) is int or isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, str) and len(value) <= MAX_DIGITS and value.strip().isdecimal():
        return int(value)
    return None


@dataclass(frozen=True, slots=True)
class JsonObject:
    """A JSON object whose getters raise ValueError with the value, the rule and a way out."""

    where: str
    """Path of the object for messages: "" at the top, "attention." inside it."""
    values: dict[str, Any]

    @classmethod
    def of(
        cls, value: Any, where: str, known: Collection[str], required: Collection[str]
    ) -> JsonObject:
        """The value as an object with known keys only and all required ones."""
        name = where.rstrip(".") or "the file"
        if not isinstance(value, dict):
            raise ValueError(
                f"{name} holds {short(value)}; it must be a JSON object with the keys "
                f"{', '.join(known)}."
            )
        for key in value:
            if key not in known:
                near = difflib.get_close_matches(key, known, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known keys: {', '.join(known)}."
                raise ValueError(f"{where}{short(key)[1:-1]} is not a known key; {hint}")
        for key in required:
            if key not in value:
                raise ValueError(
                    f"{where}{key} is missing; add it ({name} needs {', '.join(required)})."
                )
        return cls(where, value)

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        return key in self.values

    def integer(
        self, key: str, default: int = 1, maximum: int = MAX_INTEGER, minimum: int = 1
    ) -> int:
        """An integer from minimum to maximum; default stands in for a missing key and, where the
        value says no number, is the way out."""
        value = self.values.get(key, default)
        if type(value) is not int or not minimum <= value <= maximum:
            number = _whole_number(value)
            way_out = default if number is None or number < minimum else min(number, maximum)
            raise ValueError(
                f"{self.where}{key} ({short(value)}) must be an integer from {minimum} to "
                f"{maximum}; try {way_out}."
            )
        return value

    def number(self, key: str, default: float) -> float:
        """A finite number; the range is checked by whoever uses it."""
        value = self.values.get(key, default)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or abs(value) > sys.float_info.max:
            raise ValueError(f"{self.where}{key} ({short(value)}) must be a number; try {default}.")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key, default)
        if not isinstance(value, bool):
            raise ValueError(
                f"{self.where}{key} ({short(value)}) must be true or false; try {short(default)}."
            )
        return value

    def text(self, key: str, default: str) -> str:
        """A string; the choices are checked by whoever uses it."""
        value = self.values.get(key, default)
        if not isinstance(value, str):
            raise ValueError(
                f"{self.where}{key} ({short(value)}) must be a string; try {short(default)}."
            )
        return value

    def lengths(self, key: str) -> tuple[tuple[int, ...], ...]:
        """Lists of sample lengths, at least one list."""
        value = self.values[key]
        if not isinstance(value, list) or not value:
            raise ValueError(
                f"{self.where}{key} ({short(value)}) must be a non-empty list of lists of lengths; "
                "try [[1200, 3000], [4200]]."
            )
        return tuple(
            self._one_sequence(f"{self.where}{key}[{i}]", item) for i, item in enumerate(value)
        )

    @staticmethod
    def _one_sequence(name: str, value: object) -> tuple[int, ...]:
        if not isinstance(value, list):
            raise ValueError(
                f"{name} ({short(value)}) must be a list of sample lengths; try [1200, 3000]."
            )
        for i, length in enumerate(value):
            if type(length) is not int or not 0 <= length <= MAX_INTEGER:
                raise ValueError(
                    f"{name}[{i}] ({short(length)}) must be a number of tokens, an integer from 0 "
                    f"to {MAX_INTEGER}; give the sample's length or remove it."
                )
        return tuple(value)
