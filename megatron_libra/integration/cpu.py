"""Run Megatron on CPU and gloo. In: torch, before megatron is imported. Out: torch.cuda on CPU.

For tests, the quickstart and `--libra-cpu`; never for speed. Megatron names CUDA directly in a
few dozen places (`torch.cuda.current_device()` as a device, `device="cuda"`, streams, events, the
CUDA generators). `install()` makes those few names of torch mean the CPU. Megatron itself is not
edited.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

__all__ = ["install", "installed"]

_CPU = torch.device("cpu")
_FAKE_BYTES = 1 << 34
_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "eye", "arange", "linspace"),
    *("rand", "randn", "randint", "randperm", "empty_strided"),
    *("empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like"),
)
_METHODS = ("new_empty", "new_zeros", "new_full", "new_tensor", "new_ones")
_NO_OPS = (
    *("synchronize", "empty_cache", "set_device", "set_stream", "ipc_collect", "check_error"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated"),
)
_MEMORY = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"),
    *("device_memory_used", "utilization"),
)


class _Device(str):
    """What `torch.cuda.current_device()` returns: the device "cpu", or 0 in f"cuda:{...}"."""

    def __format__(self, spec: str) -> str:
        return "0"


class _Stream:
    """A stream on a device whose work is already done when a call returns."""

    priority = 0
    cuda_stream = 0
    device = _CPU

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: Any) -> None:
        pass

    def wait_stream(self, stream: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass

    def record_event(self, event: Any = None) -> Any:
        return event or _Event()

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, -1


class _Event:
    """An event that remembers when it was recorded."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._seconds = 0.0

    def record(self, *args: Any) -> None:
        self._seconds = time.time()

    def wait(self, *args: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: _Event) -> float:
        return (other._seconds - self._seconds) * 1e3


class _Generators:
    """`torch.cuda.default_generators`: the one CPU generator, for every device."""

    def __getitem__(self, index: int) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


class _Properties:
    """Properties of the device that Megatron's start-up asks for."""

    name = "cpu"
    major, minor = 8, 0
    multi_processor_count = 1
    total_memory = _FAKE_BYTES


class _Zeros(dict[str, int]):
    def __missing__(self, key: str) -> int:
        return 0


def installed() -> bool:
    """Whether `install` has replaced torch's names in this process."""
    return isinstance(torch.cuda.current_device, functools.partial)


def install() -> bool:
    """Replace the names; call it before the first `import megatron`.

    Returns:
        False, with nothing changed, where a CUDA device exists; True otherwise.
    """
    if installed():
        return True
    if torch.cuda.is_available():
        return False
    # @jit_fuser is torch.compile, whose tracer asks the accelerator for a stream: run eagerly.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    if "torch._dynamo" in sys.modules:
        sys.modules["torch._dynamo"].config.disable = True
    _replace_device()
    _replace_streams()
    _replace_generators()
    _replace_moves()
    _replace_factories()
    _replace_presence()
    _replace_all_to_all()
    return True


def _constant(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def _called_from_megatron(depth: int = 2) -> bool:
    """Whether Megatron's code asks; torch must go on knowing that there is no GPU."""
    return str(sys._getframe(depth).f_globals.get("__name__", "")).startswith("megatron.")


def _means_cuda(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, int) and not isinstance(device, bool)


def _replace_device() -> None:
    """`device=torch.cuda.current_device()` becomes `device="cpu"`."""
    torch.cuda.current_device = functools.partial(_Device, "cpu")
    for name in _NO_OPS:
        setattr(torch.cuda, name, _constant(None))
    torch.cuda.device = torch.cuda.stream = lambda *args, **kwargs: contextlib.nullcontext()
    torch.cuda.nvtx.range_push = torch.cuda.nvtx.range_pop = _constant(None)


def _replace_streams() -> None:
    """CPU work is done when its call returns, so a stream has nothing to order."""
    stream = _Stream()
    torch.cuda.Stream, torch.cuda.Event = _Stream, _Event
    torch.cuda.current_stream = torch.cuda.default_stream = _constant(stream)
    torch.Tensor.record_stream = _constant(None)


def _replace_generators() -> None:
    """The "cuda" generator is the CPU's; its seeding must not call torch.manual_seed again."""
    cuda = torch.cuda
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.random.get_rng_state, cuda.random.set_rng_state = cuda.get_rng_state, cuda.set_rng_state
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(int(seed))
    cuda.manual_seed_all = _constant(None)
    cuda.initial_seed = torch.initial_seed
    cuda.default_generators = _Generators()
    # tensor_parallel/random.py imports these two private names.
    cuda._lazy_call = lambda call, **kwargs: call()
    cuda._lazy_init = _constant(None)
    cuda.device_ctx_manager = cuda.device


def _replace_moves() -> None:
    """`.cuda()`, `.to("cuda")` and `.pin_memory()` return the tensor they are called on."""
    torch.Tensor.cuda = torch.nn.Module.cuda = lambda self, *args, **kwargs: self
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self
    move, name = torch.Tensor.to, torch.Tensor.type

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and isinstance(args[0], str | torch.device) and _means_cuda(args[0]):
            args = (_CPU, *args[1:])
        if "device" in kwargs and _means_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        return move(self, *args, **kwargs)

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        # The optimizers compare `param.type()` with "torch.cuda.FloatTensor".
        answer = name(self, *args, **kwargs)
        if not args and not kwargs and _called_from_megatron():
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    torch.Tensor.to, torch.Tensor.type = to, type_


def _replace_factories() -> None:
    """`device="cuda"` and `pin_memory=True` of the factory functions."""

    def on_cpu(make: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make)
        def made(*args: Any, **kwargs: Any) -> Any:
            if kwargs.get("device") is not None and _means_cuda(kwargs["device"]):
                kwargs["device"] = _CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
            return make(*args, **kwargs)

        return made

    for owner, names in ((torch, _FACTORIES), (torch.Tensor, _METHODS)):
        for name in names:
            setattr(owner, name, on_cpu(getattr(owner, name)))


def _replace_presence() -> None:
    """Megatron's start-up asks for one device; torch's own code still hears that there is none."""
    cuda = torch.cuda
    cuda.is_available = lambda: _called_from_megatron()
    cuda.device_count = lambda: int(_called_from_megatron())
    cuda.get_device_properties = _constant(_Properties())
    cuda.get_device_capability = _constant((_Properties.major, _Properties.minor))
    cuda.get_device_name = _constant(_Properties.name)
    for name in _MEMORY:
        setattr(cuda, name, _constant(0))
    cuda.memory_stats = lambda *args, **kwargs: _Zeros()
    cuda.mem_get_info = _constant((_FAKE_BYTES, _FAKE_BYTES))


def _replace_all_to_all() -> None:
    """The MoE dispatcher turns split sizes into ints for CUDA tensors only; accept CPU's."""
    exchange = dist.all_to_all_single

    @functools.wraps(exchange)
    def all_to_all_single(
        output: torch.Tensor,
        input: torch.Tensor,
        output_split_sizes: Any = None,
        input_split_sizes: Any = None,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        splits = [
            sizes.tolist() if torch.is_tensor(sizes) else sizes
            for sizes in (output_split_sizes, input_split_sizes)
        ]
        return exchange(output, input, *splits, *args, **kwargs)

    dist.all_to_all_single = all_to_all_single
