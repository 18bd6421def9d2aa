"""scripts/pretrain_gpt.py with every device sync watched. In: its flags. Out: a model, and a count.

torch warns at each operation that waits for the device. Megatron has some of its own (logging, the
gradient norm); one whose innermost frame outside torch is libra's is an error and is printed.
"""

from __future__ import annotations

import runpy
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch

PACKAGE = "/megatron_libra/"


class SyncWatch:
    """Counts synchronizing operations by who calls them."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    def show(self, message: Warning | str, *unused: Any, **unused_too: Any) -> None:
        """In place of warnings.showwarning."""
        if "synchronizing CUDA operation" not in str(message):
            return
        frames = [f for f in traceback.extract_stack()[:-1] if f"{__file__}" != f.filename]
        outside = [
            f for f in frames if "/torch/" not in f.filename and "warnings" not in f.filename
        ]
        self.calls[f"{outside[-1].filename}:{outside[-1].lineno}"] += 1

    def ours(self) -> dict[str, int]:
        """Calls from libra's own code, by place."""
        return {place: n for place, n in self.calls.items() if PACKAGE in place}


if __name__ == "__main__":
    watch = SyncWatch()
    warnings.simplefilter("always")
    warnings.showwarning = watch.show
    torch.cuda.set_sync_debug_mode("warn")
    try:
        runpy.run_path(str(Path(__file__).parents[1] / "pretrain_gpt.py"), run_name="__main__")
    finally:
        print(
            f"device syncs: {sum(watch.calls.values())} in all, by libra: {watch.ours()}",
            flush=True,
        )
    if watch.ours():
        raise SystemExit(1)
