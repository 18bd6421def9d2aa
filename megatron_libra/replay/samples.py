"""Keep what a calibration measured. In: Measurements. Out: a JSON file, and back.

So that a model can be fitted again, with another tiling or a better fit, without the device.
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_libra.replay.calibrate import MeasuredCall
from megatron_libra.replay.calls import call_of
from megatron_libra.replay.links import LinkFit
from megatron_libra.replay.machine import Measurements
from megatron_libra.replay.measure import CallSeconds

__all__ = ["read_measurements", "write_measurements"]


def write_measurements(path: Path, measured: Measurements) -> None:
    """Write everything that fit_model needs."""
    value = {
        "label": measured.label,
        "kernel": measured.kernel,
        "num_sms": measured.num_sms,
        "gather_gb_s": measured.gather_gb_s,
        "host": {str(dim): asdict(seconds) for dim, seconds in measured.host.items()},
        "links": {name: asdict(link) for name, link in measured.links.items()},
        "calls": [_call_value(each) for each in measured.calls],
    }
    path.write_text(json.dumps(value), encoding="utf-8")


def _call_value(each: MeasuredCall) -> dict[str, Any]:
    call = each.call
    return {
        "queries": call.num_queries.tolist(),
        "keys": call.num_keys.tolist(),
        "query_heads": call.query_heads,
        "kv_heads": call.kv_heads,
        "head_dim": call.head_dim,
        "part": call.part,
        "repeats": call.repeats,
        "group": each.group,
        "forward": each.seconds.forward,
        "backward": each.seconds.backward,
    }


def read_measurements(path: Path) -> Measurements:
    """What write_measurements wrote.

    Raises:
        ValueError: the file is something else.
        OSError: it cannot be read.
    """
    try:
        value = json.loads(path.read_bytes())
        return Measurements(
            label=str(value["label"]),
            kernel=str(value["kernel"]),
            num_sms=int(value["num_sms"]),
            gather_gb_s=float(value["gather_gb_s"]),
            host={int(dim): CallSeconds(**each) for dim, each in value["host"].items()},
            links={name: LinkFit(**each) for name, each in value["links"].items()},
            calls=tuple(_call(each) for each in value["calls"]),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ValueError(
            f"{path}: no measurements of libra calibrate ({type(error).__name__}: {error}); "
            "write them with --keep-calls."
        ) from None


def _call(value: dict[str, Any]) -> MeasuredCall:
    call = call_of(
        value["queries"],
        value["keys"],
        query_heads=int(value["query_heads"]),
        kv_heads=int(value["kv_heads"]),
        head_dim=int(value["head_dim"]),
    )
    call = replace(call, part=int(value["part"]), repeats=int(value["repeats"]))
    seconds = CallSeconds(float(value["forward"]), float(value["backward"]))
    return MeasuredCall(call, str(value["group"]), seconds)
