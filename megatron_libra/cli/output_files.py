"""Files that a command will write. In: their paths. Out: nothing, or a refusal before the work."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from megatron_libra.data.corpora import CORPORA
from megatron_libra.data.sidecar import sidecar_path
from megatron_libra.simulator.calibration import BUILT_IN

__all__ = ["files_read", "require_writable"]

Identity = Path | tuple[int, int]


def require_writable(*paths: Path | None, inputs: Iterable[Path | None] = ()) -> None:
    """Return if each path that is given can be written; no file is left behind or changed.

    Args:
        paths: of outputs.
        inputs: files that the command reads, which no output may replace.

    Raises:
        ValueError: a folder, a path in no folder, no permission, one path twice, or an input.
    """
    read = {_identity(path) for path in inputs if path is not None and path.is_file()}
    seen: set[Identity] = set()
    for path in filter(None, paths):
        _check(path)
        identity = _identity(path)
        if identity in read:
            raise ValueError(
                f"{path} cannot be written: it is what this command reads; give another file."
            )
        if identity in seen:
            raise ValueError(f"{path} is given for two outputs; give each its own file.")
        if path.is_file() or not path.exists():  # a device takes any number of outputs
            seen.add(identity)


def files_read(corpus: str | None, cost_model: str) -> list[Path]:
    """What a command reads that takes a corpus and a cost model; presets are no files.

    Args:
        corpus: a file of lengths, of which a .jsonl has a sidecar, a preset, or None.
        cost_model: a calibration file, or the name of a built-in model.
    """
    paths = [] if corpus is None or corpus in CORPORA else [Path(corpus)]
    paths += [sidecar_path(path) for path in paths if path.suffix.lower() == ".jsonl"]
    return paths if cost_model in BUILT_IN else [*paths, Path(cost_model)]


def _identity(path: Path) -> Identity:
    """Equal for all names of a file: links of both kinds, and paths that are written otherwise."""
    if not path.exists():
        return path.resolve()
    stat = path.stat()
    return stat.st_dev, stat.st_ino


def _check(path: Path) -> None:
    if path.is_dir():
        raise ValueError(
            f"{path} cannot be written: it is a folder; give a file in it, such as "
            f"{path / 'new.out'}."
        )
    if not path.absolute().parent.is_dir():
        raise ValueError(
            f"{path} cannot be written: {path.parent} is no folder; make it first, or give a file "
            "in a folder that exists."
        )
    if path.exists():
        reason = "" if os.access(path, os.W_OK) else "no permission"
    else:
        reason = _creation_fault(path)
    if reason:
        raise ValueError(f"{path} cannot be written: {reason}; give a file in another folder.")


def _creation_fault(path: Path) -> str:
    """Why the file cannot be made. Root and read-only systems know only by trying."""
    try:
        path.open("xb").close()
        path.unlink()
    except OSError as error:
        return str(error.strerror)
    return ""
