"""Which kernel is taken, what the log says of the better ones, and the way out of a wish that
cannot be met."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

from megatron_libra.config import CHOICES
from megatron_libra.executor.kernels import pick, pick_kernel
from megatron_libra.executor.kernels.interface import KernelUnavailable
from megatron_libra.executor.kernels.reference import ReferenceKernel

Offer = Any


def take(
    wish: str, device: str, dtype: torch.dtype, head_dim: int = 64, deterministic: bool = False
) -> Any:
    return pick_kernel(
        wish,
        device=torch.device(device),
        dtype=dtype,
        head_dim=head_dim,
        deterministic=deterministic,
    )


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    """Lines of pick, as if nothing had been picked in this process."""
    pick._log_once.cache_clear()
    caplog.set_level(logging.INFO, logger=pick.__name__)
    return caplog


def offers(monkeypatch: pytest.MonkeyPatch, **reasons: str) -> None:
    """Kernels with a reason cannot run; the others can, and remember what they were asked for."""

    def offer(name: str) -> Offer:
        def make(device: torch.device, head_dim: int, deterministic: bool) -> Any:
            if name in reasons:
                raise KernelUnavailable(reasons[name])
            kernel = ReferenceKernel()
            kernel.name, kernel.deterministic = name, deterministic  # type: ignore[misc]
            return kernel

        return make

    monkeypatch.setattr(pick, "BEST_FIRST", {name: offer(name) for name in pick.BEST_FIRST})


def test_best_first(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuple(pick.BEST_FIRST) == ("fa4", "flash_attn", "torch_flash")
    assert {"auto", *pick.BEST_FIRST, "reference"} == set(CHOICES["kernel"])
    offers(monkeypatch)
    assert take("auto", "cuda", torch.bfloat16).name == "fa4"
    offers(monkeypatch, fa4="not here")
    picked = take("auto", "cuda", torch.float16, deterministic=True)
    assert picked.name == "flash_attn" and picked.deterministic
    assert take("torch_flash", "cuda", torch.bfloat16).name == "torch_flash"


def test_the_log_says_why_better_ones_were_passed_over_once(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    offers(monkeypatch, fa4="not installed, pip install -e '.[fa4]'", flash_attn="old")
    for _ in range(3):
        take("auto", "cuda", torch.bfloat16)
    assert log.messages == [
        "kernel torch_flash (fa4: not installed, pip install -e '.[fa4]'; flash_attn: old)"
    ]


def test_the_log_of_a_wish_and_of_the_cpu(
    monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    offers(monkeypatch)
    take("torch_flash", "cuda", torch.bfloat16)
    take("auto", "cpu", torch.float64)
    assert log.messages == ["kernel torch_flash", "kernel reference"]


def test_a_wish_is_never_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, fa4="not installed, pip install -e '.[fa4]'")
    with pytest.raises(ValueError) as caught:
        take("fa4", "cuda", torch.bfloat16)
    assert str(caught.value) == (
        "kernel (fa4): fa4: not installed, pip install -e '.[fa4]'; or ask for "
        "kernel=reference (slow)."
    )


def test_nothing_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    offers(monkeypatch, fa4="a", flash_attn="b", torch_flash="c")
    with pytest.raises(ValueError, match="fa4: a; flash_attn: b; torch_flash: c; or ask for"):
        take("auto", "cuda", torch.bfloat16)


@pytest.mark.parametrize("wish", ["auto", "fa4", "flash_attn", "torch_flash"])
def test_inputs_that_no_flash_kernel_takes(wish: str) -> None:
    with pytest.raises(ValueError, match="not float32; try --bf16; or ask for kernel=reference"):
        take(wish, "cuda", torch.float32)
    if wish != "auto":
        with pytest.raises(ValueError, match=f"{wish} needs a CUDA device, not cpu; try kernel=au"):
            take(wish, "cpu", torch.bfloat16)


def test_reference_everywhere_and_unknown_names() -> None:
    assert take("reference", "cuda", torch.float64).name == "reference"
    assert take("auto", "cpu", torch.float64).name == "reference"
    with pytest.raises(ValueError, match="'fa9'.* must be one of auto, fa4, flash_attn"):
        take("fa9", "cpu", torch.float32)
    with pytest.raises(ValueError, match="at most 256, not 264"):
        take("torch_flash", "cuda", torch.bfloat16, 264)


@pytest.mark.parametrize("name", list(pick.BEST_FIRST))
def test_a_machine_without_a_gpu(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=f"{name}: needs a CUDA device; none found; or ask for"):
        take(name, "cuda", torch.bfloat16)
