"""Start CUDA with several hardware queues. In: a command line. Out: a started driver, a log line.

Before Blackwell, Megatron asserts CUDA_DEVICE_MAX_CONNECTIONS=1 with context or tensor parallelism
(validate_args): one hardware queue keeps kernels in the order of their launch. Its tensor-parallel
linear layers count on that, to start a collective before a matrix product
(core/tensor_parallel/layers.py); with TP = 1 nothing of Megatron does. But a transfer of NCCL then
starts only when all attention launched before it has, so none of it is hidden.

The driver reads the variable in cuInit, and never again (scripts/gpu/check_connections.py):

    start           unset, cuInit, 1 again; no context is made, and torch is not imported
    validate_args   asserts the 1
    begin           report: a line that says whether this came true
    initialize      torch.cuda.set_device makes the context, with the queues that cuInit read

So the launch starts CUDA before it imports anything. Importing Megatron is too late: where it finds
a CUDA toolkit, torch.utils.cpp_extension asks whether there is a GPU, and that calls cuInit.
"""

from __future__ import annotations

import argparse
import ctypes
import os
from collections.abc import Mapping, Sequence
from typing import Any

from megatron_libra.integration import state, yaml

__all__ = ["report", "start"]

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
SUCCESS, NOT_INITIALIZED = 0, 3
"""CUDA_SUCCESS; CUDA_ERROR_NOT_INITIALIZED: cuInit has not been called."""


def start(words: Sequence[str], settings: Mapping[str, Any] | None = None) -> None:
    """Call cuInit with CUDA_DEVICE_MAX_CONNECTIONS=1 unset, and set it again, where only Megatron's
    check wants it. Every rank, before anything else calls cuInit: later it changes nothing. Other
    values are the user's, and stay.

    Args:
        words: of the command line, which win.
        settings: a run file's mapping.

    Raises:
        RunError: a setting does not suit its flag.
    """
    try:
        flags = _read(words, settings or {})
    except argparse.ArgumentError:  # a value for a flag that takes none: Megatron's parser says so
        return
    if not _only_the_check_wants_one(flags):
        return
    driver = _driver()
    if driver is None or driver.cuDeviceGetCount(ctypes.byref(ctypes.c_int())) != NOT_INITIALIZED:
        return
    del os.environ[VARIABLE]
    try:
        if driver.cuInit(0) == SUCCESS:
            state.note_queues()
    finally:
        os.environ[VARIABLE] = "1"


def report(args: argparse.Namespace) -> str | None:
    """A line for the log: that CUDA has the queues, or that it could have them. Every rank, before
    CUDA_DEVICE_MAX_CONNECTIONS changes. None if there is nothing to say.

    Args:
        args: Megatron's validated namespace.
    """
    if state.has_queues():
        return (
            "> libra: CUDA started with several hardware queues, so that NCCL's transfers overlap "
            f"attention; {VARIABLE}=1 is there for Megatron's check alone "
            "(--libra-keep-one-queue: it holds)"
        )
    if not _only_the_check_wants_one(args):
        return None
    return (
        f"> libra: CUDA started with one hardware queue ({VARIABLE}=1) before libra could unset "
        "it, so NCCL's transfers wait for attention; start by python -m megatron_libra.run SCRIPT, "
        "or call megatron_libra.integration.launch.prepare() first in the script"
    )


def _read(words: Sequence[str], settings: Mapping[str, Any]) -> argparse.Namespace:
    """The few flags that decide, before Megatron is imported and can parse all of them."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    # Any value passes, and none: Megatron's parser says what is wrong with it.
    parser.add_argument("--context-parallel-impl", nargs="?", default="megatron")
    parser.add_argument("--tensor-model-parallel-size", nargs="?", default="1")
    for flag in ("libra-cpu", "libra-keep-one-queue", "use-mp-args-from-checkpoint-args"):
        parser.add_argument(f"--{flag}", action="store_true")
    deciding = {k: v for k, v in settings.items() if f"--{k}" in parser._option_string_actions}
    return parser.parse_known_args([*yaml.expand(deciding, parser), *words])[0]


def _only_the_check_wants_one(args: argparse.Namespace) -> bool:
    """Whether 1 is set, libra's executor runs on GPUs, and no collective of tensor parallelism
    needs the order; its size may also come from a checkpoint, which is read too late.
    """
    return (
        os.environ.get(VARIABLE) == "1"
        and args.context_parallel_impl in ("libra", "ulysses")
        and _is_one(args.tensor_model_parallel_size)
        and not args.use_mp_args_from_checkpoint_args
        and not args.libra_keep_one_queue
        and not args.libra_cpu
    )


def _is_one(value: Any) -> bool:
    """As Megatron's parser reads it."""
    try:
        return int(value) == 1
    except (TypeError, ValueError):
        return False


def _driver() -> ctypes.CDLL | None:
    """The CUDA driver, the same that torch will load; None where there is none."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
