"""scripts/pretrain_gpt.py with every device sync watched. In: its flags. Out: a model, and a count.

torch warns at each operation that waits for the device. Megatron has some of its own (logging, the
gradient norm); one whose innermost frame outside torch is libra's is an error and is printed. With
one exception: the memory that workers share over copy engines grows when a plan needs more than any
before, and that waits. It must have come to an end when half of the iterations are done.
"""

from __future__ import annotations

import runpy
import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import megatron_libra
from megatron_libra.executor.transport import cuda_peers

PACKAGE = Path(megatron_libra.__file__).parent
GROWTH = (cuda_peers.__file__, cuda_peers.CudaPeers.reserve.__name__)
"""File and name of the function that may wait."""


class SyncWatch:
    """Counts synchronizing operations by who calls them."""

    def __init__(self, iteration: Callable[[], int]) -> None:
        """iteration: how many training has done."""
        self.total = 0
        self.ours: Counter[str] = Counter()
        """Waits of libra's own code, by place."""
        self.growths: Counter[int] = Counter()
        """Waits for the growth of shared memory, by iteration."""
        self._iteration = iteration

    def show(self, message: Warning | str, *unused: Any, **unused_too: Any) -> None:
        """In place of warnings.showwarning."""
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [f for f in traceback.extract_stack()[:-1] if f"{__file__}" != f.filename]
        outside = [
            f for f in frames if "/torch/" not in f.filename and "warnings" not in f.filename
        ]
        self.total += 1
        if any((f.filename, f.name) == GROWTH for f in outside):
            self.growths[self._iteration()] += 1
        elif outside and PACKAGE in Path(outside[-1].filename).parents:
            self.ours[f"{outside[-1].filename}:{outside[-1].lineno}"] += 1

    def problem(self, train_iters: int) -> str | None:
        """What must not be; None if all is well."""
        if self.ours:
            return f"libra waits for the device: {dict(self.ours)}"
        late = sorted(iteration for iteration in self.growths if 2 * iteration >= train_iters)
        return f"shared memory still grows in iterations {late} of {train_iters}" if late else None


def main() -> str | None:
    """Train; returns the problem."""
    from megatron.training import get_args

    watch = SyncWatch(lambda: getattr(get_args(), "curr_iteration", 0))
    warnings.simplefilter("always")
    warnings.showwarning = watch.show
    torch.cuda.set_sync_debug_mode("warn")
    try:
        runpy.run_path(str(Path(__file__).parents[1] / "pretrain_gpt.py"), run_name="__main__")
    finally:
        print(
            f"device syncs: {watch.total} in all, by libra's layers: {dict(watch.ours)}, by growth "
            f"of shared memory (iteration: waits): {dict(watch.growths)}",
            flush=True,
        )
    return watch.problem(get_args().train_iters)


if __name__ == "__main__":
    raise SystemExit(main())
