"""Put the hooks into an unmodified Megatron, in this process only. In, out: megatron.training.

Five names are replaced, each by a function that calls the original. A tree that was patched
(patches/) calls the same functions through native.py, and is left alone.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any

import megatron.training
from megatron.training import arguments, training

from megatron_libra.integration import fixes, hooks, yaml
from megatron_libra.integration.processes import check_processes

__all__ = ["EXTENSIONS", "install", "parse_args"]

NATIVE = "libra_hooks"
"""Attribute of megatron.training.training that a patched tree sets."""


def install(settings: dict[str, Any] | None = None) -> None:
    """Make `--context-parallel-impl` known to Megatron. Call it before the training script's own
    imports.

    Args:
        settings: a run file's mapping; its words go before the command line's.
    """
    fixes.apply()
    _wrap(arguments, "parse_args", functools.partial(parse_args, settings or {}))
    if hasattr(training, NATIVE):
        return
    setattr(training, NATIVE, "installed")
    for name, extension in EXTENSIONS.items():
        _wrap(training, name, extension)
    # Scripts import it from the package, by name.
    megatron.training.pretrain = training.pretrain


def _wrap(module: Any, name: str, hook: Callable[..., Any]) -> None:
    original = getattr(module, name)

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return hook(original, *args, **kwargs)

    setattr(module, name, wrapped)


def parse_args(
    settings: dict[str, Any],
    original: Callable[..., Any],
    extra_args_provider: Callable[..., Any] | None = None,
    ignore_unknown_args: bool = False,
) -> Any:
    """Megatron's parse_args with the flags of libra, after the words of a run file.

    Args:
        settings: the run file's mapping, emptied by the first call.
        original: Megatron's function; the others are its arguments.

    Raises:
        RunError: a setting does not suit its flag, or the processes do not fit the sizes.
    """

    def provider(parser: Any) -> Any:
        if extra_args_provider is not None:
            parser = extra_args_provider(parser)
        parser = hooks.add_arguments(parser)
        fixes.repair_help(parser)
        # Now every flag is known, so a run file's keys can be checked and written as words.
        sys.argv[1:1] = yaml.expand(settings, parser)
        settings.clear()
        return parser

    parsed = original(provider, ignore_unknown_args)
    check_processes(parsed)
    return parsed


def _data_loader(original: Callable[..., Any], dataset: Any, consumed_samples: int) -> Any:
    return hooks.data_loader(dataset, consumed_samples, original)


def _data_iterators(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return hooks.data_iterators(original(*args, **kwargs))


def _training_log(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    result = original(*args, **kwargs)
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    hooks.end_iteration(given["iteration"], given["loss_dict"])
    return result


def _pretrain(original: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(*args, **kwargs)
    given.arguments["forward_step_func"] = hooks.begin(
        given.arguments["cfg_container"],
        given.arguments["forward_step_func"],
        given.arguments.get("model_provider"),
    )
    completed = False
    try:
        original(*given.args, **given.kwargs)
        completed = True
    finally:
        hooks.end(completed)


EXTENSIONS: dict[str, Callable[..., Any]] = {
    "build_pretraining_data_loader": _data_loader,
    "build_train_valid_test_data_iterators": _data_iterators,
    "training_log": _training_log,
    "pretrain": _pretrain,
}
"""Function of megatron.training.training -> what is called in its place, with it first."""
