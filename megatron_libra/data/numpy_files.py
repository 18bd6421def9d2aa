"""Read .npy and .npz files. In: a path. Out: arrays, or one line that says why there are none.

NumPy's own messages speak of pickle and its keywords; which of them comes depends on the damage.
"""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

__all__ = ["read_npy", "read_npz"]

MAGIC = {".npy": b"\x93NUMPY", ".npz": b"PK"}
"""First bytes by kind; a .npz is a zip archive."""
Array = NDArray[Any]


def read_npy(path: Path) -> Array:
    """The array of a .npy file; ValueError if it is no such file or holds Python objects."""
    found: Array = _load(path, ".npy", "a .npy file of numbers", "with numpy.save")
    return found


def read_npz(path: Path) -> dict[str, Array]:
    """The arrays of a .npz file; ValueError if it is no such file or holds Python objects."""
    found: dict[str, Array] = _load(path, ".npz", "a .npz file of arrays", "again")
    return found


def _load(path: Path, kind: str, what: str, how: str) -> Any:
    with path.open("rb") as stream:
        reason = _other_kind(stream, kind)
        if not reason:
            stream.seek(0)
            try:
                with warnings.catch_warnings(action="ignore"):  # of a damaged header's syntax
                    return _arrays(stream, kind)
            except Exception as error:  # NumPy and zipfile raise a dozen kinds on damaged files
                # Its one word on what is whole, but refused: "... when allow_pickle=False".
                has_objects = isinstance(error, ValueError) and "allow_pickle" in str(error)
                reason = "it holds Python objects" if has_objects else "it is damaged or cut short"
    raise ValueError(f"{path} is not {what} ({reason}); write it {how}.")


def _arrays(stream: BinaryIO, kind: str) -> Any:
    if kind == ".npy":
        return np.load(stream, allow_pickle=False)
    with np.load(stream, allow_pickle=False) as archive:
        return dict(archive.items())


def _other_kind(stream: BinaryIO, kind: str) -> str:
    """What the file is instead, by its first bytes; "" if it may be of the kind."""
    head = stream.read(max(map(len, MAGIC.values())))
    if not head:
        return "it is empty"
    found = next((name for name, magic in MAGIC.items() if head.startswith(magic)), None)
    if found == kind:
        return ""
    return f"it is a {found}" if found else "its content is of another kind"
