"""Keep what a calibration measured. In: Measurements. Out: a JSON file, and back.

So that a model can be fitted again, with another tiling or a better fit, without the device.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from megatron_libra.config import MAX_INTEGER, AttentionShape
from megatron_libra.data.json_faults import parse_json
from megatron_libra.data.rows import as_lengths
from megatron_libra.data.words import MAX_DIGITS
from megatron_libra.replay.calibrate import FEWEST_CALLS, MeasuredCall
from megatron_libra.replay.calls import call_of
from megatron_libra.replay.grid import FIT, HEADS, MAX_HEADS
from megatron_libra.replay.links import LinkFit
from megatron_libra.replay.machine import Measurements
from megatron_libra.replay.measure import CallSeconds
from megatron_libra.replay.values import (
    as_integer,
    as_number,
    as_numbers,
    as_object,
    as_text,
    short,
)
from megatron_libra.simulator.call_table import PARTS
from megatron_libra.simulator.tilings import KERNELS

__all__ = ["read_measurements", "write_measurements"]

FILE_KEYS = ("label", "kernel", "num_sms", "gather_gb_s", "host", "links", "calls")
PASSES = ("forward", "backward")
LINK_KEYS = ("gb_s", "message_us", "overlap_loss")
CALL_KEYS = ("queries", "keys", "query_heads", "kv_heads", "head_dim", "part", "repeats", "group",
             *PASSES)  # fmt: skip
TRANSPORTS = ("symmetric", "nccl")
MAX_HEAD_DIM = max(HEADS)


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
    """What write_measurements wrote, every value checked.

    Raises:
        ValueError: the file is something else, or has too few calls to fit.
        OSError: it cannot be read.
    """
    try:
        return _measurements(as_object(parse_json(path.read_bytes()), "the file", FILE_KEYS))
    except ValueError as error:
        raise ValueError(
            f"{path}: no measurements of libra calibrate ({error}); write them with --keep-calls."
        ) from None


def _measurements(value: dict[str, Any]) -> Measurements:
    calls = value["calls"]
    if not isinstance(calls, list):
        raise ValueError(f"calls ({short(calls)}) must be a list")
    found = Measurements(
        label=as_text(value["label"], "label"),
        kernel=as_text(value["kernel"], "kernel", KERNELS),
        num_sms=as_integer(value["num_sms"], "num_sms"),
        gather_gb_s=as_number(value["gather_gb_s"], "gather_gb_s"),
        host=_host(value["host"]),
        links=_links(value["links"]),
        calls=tuple(_call(each, f"calls[{at}]") for at, each in enumerate(calls)),
    )
    _check_counts(found)
    return found


def _host(value: Any) -> dict[int, CallSeconds]:
    if not isinstance(value, dict) or not value:
        raise ValueError(f"host ({short(value)}) must map head dimensions to seconds")
    found = {}
    for dim, seconds in value.items():
        name = f"host[{short(dim)}]"
        is_number = dim.isdecimal() and len(dim) <= MAX_DIGITS
        number = as_integer(int(dim) if is_number else dim, name, MAX_HEAD_DIM)
        found[number] = CallSeconds(**as_numbers(seconds, name, PASSES, can_be_0=PASSES))
    return found


def _links(value: Any) -> dict[str, LinkFit]:
    if not isinstance(value, dict) or not value.keys() <= set(TRANSPORTS):
        raise ValueError(f"links ({short(value)}) must be by {', '.join(TRANSPORTS)}, or empty")
    return {
        name: LinkFit(**as_numbers(link, f"links.{name}", LINK_KEYS, can_be_0=LINK_KEYS[1:]))
        for name, link in value.items()
    }


def _call(value: Any, name: str) -> MeasuredCall:
    value = as_object(value, name, CALL_KEYS)
    queries, keys = (as_lengths(value[key], f"{name}.{key}") for key in ("queries", "keys"))
    if queries.shape != keys.shape or not queries.any() or (queries > keys).any():
        raise ValueError(f"{name} needs entries of at most as many queries as keys")
    if int(keys.sum()) > MAX_INTEGER:
        raise ValueError(f"{name} has {keys.sum()} keys, more than {MAX_INTEGER}")
    shape = AttentionShape(
        query_heads=as_integer(value["query_heads"], f"{name}.query_heads", MAX_HEADS),
        kv_heads=as_integer(value["kv_heads"], f"{name}.kv_heads", MAX_HEADS),
        head_dim=as_integer(value["head_dim"], f"{name}.head_dim", MAX_HEAD_DIM),
    )
    call = call_of(
        queries.tolist(), keys.tolist(), query_heads=shape.query_heads, kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
    )  # fmt: skip
    call = replace(
        call,
        part=as_integer(value["part"], f"{name}.part", len(PARTS) - 1, minimum=0),
        repeats=as_integer(value["repeats"], f"{name}.repeats"),
    )
    seconds = CallSeconds(*(as_number(value[key], f"{name}.{key}") for key in PASSES))
    return MeasuredCall(call, as_text(value["group"], f"{name}.group"), seconds)


def _check_counts(found: Measurements) -> None:
    """A head dimension needs calls to fit, and what its calls cost the host."""
    fitted = Counter(each.call.head_dim for each in found.calls if each.group == FIT)
    dims = {each.call.head_dim for each in found.calls}
    if not dims <= found.host.keys():
        raise ValueError(f"host has no head dimension {min(dims - found.host.keys())}, calls do")
    for dim in sorted(found.host):
        if fitted[dim] < FEWEST_CALLS:
            raise ValueError(
                f"calls has {fitted[dim]} of head dimension {dim} and group {FIT}; a fit needs at "
                f"least {FEWEST_CALLS}"
            )
