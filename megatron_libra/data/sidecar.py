"""The sidecar: token counts of a jsonl's lines, made once. In: a jsonl, a tokenizer. Out: a .npz.

    chat.jsonl  ->  chat.jsonl.lengths.npz: lengths, offsets (a row a line) and source

It holds the conversations' own counts; padding and cutting depend on CP and seq_length and are done
when it is read. A jsonl that changed since is an error, never a wrong length.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_libra.data.jsonl import count_jsonl
from megatron_libra.data.rows import LengthRows, read_npz, require_file

__all__ = ["Source", "build_sidecar", "load_sidecar", "read_source", "sidecar_path"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """What a sidecar was counted from."""

    name: str
    """File name of the jsonl, for people."""
    num_bytes: int
    """Its size."""
    modified_ns: int
    """Its time of modification, in nanoseconds."""
    sha256: str
    """Of its content; decides when the time differs, as after a copy."""
    tokenizer: str
    """As it was given to build_sidecar."""

    @classmethod
    def of(cls, path: Path, tokenizer: str) -> Source:
        """Describe a file; reads all of it once."""
        stat = path.stat()
        return cls(
            name=path.name,
            num_bytes=stat.st_size,
            modified_ns=stat.st_mtime_ns,
            sha256=_sha256(path),
            tokenizer=tokenizer,
        )

    def describes(self, path: Path) -> bool:
        """Whether a file has the content that was counted; reads it only if its time differs."""
        stat = path.stat()
        if stat.st_size != self.num_bytes:
            return False
        return stat.st_mtime_ns == self.modified_ns or _sha256(path) == self.sha256


def sidecar_path(source: Path) -> Path:
    """Where the sidecar of a jsonl is looked for: beside it."""
    return source.with_name(source.name + ".lengths.npz")


def build_sidecar(
    source: Path,
    *,
    tokenizer: str,
    chat_template: str | None = None,
    output: Path | None = None,
    num_workers: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Path:
    """Count every line of a jsonl and write its sidecar; returns the path written.

    Args:
        source: the jsonl; blank lines are no lines.
        tokenizer: byte, MODULE:FUNCTION or a Hugging Face tokenizer (see load_counter).
        chat_template: Jinja text instead of the tokenizer's own chat template.
        output: the file to write; default: beside the source.
        num_workers: processes that tokenize.
        progress: called with the bytes counted since its last call.

    Raises:
        ValueError: the jsonl or the tokenizer is missing, or a line cannot be counted.
    """
    require_file(source)
    path = output or sidecar_path(source)
    if path.is_dir() or not os.access(path.absolute().parent, os.W_OK):  # before hours of counting
        raise ValueError(f"{path} cannot be written; give a file in a folder that can be written.")
    described = Source.of(source, tokenizer)
    rows = count_jsonl(
        source,
        tokenizer=tokenizer,
        chat_template=chat_template,
        num_workers=num_workers,
        progress=progress,
    )
    rows.save(path, source=json.dumps(asdict(described)))
    return path


def load_sidecar(path: Path, *, source: Path | None = None) -> LengthRows:
    """Token counts of each line's conversations.

    Args:
        path: the sidecar.
        source: the jsonl it must describe; None trusts it.

    Raises:
        ValueError: the sidecar is missing, or the jsonl is not the one that was counted.
    """
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; the sample lengths of a jsonl are counted once: "
            f"libra lengths {source or 'FILE.jsonl'} --tokenizer NAME."
        )
    described = read_source(path)
    if source is not None and not described.describes(require_file(source)):
        raise ValueError(
            f"{path} is stale, {source} changed since its lines were counted; count them again: "
            f"libra lengths {source} --tokenizer {described.tokenizer}."
        )
    return LengthRows.load(path)


def read_source(path: Path) -> Source:
    """What a sidecar was counted from; ValueError if the file is no sidecar."""
    try:
        return Source(**json.loads(str(read_npz(path)["source"])))
    except (KeyError, TypeError, json.JSONDecodeError):
        raise ValueError(
            f"{path} is no sidecar of a jsonl; write one: "
            "libra lengths FILE.jsonl --tokenizer NAME."
        ) from None


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
