"""The command `libra calibrate`. In: this machine's GPUs. Out: a cost model file and its errors.

libra calibrate --out my-gpu.json                          the best kernel, head dimension 128
libra calibrate --out my-gpu.json --head-dim 128,256 --keep-calls calls.json
libra simulate longtail-256k --cost-model my-gpu.json
"""

from __future__ import annotations

import importlib.util
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from megatron_libra.cli.given_options import given_options, refuse_given
from megatron_libra.cli.json_reader import short
from megatron_libra.cli.output_files import require_writable
from megatron_libra.cli.replay_request import linked
from megatron_libra.cli.verification import Device
from megatron_libra.config import CHOICES
from megatron_libra.data.rows import require_file
from megatron_libra.data.words import MAX_DIGITS
from megatron_libra.extras import install_hint
from megatron_libra.simulator.calibration import built_in, model_json

if TYPE_CHECKING:
    from megatron_libra.replay.fit import Errors
    from megatron_libra.replay.machine import Calibration, CalibrationWish, Measurements

__all__ = ["calibrate"]

TRANSPORTS = ("symmetric", "nccl")
CPU_TOKENS, CPU_FLOPS = 512, 5e8
QUICK_TOKENS, QUICK_FLOPS = 16_384, 2e12
HEADS_HELP = "Query x kv heads of the calls, such as 8x1,32x4; default: those of usual layers."
MEASURING = ("kernel", "head_dim", "heads", "device", "seconds", "quick")
ROUGH = 0.25
"""Median relative error above which a model is not for decisions."""
LinkNumber = Annotated[float | None, typer.Option(min=0, help="Not measured, but this.")]


def calibrate(
    context: typer.Context,
    out: Annotated[Path, typer.Option(metavar="FILE", help="Cost model to write.")],
    kernel: Annotated[str, typer.Option(help=", ".join(CHOICES["kernel"]))] = "auto",
    head_dim: Annotated[str, typer.Option(help="Head dimensions, of 64, 128, 256.")] = "128",
    heads: Annotated[str | None, typer.Option(help=HEADS_HELP)] = None,
    device: Annotated[Device, typer.Option(help="cpu times the reference kernel.")] = Device.cuda,
    seconds: Annotated[float, typer.Option(min=1, help="To measure calls in, all together.")] = 100,
    quick: Annotated[bool, typer.Option("--quick", help="Smaller calls.")] = False,
    transport: Annotated[str, typer.Option(help="Links of the model: symmetric, nccl.")] = (
        "symmetric"
    ),
    intra_node_gb_s: LinkNumber = None,
    inter_node_gb_s: LinkNumber = None,
    message_us: LinkNumber = None,
    overlap_loss: LinkNumber = None,
    keep_calls: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write every measured call.")
    ] = None,
    from_calls: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Measure nothing, fit these.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Measure this machine, fit the simulator's cost model to it, and say how well it fits."""
    if importlib.util.find_spec("torch") is None:
        raise ValueError(f"libra calibrate needs torch; {install_hint('megatron')}.")
    if transport not in TRANSPORTS:
        raise ValueError(f"--transport ({transport!r}) must be one of {', '.join(TRANSPORTS)}.")
    if from_calls is not None:
        why = "not with --from-calls, which measures nothing"
        refuse_given(given_options(context), MEASURING, why)
        require_file(from_calls)
    require_writable(out, keep_calls, inputs=[from_calls])
    given = {
        "intra_node_gb_s": intra_node_gb_s,
        "inter_node_gb_s": inter_node_gb_s,
        "message_us": message_us,
        "overlap_loss": overlap_loss,
    }
    linked(built_in("h200-fa4"), given)  # a number out of range is told before the work begins
    from megatron_libra.replay.machine import fit_model
    from megatron_libra.replay.samples import read_measurements, write_measurements

    if from_calls is not None:
        measured = read_measurements(from_calls)
    else:
        measured = _measured(_wish(device, kernel, head_dim, heads, (quick, seconds)), as_json)
    if keep_calls is not None:
        write_measurements(keep_calls, measured)
    known = {key: value for key, value in given.items() if value is not None}
    found = fit_model(measured, name=out.stem, given=known, transport=transport)
    out.write_text(json.dumps(model_json(found.model), indent=2) + "\n", encoding="utf-8")
    _show(measured, found, out, as_json)
    _warn_if_rough(found)


def _wish(
    device: Device, kernel: str, head_dim: str, heads: str | None, effort: tuple[bool, float]
) -> CalibrationWish:
    """The options, checked."""
    import torch

    from megatron_libra.replay.grid import HEADS, GridSize
    from megatron_libra.replay.machine import CalibrationWish

    if device is Device.cuda and not torch.cuda.is_available():
        raise ValueError("there is no CUDA device; try --device cpu, which times the CPU.")
    known = {str(dim): dim for dim in HEADS}
    unknown = [text for text in head_dim.split(",") if text.strip() not in known]
    if unknown:
        raise ValueError(
            f"--head-dim ({short(unknown[0])}) must be of {', '.join(known)}; "
            "try --head-dim 128,256."
        )
    dims = tuple(sorted({known[text.strip()] for text in head_dim.split(",")}))
    quick, seconds = effort
    size = GridSize(QUICK_TOKENS, QUICK_FLOPS) if quick else GridSize()
    return CalibrationWish(
        device=torch.device(device.value),
        kernel=kernel,
        head_dims=dims,
        heads=_heads(heads),
        size=GridSize(CPU_TOKENS, CPU_FLOPS) if device is Device.cpu else size,
        seconds=seconds,
    )


def _heads(text: str | None) -> tuple[tuple[int, int], ...] | None:
    if text is None:
        return None
    from megatron_libra.replay.grid import MAX_HEADS

    found = []
    for part in text.split(","):
        query, _, kv = part.partition("x")
        if not (_is_number(query) and _is_number(kv)):
            raise ValueError(
                f"--heads ({short(part)}) must be numbers like 8x1; try --heads 8x1,32x4."
            )
        pair = (int(query), int(kv))
        if max(pair) > MAX_HEADS:
            raise ValueError(f"--heads ({part}): at most {MAX_HEADS} heads can be timed; try 8x1.")
        if pair[0] % pair[1]:
            raise ValueError(f"--heads ({part}): kv heads must divide query heads; try 8x1.")
        found.append(pair)
    return tuple(found)


def _is_number(text: str) -> bool:
    """Whether it is an integer of at least 1 that int() reads, whatever its length."""
    return text.strip().isdecimal() and len(text) <= MAX_DIGITS and int(text) > 0


def _measured(wish: CalibrationWish, as_json: bool) -> Measurements:
    from megatron_libra.replay.machine import measure_machine

    console = Console(stderr=True)
    with console.status("kernels") as status:
        if as_json or not console.is_terminal:
            return measure_machine(wish)
        return measure_machine(wish, status.update)


def _show(measured: Measurements, found: Calibration, out: Path, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(_answer(measured, found, out), allow_nan=False))
        return
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(f"{measured.label}: {len(measured.calls)} calls")
    console.print(_error_table(found))
    for name, link in measured.links.items():
        console.print(
            f"{name}: {link.gb_s:.0f} GB/s, {link.message_us:.0f} us, overlap loss "
            f"{link.overlap_loss:.2f}"
        )
    for key, source in found.sources.items():
        console.print(f"{key} {getattr(found.model, key):.4g} ({source})")
    console.print(f"gather_gb_s {found.model.gather_gb_s:.4g} (measured)")
    console.print(f"Written: {out}", soft_wrap=True)
    console.print(f"Next: libra simulate CORPUS --cost-model {out}", soft_wrap=True)


def _warn_if_rough(found: Calibration) -> None:
    """One line on stderr, also beside --json, if the model is far from what was measured."""
    errors = [each for fit in found.validations for each in (fit.fitted, fit.workers) if each]
    worst = max((each.median for each in errors), default=0.0)
    if not worst <= ROUGH:
        typer.echo(
            f"Warning: median errors up to {worst:.0%}; this model is not for decisions; raise "
            "--seconds or drop --quick.",
            err=True,
        )


def _error_table(found: Calibration) -> Table:
    table = Table(title="Predicted against measured", title_justify="left", box=box.SIMPLE_HEAD)
    for name in ("head dim", "pass", "", "median %", "worst %", "of"):
        table.add_column(name, justify="left" if name in ("pass", "") else "right")
    for each in found.validations:
        rows = [("fitted calls", each.fitted), ("workers of pools, not fitted", each.workers)]
        for name, errors in rows:
            table.add_row(str(each.head_dim), each.passes, name, *_cells(errors))
    return table


def _cells(errors: Errors | None) -> tuple[str, str, str]:
    if errors is None:
        return "-", "-", "0"
    return f"{errors.median:.1%}"[:-1], f"{errors.worst:.1%}"[:-1], str(errors.count)


def _answer(measured: Measurements, found: Calibration, out: Path) -> dict[str, Any]:
    return {
        "measured": measured.label,
        "calls": len(measured.calls),
        "cost_model": model_json(found.model),
        "errors": [asdict(each) for each in found.validations],
        "links": {name: asdict(link) for name, link in measured.links.items()},
        "sources": dict(found.sources),
        "written": str(out),
    }
