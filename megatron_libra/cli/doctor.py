"""What this machine can do. In: packages and devices. Out: a report; gaps say how to fill them."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from itertools import permutations
from typing import Any

from megatron_libra import __version__
from megatron_libra.config import CHOICES
from megatron_libra.extras import Extra, install_hint

__all__ = ["examine"]

PACKAGES = (
    "numpy",
    "torch",
    "megatron-core",
    "transformer-engine",
    "flash-attn-4",
    "flash-attn",
    "cuda-bindings",
    "triton",
    "psutil",
    "tensorboard",
    "matplotlib",
    "pyarrow",
    "PyYAML",
)
USUAL_HEAD_DIM = 128


def examine() -> dict[str, Any]:
    """Versions, kernels, transports and tasks of this machine; nothing is changed."""
    devices = _cuda_devices()
    return {
        "versions": _versions(devices),
        "kernels": _kernels(devices),
        "transports": _transports(devices),
        "tasks": _tasks(devices),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _has(module: str) -> bool:
    """Whether a module is installed, without importing more than its parents."""
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _versions(devices: list[str] | None) -> dict[str, str | None]:
    versions: dict[str, str | None] = {
        "megatron_libra": __version__,
        "python": platform.python_version(),
    }
    versions |= {package: _version(package) for package in PACKAGES}
    versions["CUDA devices"] = ", ".join(devices) if devices else "none"
    return versions


def _cuda_devices() -> list[str] | None:
    """Names of the CUDA devices; None without torch."""
    if not _has("torch"):
        return None
    import torch

    if not torch.cuda.is_available():
        return []
    return [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]


def _entry(usable: bool, note: str) -> dict[str, Any]:
    return {"usable": usable, "note": note}


def _kernels(devices: list[str] | None) -> dict[str, Any]:
    """The kernels of LibraConfig.kernel, best first."""
    names = [name for name in CHOICES["kernel"] if name != "auto"]
    if devices is None:
        missing = _entry(False, "torch is missing: " + install_hint("megatron"))
        return dict.fromkeys(names, missing)
    import torch

    from megatron_libra.executor.kernels.interface import KernelUnavailable
    from megatron_libra.executor.kernels.pick import BEST_FIRST

    found = {}
    for name, offer in BEST_FIRST.items():
        if not devices:
            found[name] = _entry(False, "needs a CUDA device; none found")
            continue
        try:
            offer(torch.device("cuda"), USUAL_HEAD_DIM, False)
            found[name] = _entry(True, "float16 and bfloat16")
        except KernelUnavailable as reason:
            found[name] = _entry(False, str(reason))
    return found | {"reference": _entry(True, "any dtype, CPU and CUDA; exact, not fast")}


def _transports(devices: list[str] | None) -> dict[str, Any]:
    if devices is None:
        missing = _entry(False, "torch is missing: " + install_hint("megatron"))
        return {"symmetric": missing, "nccl": missing, "gloo": missing}
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    if not (dist.is_available() and dist.is_nccl_available()):
        nccl = _entry(False, "this torch is built without NCCL; install a CUDA build of torch")
    elif not devices:
        nccl = _entry(False, "needs CUDA devices; none found")
    else:
        nccl = _entry(True, f"{len(devices)} device(s) on this host")
    gloo_note = "CPU tensors, any host" if gloo else "this torch is built without gloo"
    return {"symmetric": _symmetric(devices), "nccl": nccl, "gloo": _entry(gloo, gloo_note)}


def _symmetric(devices: list[str]) -> dict[str, Any]:
    """Copy engines between the GPUs of this host."""
    import torch

    if not devices:
        return _entry(False, "needs CUDA devices; none found (on the CPU: for libra verify)")
    pairs = permutations(range(len(devices)), 2)
    apart = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
    if apart:
        return _entry(False, f"GPUs {apart[0][0]} and {apart[0][1]} cannot access each other")
    if not _has("cuda.bindings"):
        return _entry(False, "cuda-bindings is missing: pip install cuda-bindings")
    return _entry(True, "copy engines inside a node, nccl between nodes")


def _tasks(devices: list[str] | None) -> dict[str, Any]:
    """What a person wants to do, and the extra that is missing for it."""
    wanted: dict[str, tuple[tuple[str, ...], Extra]] = {
        "train with Megatron": (("torch", "megatron.core", "psutil", "yaml"), "megatron"),
        "libra verify, calibrate, replay --measure": (("torch",), "megatron"),
        "FlashAttention-4, the fastest kernel on Hopper": (("flash_attn.cute",), "fa4"),
        "plots of the quickstart and of libra simulate --html": (("matplotlib",), "plots"),
        "lengths from Parquet": (("pyarrow",), "parquet"),
    }
    tasks: dict[str, Any] = {
        "libra plan, order, lengths, simulate, bench, replay": _entry(True, "numpy is enough"),
    }
    for task, (modules, extra) in wanted.items():
        missing = [module for module in modules if not _has(module)]
        note = f"missing {', '.join(missing)}: {install_hint(extra)}" if missing else "ready"
        tasks[task] = _entry(not missing, note)
    training = tasks["train with Megatron"]
    if training["usable"] and not devices:
        training["note"] += "; without a CUDA device only with --libra-cpu"
    return tasks
