"""Read a file of lengths. In: .json, .npy, .npz, .parquet, .idx or .jsonl. Out: LengthRows.

A flat list of document lengths gives one row a document; a list of lists gives one row a packed
sequence. `.idx` is the index of a Megatron corpus (no Megatron needed); `.jsonl` needs its sidecar.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from megatron_libra.data.json_faults import parse_json
from megatron_libra.data.numpy_files import read_npy as load_npy
from megatron_libra.data.parquet import read_parquet
from megatron_libra.data.rows import LengthRows, require_file
from megatron_libra.data.sidecar import load_sidecar, sidecar_path
from megatron_libra.data.words import shortened

__all__ = ["read_lengths"]

IDX_MAGIC = b"MMIDIDX\x00\x00"
EXAMPLE = "[1200, 3000] or [[1200, 3000], [4200]]"
IDX_HEADER = struct.Struct("<9sQBQQ")
"""Magic, version, dtype code, number of sequences, number of documents; int32 lengths follow."""


def read_lengths(path: Path, *, column: str | None = None) -> LengthRows:
    """The lengths in a file, by its suffix.

    Args:
        path: the file.
        column: of a Parquet file, its column of integers or of lists of integers; may be left out
            if there is one such column.

    Raises:
        ValueError: the file is missing or damaged, holds anything but lengths, or needs a package
            that is not installed.
    """
    suffix = require_file(path).suffix.lower()
    if suffix not in READERS:
        raise ValueError(
            f"{path}: suffix {suffix!r} must be one of {', '.join(READERS)}; write lengths of "
            "another format as a JSON list."
        )
    if column is not None and suffix != ".parquet":
        raise ValueError(f"column ({column!r}) is for .parquet files, not {path}; leave it out.")
    try:
        return read_parquet(path, column) if suffix == ".parquet" else READERS[suffix](path)
    except ValueError as error:
        text = str(error)
        raise ValueError(text if str(path) in text else f"{path}: {text}") from None


def read_json(path: Path) -> LengthRows:
    """A list, or an object with the list as `sequences`, the form that `libra plan` takes."""
    try:
        values = parse_json(path.read_bytes())
    except ValueError as error:
        raise ValueError(f"{error}; write {EXAMPLE}.") from None
    if isinstance(values, dict) and "sequences" in values:
        values = values["sequences"]
    if not isinstance(values, list):
        raise ValueError(
            f"holds {shortened(json.dumps(values))}; it must be a list, or an "
            f"object with the list as sequences; write {EXAMPLE}."
        )
    return _rows(values)


def _rows(values: list[Any]) -> LengthRows:
    """Rows of a list of integers or of a list of lists of integers."""
    are_lists = [isinstance(value, list) for value in values]
    if not any(are_lists):
        return LengthRows.from_flat(values)
    if all(are_lists):
        return LengthRows.from_rows(values)
    at = are_lists.index(not are_lists[0])
    raise ValueError(
        f"entry {at} ({str(values[at])[:40]}) must be like entry 0 ({str(values[0])[:40]}): all "
        "integers (documents) or all lists (packed sequences)."
    )


def read_npy(path: Path) -> LengthRows:
    """A one-dimensional array of integers."""
    return LengthRows.from_flat(load_npy(path))


def read_idx(path: Path) -> LengthRows:
    """The sequence lengths of a Megatron .idx, one row each; the .bin is not touched."""
    with path.open("rb") as stream:
        header = stream.read(IDX_HEADER.size)
        if len(header) < IDX_HEADER.size or not header.startswith(IDX_MAGIC):
            raise ValueError("not the index of a Megatron corpus; give the .idx beside a .bin.")
        _, version, _, num_sequences, _ = IDX_HEADER.unpack(header)
        if version != 1:
            raise ValueError(f"version ({version}) of the index must be 1; preprocess it again.")
        held = (path.stat().st_size - IDX_HEADER.size) // 4
        if held < num_sequences:  # before NumPy takes memory for all of them
            raise ValueError(
                f"{held} of {num_sequences} lengths; the file is cut short; copy it again."
            )
        return LengthRows.from_flat(np.fromfile(stream, "<i4", num_sequences))


def read_jsonl(path: Path) -> LengthRows:
    """The sidecar of a jsonl: a row for each line, its conversations."""
    return load_sidecar(sidecar_path(path), source=path)


READERS: dict[str, Callable[[Path], LengthRows]] = {
    ".json": read_json,
    ".npy": read_npy,
    ".npz": LengthRows.load,
    ".parquet": read_parquet,
    ".idx": read_idx,
    ".jsonl": read_jsonl,
}
