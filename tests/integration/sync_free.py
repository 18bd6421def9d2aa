"""scripts/pretrain_gpt.py on GPUs; a wait for the device inside libra's code is an error.

Megatron waits for the device by itself (its logs, its checks of the loss); that is not ours.
"""

from __future__ import annotations

import functools
import runpy
from collections.abc import Callable
from typing import Any

from megatron_libra.integration.launch import finish, prepare
from tests.integration.harness import SCRIPT


def without_sync(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, raising where it would wait for the device; the first calls may allocate."""
    import torch

    calls = 0

    @functools.wraps(function)
    def watched(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        torch.cuda.set_sync_debug_mode("error" if calls > WARM_UP_CALLS else "default")
        try:
            return function(*args, **kwargs)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    return watched


WARM_UP_CALLS = 8


def main() -> None:
    """Watch the batch, the forward and the backward of attention; then train."""
    prepare()
    from megatron_libra.executor import attention
    from megatron_libra.integration.batch import BatchSplitter
    from megatron_libra.integration.core_attention import LibraAttention

    BatchSplitter.split = without_sync(BatchSplitter.split)
    LibraAttention.forward = without_sync(LibraAttention.forward)
    operator = attention._LibraAttention
    operator.backward = staticmethod(without_sync(operator.backward))
    runpy.run_path(str(SCRIPT), run_name="__main__")


if __name__ == "__main__":
    main()
    finish()
