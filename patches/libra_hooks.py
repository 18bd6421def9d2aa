# Added by megatron_libra's scripts/apply_patches.sh, which also removes it (--undo).
"""Where megatron_libra hangs on Megatron. In: five functions of megatron.training. Out: the same,
extended.

Everything that an extension does is in megatron_libra.integration. Where that package is not
installed each function stays what it is, and only a command line that asks for libra is refused.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
import time
from collections.abc import Callable
from typing import Any

FLAGS = ("--context-parallel-impl", "--libra-")
PATIENCE_S = 10.0
INSTALLED = importlib.util.find_spec("megatron_libra") is not None


def around(function: Callable[..., Any]) -> Callable[..., Any]:
    """A decorator: calls of `function` go through megatron_libra's extension of that name."""
    if not INSTALLED:
        return _refuse_flags(function) if function.__name__ == "parse_args" else function

    @functools.wraps(function)
    def extended(*args: Any, **kwargs: Any) -> Any:
        # Not before the first call: it imports megatron.training, which is being imported now.
        from megatron_libra.integration import native

        return native.call(function, *args, **kwargs)

    return extended


def _refuse_flags(parse_args: Callable[..., Any]) -> Callable[..., Any]:
    """parse_args that exits with code 2 and one line, from rank 0, when a flag of libra is given.

    torchrun ends every process once one has exited, so the others let rank 0 be the first.
    """

    @functools.wraps(parse_args)
    def refusing(*args: Any, **kwargs: Any) -> Any:
        asked = [word for word in sys.argv[1:] if word.startswith(FLAGS)]
        if not asked:
            return parse_args(*args, **kwargs)
        if os.environ.get("RANK", "0") == "0":
            sys.stderr.write(
                f"megatron_libra: {asked[0]} needs the package megatron_libra, which "
                f"{sys.executable} does not find; install it there, or leave the flag out.\n"
            )
        else:
            time.sleep(PATIENCE_S)
        sys.exit(2)

    return refusing
