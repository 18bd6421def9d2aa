"""What a patched Megatron calls. In: one of its functions and the arguments. Out: its result.

patches/ decorates the functions that `install()` would replace; here the same extensions run
without the launcher, which otherwise also repairs Megatron, prints faults as lines, and starts CUDA
before the imports do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.training import get_args

from megatron_libra.integration import cpu, fixes
from megatron_libra.integration.errors import RunError
from megatron_libra.integration.install import EXTENSIONS, parse_args
from megatron_libra.integration.launch import refuse

__all__ = ["call"]


def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function of megatron.training, extended. Every rank that Megatron calls it on.

    Exits with code 2, and a line for each reason, if the run cannot be trained exactly.
    """
    extension = _parse_args if function.__name__ == "parse_args" else EXTENSIONS[function.__name__]
    try:
        if function.__name__ == "pretrain" and get_args().context_parallel_impl != "megatron":
            fixes.apply()
        return extension(function, *args, **kwargs)
    except RunError as error:
        refuse(error)


def _parse_args(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    parsed = parse_args({}, original, *args, **kwargs)
    if parsed.libra_cpu and not cpu.installed():
        raise RunError(
            "--libra-cpu must hide the GPUs before Megatron is imported; use the launcher "
            "(python -m megatron_libra.run), or call megatron_libra.integration.launch.prepare() "
            "first in the script."
        )
    return parsed
