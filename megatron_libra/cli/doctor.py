"""What this machine can do. In: packages and devices. Out: a report; gaps say how to fill them."""

from __future__ import annotations

import importlib.util
import platform
from importlib import metadata
from typing import Any

from megatron_libra import __version__

__all__ = ["examine"]

PACKAGES = (
    "numpy",
    "torch",
    "megatron-core",
    "transformer-engine",
    "flash-attn-4",
    "triton",
    "psutil",
    "tensorboard",
    "matplotlib",
    "pyarrow",
    "PyYAML",
)
EXTRA = "pip install 'megatron-libra[{}]'"


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
    """The kernels of LibraConfig.kernel, by name."""
    if devices is None:
        missing = _entry(False, "torch is missing: " + EXTRA.format("megatron"))
        return {"reference": missing, "torch_flash": missing}
    import torch

    if not devices:
        flash = _entry(False, "needs a CUDA device of compute capability 8.0 or newer; none found")
    elif torch.cuda.get_device_capability() < (8, 0):
        flash = _entry(False, f"needs compute capability 8.0; {devices[0]} is older")
    else:
        flash = _entry(True, "FlashAttention-2 of torch; float16 and bfloat16")
    return {
        "reference": _entry(True, "any dtype, CPU and CUDA; exact, not fast"),
        "torch_flash": flash,
    }


def _transports(devices: list[str] | None) -> dict[str, Any]:
    if devices is None:
        missing = _entry(False, "torch is missing: " + EXTRA.format("megatron"))
        return {"gloo": missing, "nccl": missing}
    import torch.distributed as dist

    gloo = dist.is_available() and dist.is_gloo_available()
    if not (dist.is_available() and dist.is_nccl_available()):
        nccl = _entry(False, "this torch is built without NCCL; install a CUDA build of torch")
    elif not devices:
        nccl = _entry(False, "needs CUDA devices; none found")
    else:
        nccl = _entry(True, f"{len(devices)} device(s) on this host")
    gloo_note = "CPU tensors, any host" if gloo else "this torch is built without gloo"
    return {"gloo": _entry(gloo, gloo_note), "nccl": nccl}


def _tasks(devices: list[str] | None) -> dict[str, Any]:
    """What a person wants to do, and the extra that is missing for it."""
    wanted = {
        "train with Megatron": (("torch", "megatron.core", "psutil", "yaml"), "megatron"),
        "libra verify": (("torch",), "megatron"),
        "plots of the quickstart and of libra simulate --html": (("matplotlib",), "plots"),
        "lengths from Parquet": (("pyarrow",), "parquet"),
    }
    tasks: dict[str, Any] = {
        "libra plan, order, lengths, simulate, bench": _entry(True, "numpy is enough"),
    }
    for task, (modules, extra) in wanted.items():
        missing = [module for module in modules if not _has(module)]
        note = f"missing {', '.join(missing)}: {EXTRA.format(extra)}" if missing else "ready"
        tasks[task] = _entry(not missing, note)
    training = tasks["train with Megatron"]
    if training["usable"] and not devices:
        training["note"] += "; without a CUDA device only with --libra-cpu"
    return tasks
