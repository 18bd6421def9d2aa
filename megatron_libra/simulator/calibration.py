"""Where a cost model comes from. In: a built-in name or a JSON file. Out: CostModel."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from megatron_libra.data.rows import require_file
from megatron_libra.simulator.cost_model import CostModel, KernelRate

__all__ = ["BUILT_IN", "load_cost_model"]

H200_LINKS = {
    "intra_node_gb_s": 270.0,
    "inter_node_gb_s": 40.0,
    "message_us": 50.0,
    "overlap_loss": 0.3,
}
BUILT_IN = {
    "h200-fa4": CostModel(
        name="h200-fa4",
        kernels={
            128: KernelRate(forward_tflops=670, backward_tflops=605),
            256: KernelRate(forward_tflops=700, backward_tflops=370),
        },
        forward_token_ns=0.4,
        backward_token_ns=1.3,
        forward_call_us=76,
        backward_call_us=103,
        full_call_rows=132 * 128,
        **H200_LINKS,
    ),
    "h200-fa2": CostModel(
        name="h200-fa2",
        kernels={
            128: KernelRate(forward_tflops=335, backward_tflops=320),
            256: KernelRate(forward_tflops=308, backward_tflops=260),
        },
        forward_token_ns=0.4,
        backward_token_ns=1.3,
        forward_call_us=20,
        backward_call_us=47,
        full_call_rows=132 * 128,
        **H200_LINKS,
    ),
}
"""H200-class figures (docs/simulator.md has the sources); no measurement of the user's machine."""


def load_cost_model(source: str) -> CostModel:
    """A built-in model by name, or a calibration file.

    The file is one JSON object with every field of CostModel; kernels maps head dimensions to
    {"forward_tflops": .., "backward_tflops": ..}.

    Raises:
        ValueError: neither a name nor a file, no JSON, a key missing, unknown or out of range.
    """
    if source in BUILT_IN:
        return BUILT_IN[source]
    path = require_file(Path(source))
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path}: not JSON ({error}); copy the example of docs/simulator.md."
        ) from None
    try:
        return _from_json(value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _from_json(value: Any) -> CostModel:
    names = {field.name for field in fields(CostModel)}
    if not isinstance(value, dict) or set(value) != names:
        given = set(value) if isinstance(value, dict) else set()
        raise ValueError(
            f"must be an object with exactly the keys {', '.join(sorted(names))}; missing "
            f"{sorted(names - given)}, unknown {sorted(given - names)}; copy the example of "
            "docs/simulator.md."
        )
    numbers = {name: _number(value[name], name) for name in names - {"name", "kernels"}}
    return CostModel(name=str(value["name"]), kernels=_kernels(value["kernels"]), **numbers)


def _kernels(value: Any) -> dict[int, KernelRate]:
    found: dict[int, KernelRate] = {}
    for key, rates in value.items() if isinstance(value, dict) else ():
        keys = {"forward_tflops", "backward_tflops"}
        if not (
            str(key).isdecimal() and int(key) and isinstance(rates, dict) and set(rates) == keys
        ):
            raise ValueError(
                f"kernels[{key!r}] must be a head dimension with {' and '.join(sorted(keys))}; "
                'try "128": {"forward_tflops": 600, "backward_tflops": 500}.'
            )
        found[int(key)] = KernelRate(
            **{k: _number(rates[k], f"kernels[{key!r}].{k}", 1e-6) for k in keys}
        )
    return found


def _number(value: Any, name: str, least: float = 0.0) -> float:
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not (least <= value < math.inf)
    ):
        raise ValueError(f"{name} ({value!r}) must be a number of at least {least:g}.")
    return float(value)
