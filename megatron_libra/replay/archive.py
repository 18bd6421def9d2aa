"""A prepared replay in a file. In: Replay. Out: .npz of numbers and one JSON header; and back.

Values of all works stand one behind the other, by field, so that they compress well; nothing in the
file is executable.
"""

from __future__ import annotations

import json
import zipfile
from dataclasses import asdict, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.json_faults import JsonFault, parse_json
from megatron_libra.data.rows import read_npz, require_file
from megatron_libra.replay.methods import Method
from megatron_libra.replay.replay import Corpus, Replay, Series
from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.job import TrainingJob
from megatron_libra.simulator.pool_work import PoolWork

__all__ = ["is_prepared", "load_replay", "save_replay"]

FORMAT = "libra replay 2"
Array = NDArray[Any]


def save_replay(replay: Replay, path: Path) -> None:
    """Write a replay; complete or not at all."""
    header = {
        "format": FORMAT,
        "figure": replay.figure,
        "corpus": asdict(replay.corpus),
        "series": [asdict(each) for each in replay.series],
        "bounds": replay.bounds,
    }
    arrays: dict[str, Any] = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "rows": replay.rows,
    }
    for name in _names(PoolWork):
        if name != "calls":
            arrays |= _packed(name, [getattr(work, name) for work in replay.works])
    for name in _names(CallTable):
        arrays |= _packed(f"calls.{name}", [getattr(work.calls, name) for work in replay.works])
    scratch = path.with_name(f"{path.name}.tmp")
    try:
        with scratch.open("wb") as stream:
            np.savez_compressed(stream, allow_pickle=False, **arrays)
        scratch.replace(path)
    finally:
        scratch.unlink(missing_ok=True)


def is_prepared(path: Path) -> bool:
    """Whether a file looks like one that save_replay wrote, of any version."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        return {"header.npy", "rows.npy"} <= set(archive.namelist())


def load_replay(path: Path) -> Replay:
    """The replay that save_replay wrote.

    Raises:
        ValueError: no such file, or another one.
    """
    arrays = read_npz(require_file(path))
    try:
        header = _header(arrays["header"])
        if header["format"] != FORMAT:
            raise ValueError(f"it is {header['format']}, not {FORMAT}")
        calls = _columns(CallTable, arrays, "calls.")
        tables = [CallTable(**row) for row in calls]
        works = _columns(PoolWork, arrays, "", {"calls": tables})
        return Replay(
            figure=header["figure"],
            corpus=Corpus(**header["corpus"] | {"seeds": tuple(header["corpus"]["seeds"])}),
            series=tuple(map(_series, header["series"])),
            bounds=tuple((float(mean), float(worst)) for mean, worst in header["bounds"]),
            rows=arrays["rows"],
            works=tuple(PoolWork(**row) for row in works),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} holds no replay that this version reads ({error}); write it again with "
            "--prepare."
        ) from None


def _header(text: Array) -> Any:
    try:
        return parse_json(text.tobytes())
    except JsonFault as fault:
        raise ValueError(f"header: {fault}") from None


def _names(kind: type) -> list[str]:
    return [field.name for field in fields(kind)]


def _packed(name: str, values: list[Any]) -> dict[str, Array]:
    """Arrays (or numbers) of equal rank, joined, and their shapes."""
    parts = [np.asarray(value) for value in values]
    shapes = np.array([part.shape for part in parts], np.int64).reshape(len(parts), -1)
    return {name: np.concatenate([part.ravel() for part in parts]), f"{name}.shape": shapes}


def _unpacked(name: str, arrays: dict[str, Array]) -> list[Any]:
    flat, shapes = arrays[name], arrays[f"{name}.shape"]
    stops = np.cumsum([0, *shapes.prod(axis=1, dtype=np.int64)]).tolist()
    return [
        flat[start:stop].reshape(shape) if shape else flat[start].item()
        for (start, stop), shape in zip(pairwise(stops), shapes.tolist(), strict=True)
    ]


def _columns(
    kind: type, arrays: dict[str, Array], prefix: str, known: dict[str, list[Any]] | None = None
) -> list[dict[str, Any]]:
    """Arguments of each object."""
    columns = dict(known or {})
    for name in _names(kind):
        if name not in columns:
            columns[name] = _unpacked(prefix + name, arrays)
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def _series(value: dict[str, Any]) -> Series:
    method, job = value["method"], value["job"]
    method["config"] = LibraConfig(**method["config"])
    job["shape"] = AttentionShape(**job["shape"])
    return Series(name=value["name"], method=Method(**method), job=TrainingJob(**job))
