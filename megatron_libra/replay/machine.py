"""Calibrate a machine. In: CalibrationWish. Out: Measurements, then Calibration with a CostModel.

Measuring needs the device; fitting needs what was measured, which can be kept in a file. What
cannot be measured here (links, with one GPU; other nodes, always) is given, or is that of the
built-in model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch

from megatron_libra.executor.kernels import pick_kernel
from megatron_libra.replay.calibrate import MeasuredCall, Validation, fit_kernel, measure_calls
from megatron_libra.replay.calls import call_of
from megatron_libra.replay.grid import HEADS, GridSize
from megatron_libra.replay.links import LinkFit, measure_copies, measure_nccl
from megatron_libra.replay.measure import CallSeconds, CallTimer, gather_gb_s
from megatron_libra.simulator.calibration import built_in
from megatron_libra.simulator.cost_model import CostModel

__all__ = ["Calibration", "CalibrationWish", "Measurements", "fit_model", "measure_machine"]

LINK_KEYS = ("intra_node_gb_s", "inter_node_gb_s", "message_us", "overlap_loss")
Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationWish:
    """What to measure."""

    device: torch.device
    kernel: str = "auto"
    head_dims: tuple[int, ...] = (128,)
    heads: tuple[tuple[int, int], ...] | None = None
    """(query heads, kv heads) of the calls; None: those of usual layers."""
    size: GridSize = field(default_factory=GridSize)
    seconds: float = 100.0
    """For everything but the links."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Measurements:
    """What was measured."""

    label: str
    """Device and kernel."""
    kernel: str
    num_sms: int
    gather_gb_s: float
    host: Mapping[int, CallSeconds]
    """By head dimension: what the host needs to issue a call."""
    calls: tuple[MeasuredCall, ...]
    links: Mapping[str, LinkFit]
    """By transport, symmetric and nccl; empty with one GPU."""


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """The cost model of a machine."""

    model: CostModel
    validations: tuple[Validation, ...]
    sources: Mapping[str, str]
    """Where each number of the links comes from: measured, given, or the default."""


def measure_machine(wish: CalibrationWish, progress: Progress = lambda text: None) -> Measurements:
    """Run everything on this machine's device, and on all its GPUs if there are several.

    Raises:
        ValueError: the kernel cannot run here, the seconds are too few, or the machine is too busy
            to measure its links.
    """
    device = wish.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    kernels = {
        head_dim: pick_kernel(wish.kernel, device=device, dtype=dtype, head_dim=head_dim)
        for head_dim in wish.head_dims
    }
    progress("links")  # first: if they fail, no minutes of calls are lost
    links = _links(device)
    host: dict[int, CallSeconds] = {}
    calls: list[MeasuredCall] = []
    timer = None
    for head_dim, kernel in kernels.items():
        timer = CallTimer(kernel, device, dtype=dtype)
        heads = wish.heads or HEADS[head_dim]
        host[head_dim] = _host_seconds(timer, head_dim, heads[0], wish.size)
        calls += measure_calls(
            timer,
            head_dim,
            size=wish.size,
            heads=heads,
            budget_s=wish.seconds / len(wish.head_dims),
            progress=progress,
        )
    assert timer is not None
    progress("rows")
    return Measurements(
        label=timer.label,
        kernel=timer.kernel.name,
        num_sms=_num_sms(device),
        gather_gb_s=gather_gb_s(device),
        host=host,
        calls=tuple(calls),
        links=links,
    )


def _host_seconds(
    timer: CallTimer, head_dim: int, heads: tuple[int, int], size: GridSize
) -> CallSeconds:
    """Of a short call; how long a call runs makes no difference to the host of a GPU."""
    if timer.device.type != "cuda":
        return CallSeconds(0.0, 0.0)
    call = call_of(
        [size.tokens // 32], [size.tokens // 8], query_heads=heads[0], kv_heads=heads[1],
        head_dim=head_dim,
    )  # fmt: skip
    return timer.host_seconds(call)


def _num_sms(device: torch.device) -> int:
    if device.type != "cuda":
        return 1
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _links(device: torch.device) -> dict[str, LinkFit]:
    count = torch.cuda.device_count() if device.type == "cuda" else 1
    if count < 2:
        return {}
    return {"symmetric": measure_copies(count), "nccl": measure_nccl(count)}


def fit_model(
    measurements: Measurements, *, name: str, given: Mapping[str, float], transport: str
) -> Calibration:
    """Fit the model.

    Args:
        measurements: of this machine, or read from a file.
        name: of the model.
        given: link keys of the cost model that the user knows; they win.
        transport: symmetric or nccl, whose links the model shall have.
    """
    head_dims = sorted(measurements.host)
    fits = {
        head_dim: fit_kernel(
            [each for each in measurements.calls if each.call.head_dim == head_dim],
            kernel=measurements.kernel,
            head_dim=head_dim,
            num_sms=measurements.num_sms,
            host=measurements.host[head_dim],
        )
        for head_dim in head_dims
    }
    links, sources = _chosen_links(measurements.links.get(transport), given)
    model = CostModel(
        name=name,
        kernel=measurements.kernel,
        num_sms=measurements.num_sms,
        kernels={head_dim: fit.cost for head_dim, fit in fits.items()},
        gather_gb_s=measurements.gather_gb_s,
        **links,
    )
    validations = tuple(v for head_dim in head_dims for v in fits[head_dim].validations)
    return Calibration(model, validations, sources)


def _chosen_links(
    measured: LinkFit | None, given: Mapping[str, float]
) -> tuple[dict[str, float], dict[str, str]]:
    """Given before measured before the built-in model's."""
    default = built_in("h200-fa4")
    links = {key: float(getattr(default, key)) for key in LINK_KEYS}
    sources = dict.fromkeys(LINK_KEYS, "default, not measured")
    if measured is not None:
        found = {
            "intra_node_gb_s": measured.gb_s,
            "message_us": measured.message_us,
            "overlap_loss": measured.overlap_loss,
        }
        links |= found
        sources |= dict.fromkeys(found, "measured")
    links |= given
    sources |= dict.fromkeys(given, "given")
    return links, sources
