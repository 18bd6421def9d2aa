"""Run files. In: a YAML mapping of flag names, a parser that knows them. Out: the same run as argv.

    run file                          argv
    seq-length: 4096                  --seq-length 4096
    use-distributed-optimizer: true   --use-distributed-optimizer      (false: nothing)
    data-path: [corpus/a, corpus/b]   --data-path corpus/a corpus/b

The words come before the command line's own, and argparse keeps the last, so the command line wins.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from megatron_libra.integration.errors import RunError, did_you_mean

__all__ = ["expand", "load"]


def load(path: str | Path) -> dict[str, Any]:
    """The mapping of a run file, its keys written as flags without dashes in front (seq_length:
    seq-length).

    Raises:
        RunError: the file is missing, is not YAML, is not one flat mapping, or gives a flag twice.
    """
    import yaml

    try:
        text = Path(path).read_text(encoding="utf-8")
        content, tree = yaml.safe_load(text), yaml.compose(text, yaml.SafeLoader)
    except OSError as error:
        raise RunError(
            f"--config {path}: {error.strerror}; give the path of a run file."
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise RunError(
            f"--config {path}: not YAML ({reason}); see configs/ for examples."
        ) from error
    if not isinstance(content, dict):
        raise RunError(
            f"--config {path}: must be a mapping of flags to values, like seq-length: 4096."
        )
    names = [key.value.replace("_", "-") for key, _ in tree.value]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # YAML keeps the last without a word
        raise RunError(f"--config {path}: {twice} is given twice; keep one of the lines.")
    return {str(key).replace("_", "-"): value for key, value in content.items()}


def expand(settings: dict[str, Any], parser: argparse.ArgumentParser) -> list[str]:
    """The command line words of a mapping.

    Raises:
        RunError: a key is no flag of the parser (the nearest flag is named), or a value does
        not suit it.
    """
    words: list[str] = []
    for key, value in settings.items():
        action = parser._option_string_actions.get(f"--{key}")
        if action is None:
            raise RunError(f"{key}: no such flag; {did_you_mean(key, _names(parser))}")
        words += _words(key, value, action)
    return words


def _names(parser: argparse.ArgumentParser) -> list[str]:
    return [name[2:] for name in parser._option_string_actions if name.startswith("--")]


def _words(key: str, value: Any, action: argparse.Action) -> list[str]:
    if isinstance(action, argparse.BooleanOptionalAction):
        return [f"--{key}" if _require_bool(key, value) else f"--no-{key}"]
    if action.nargs == 0:
        return [f"--{key}"] if _require_bool(key, value) else []
    values = value if isinstance(value, list) else [value]
    if isinstance(value, list) and action.nargs is None:
        raise RunError(f"{key}: {value!r} is a list; this flag takes one value.")
    return [f"--{key}", *(_word(key, each) for each in values)]


def _require_bool(key: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise RunError(f"{key}: {value!r} must be true or false; this flag takes no value.")
    return value


def _word(key: str, value: Any) -> str:
    if value is None or isinstance(value, bool | dict | list):
        raise RunError(
            f"{key}: {value!r} must be a number or a text; remove the line to leave it out."
        )
    return str(value)
