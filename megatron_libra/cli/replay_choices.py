"""Which plans a replay ran. In: Replay. Out: a line with P, B, H, M, tau and the other choices."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from megatron_libra.replay.figures import UNPOOLED
from megatron_libra.replay.methods import Method
from megatron_libra.replay.replay import Replay

__all__ = ["choices_line"]

CHOICES: Mapping[str, Callable[[Method], object]] = {
    "P": lambda method: method.config.pool_size,
    "B": lambda method: method.config.block_size,
    "H": lambda method: method.config.head_split,
    "M": lambda method: method.config.chunks or "by size",
    "tau": lambda method: f"{method.config.load_slack:g}",
    "placer": lambda method: method.config.placer,
    "scope": lambda method: method.scope,
    "backward_kv": lambda method: method.config.backward_kv,
}


def choices_line(replay: Replay) -> str:
    """Of Libra, or of the last method that has pools; a figure's several values with slashes.
    Empty if no method has pools. It ends with a line break.
    """
    methods = _methods(replay)
    if not methods:
        return ""
    choices = (f"{name} {_values(methods, value)}" for name, value in CHOICES.items())
    return f"Plans of {methods[-1].title}: {', '.join(choices)}.\n"


def _methods(replay: Replay) -> list[Method]:
    """One method's, a series each."""
    pooled = [each.method for each in replay.series if each.method.name not in UNPOOLED]
    names = [method.name for method in pooled]
    name = "libra" if "libra" in names else names[-1] if names else ""
    return [method for method in pooled if method.name == name]


def _values(methods: Sequence[Method], value: Callable[[Method], object]) -> str:
    """All different ones, in order."""
    return "/".join(dict.fromkeys(str(value(method)) for method in methods))
