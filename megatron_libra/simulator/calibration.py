"""Where a cost model comes from and goes to. In: a built-in name or a JSON file. Out: CostModel.

The file is one JSON object with every field of CostModel; `kernels` maps head dimensions to
{"forward": PassCost, "backward": PassCost}, and a PassCost's `tiling` is a Tiling. `libra
calibrate` writes it.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from megatron_libra.config import MAX_INTEGER
from megatron_libra.data.json_faults import JsonFault, parse_json
from megatron_libra.data.rows import require_file
from megatron_libra.data.words import MAX_DIGITS, shortened
from megatron_libra.simulator.call_cost import KernelCost, PassCost
from megatron_libra.simulator.cost_model import CostModel
from megatron_libra.simulator.tiling import GRIDS, Tiling

__all__ = ["BUILT_IN", "built_in", "load_cost_model", "model_json"]

BUILT_IN = ("h200-fa4", "h200-fa2")
"""H200-class figures (docs/simulator.md has the sources); no measurement of the user's machine."""
MODELS = Path(__file__).parent / "models"
OLD_KEYS = {"forward_token_ns", "full_call_rows", "forward_call_us"}
"""Of files that the cost model of pairs and tokens read."""
MOST_KEYS = 80
"""Characters of the unknown keys in a message."""
WAY_OUT = "write it with libra calibrate, or change a copy of simulator/models/h200-fa4.json."


def built_in(name: str) -> CostModel:
    """A built-in model by its name, one of BUILT_IN."""
    return _read(MODELS / f"{name}.json")


def load_cost_model(source: str) -> CostModel:
    """A built-in model by name, or a calibration file.

    Raises:
        ValueError: neither a name nor a file, no JSON, a key missing, unknown or out of range.
    """
    return built_in(source) if source in BUILT_IN else _read(require_file(Path(source)))


def model_json(model: CostModel) -> dict[str, Any]:
    """The object of a calibration file."""
    value = asdict(model)
    value["kernels"] = {str(dim): cost for dim, cost in sorted(value["kernels"].items())}
    return value


def _read(path: Path) -> CostModel:
    try:
        value = parse_json(path.read_bytes())
    except JsonFault as fault:
        raise ValueError(f"{path}: {fault}; {WAY_OUT}") from None
    try:
        return _model(value)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def _model(value: Any) -> CostModel:
    given = _object(value, CostModel, "the file")
    name, kernel = str(given.pop("name")), str(given.pop("kernel"))
    kernels = given.pop("kernels")
    if not isinstance(kernels, dict):
        raise ValueError(
            f"kernels ({_shown(kernels)}) must map head dimensions to costs; {WAY_OUT}"
        )
    num_sms = _integer(given.pop("num_sms"), "num_sms")
    numbers = {key: _number(number, key) for key, number in given.items()}
    return CostModel(
        name=name,
        kernel=kernel,
        kernels={_dimension(dim): _kernel(cost, dim) for dim, cost in kernels.items()},
        num_sms=num_sms,
        **numbers,
    )


def _dimension(key: str) -> int:
    if not (key.isdecimal() and len(key) <= MAX_DIGITS and 1 <= int(key) <= MAX_INTEGER):
        raise ValueError(f"kernels[{_shown(key)}] must be a head dimension, such as 128.")
    return int(key)


def _kernel(value: Any, dim: str) -> KernelCost:
    name = f"kernels[{dim!r}]"
    passes = _object(value, KernelCost, name)
    return KernelCost(**{key: _pass(cost, f"{name}.{key}") for key, cost in passes.items()})


def _pass(value: Any, name: str) -> PassCost:
    given = _object(value, PassCost, name)
    tiling = _tiling(given.pop("tiling"), f"{name}.tiling")
    numbers = {key: _number(number, f"{name}.{key}") for key, number in given.items()}
    if not 0 < numbers["alone"] <= 1:
        raise ValueError(f"{name}.alone ({numbers['alone']}) must be above 0 and at most 1.")
    if not numbers["clock_ms"] > 0:
        raise ValueError(f"{name}.clock_ms ({numbers['clock_ms']}) must be above 0.")
    return PassCost(tiling=tiling, **numbers)


def _tiling(value: Any, name: str) -> Tiling:
    given = _object(value, Tiling, name)
    if given["grid"] not in GRIDS:
        raise ValueError(f"{name}.grid ({_shown(given['grid'])}) must be one of {GRIDS}.")
    for key, item in given.items():
        if key in ("tile_rows", "step_rows", "ctas_per_sm"):
            _integer(item, f"{name}.{key}")
        elif key != "grid" and not isinstance(item, bool):
            raise ValueError(f"{name}.{key} ({_shown(item)}) must be true or false.")
    return Tiling(**given)


def _object(value: Any, kind: type, name: str) -> dict[str, Any]:
    """A copy of an object that has exactly the fields of a dataclass."""
    names = {field.name for field in fields(kind)}
    given = set(value) if isinstance(value, dict) else set()
    if given == names:
        return dict(value)
    old = (
        " It is of the older format, which had rates instead of tilings;"
        if OLD_KEYS & given
        else ""
    )
    unknown = [shortened(key) for key in sorted(given - names)]
    raise ValueError(
        f"{name} must be an object with other keys: missing {sorted(names - given)}, unknown "
        f"{shortened(str(unknown), MOST_KEYS)};{old} {WAY_OUT}"
    )


def _integer(value: Any, name: str) -> int:
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_INTEGER:
        return value
    is_whole = isinstance(value, float) and value.is_integer() and 1 <= value <= MAX_INTEGER
    raise ValueError(
        f"{name} ({_shown(value)}) must be an integer of at least 1 and at most {MAX_INTEGER}; "
        + (f"try {int(value)}." if is_whole else WAY_OUT)
    )


def _number(value: Any, name: str) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 <= value <= sys.float_info.max:
        raise ValueError(f"{name} ({_shown(value)}) must be a number of at least 0; {WAY_OUT}")
    return float(value)


def _shown(value: Any) -> str:
    return shortened(repr(value))
