"""Say in a line what is wrong with a flag of libra. In: a parser's error. Out: lines, exit code 2.

Megatron's parser prints the help of all its flags before an error, some hundred lines, and no
suggestion. Only what the parser refuses comes here: what it takes, such as flags of the script's
own, stays as it is, and errors of other flags stay the parser's.
"""

from __future__ import annotations

import argparse
import difflib
import re
from collections.abc import Mapping
from typing import NoReturn

from megatron_libra.integration.errors import RunError, did_you_mean
from megatron_libra.integration.launch import refuse

__all__ = ["explain_faults"]

PREFIX = "libra"
CLOSE = 0.9
"""Share of equal letters from which a flag without the prefix is taken for one of ours."""
Flags = Mapping[str, argparse.Action]


def explain_faults(parser: argparse.ArgumentParser, flags: Flags) -> None:
    """From now on the parser's errors about these flags are a line each.

    Args:
        parser: it has the flags, and knows others too.
        flags: those of libra, with their dashes.
    """
    original = parser.error

    def error(message: str) -> NoReturn:
        lines = _lines(message, parser, flags)
        if lines:
            refuse(RunError("\n".join(lines)))
        original(message)

    parser.error = error  # type: ignore[method-assign]


def _lines(message: str, parser: argparse.ArgumentParser, flags: Flags) -> list[str]:
    """A line for each fault of our flags; none if the message is about others alone."""
    kind, _, rest = message.partition(": ")
    if kind == "unrecognized arguments":
        names = [word.partition("=")[0] for word in rest.split() if word.startswith("-")]
        others = parser._option_string_actions.keys() - flags.keys()
        return [
            f"{name}: no such flag; {did_you_mean(_spelled(name), flags)}"
            for name in names
            if _is_ours(_spelled(name), flags, others)
        ]
    given = re.fullmatch(r"argument (\S+)", kind)
    if given is None or given[1] not in flags:
        return []
    return [f"{given[1]}: {rest}; try {_example(given[1], flags[given[1]])}."]


def _spelled(name: str) -> str:
    """The name as flags are spelled: -libra_cpu is --libra-cpu."""
    return "--" + name.lstrip("-").replace("_", "-")


def _is_ours(name: str, flags: Flags, others: set[str]) -> bool:
    if name.startswith(f"--{PREFIX}"):
        return True
    near = difflib.get_close_matches(name, [*flags, *others], n=1, cutoff=CLOSE)
    return bool(near) and near[0] in flags


def _example(name: str, action: argparse.Action) -> str:
    if action.nargs == 0:
        return name
    value = action.metavar if action.default is None else action.default
    return f"{name} {value}"
