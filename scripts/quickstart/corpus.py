"""Real documents that every machine has. In: Python's standard library. Out: .bin/.idx files.

A document is one top-level function or class of the library's source files, as written; a token is
one byte, and an end-of-document token closes each document. The lengths have the long tail of real
corpora: half of the documents are below a few hundred bytes, a few are above a hundred thousand.
(Whole files were tried: at a few thousand tokens a sequence almost every file is longer than a
sequence, so all sequences cost the same and there is nothing to balance.) Test files are left out,
since not every Python ships them.
"""

from __future__ import annotations

import ast
import hashlib
import logging
import sysconfig
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

__all__ = ["EOD", "VOCAB_SIZE", "build_corpus", "document_lengths"]

EOD = 256
VOCAB_SIZE = 257
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "lib2to3", "idlelib"}


def source_files() -> list[Path]:
    """The library's source files, in an order that does not depend on the file system."""
    library = Path(sysconfig.get_path("stdlib"))
    files = (path for path in library.rglob("*.py") if not LEFT_OUT & set(path.parts))
    return sorted(files, key=lambda path: path.relative_to(library).as_posix())


def definitions(source: bytes) -> Iterator[bytes]:
    """The source of each top-level function and class; nothing if the file does not parse."""
    try:
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.splitlines(keepends=True)
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            assert node.end_lineno is not None
            yield b"".join(lines[node.lineno - 1 : node.end_lineno])


def build_corpus(prefix: Path, progress: Callable[[float], None] = lambda share: None) -> None:
    """Write prefix.bin, prefix.idx and the lengths, unless complete; the stamp is written last.

    Args:
        prefix: path without suffix, as --data-path takes it.
        progress: called with the share of files that are done.
    """
    stamp = prefix.with_suffix(".stamp")
    fingerprint = _fingerprint()
    if stamp.exists() and stamp.read_text() == fingerprint:
        return
    # Megatron loads torch, which would warn of the GPU that is not asked for.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix.parent.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    files = source_files()
    lengths = []
    for number, path in enumerate(files):
        for text in definitions(path.read_bytes()):
            tokens = np.append(np.frombuffer(text, np.uint8).astype(np.uint16), np.uint16(EOD))
            builder.add_document(tokens, [len(tokens)])
            lengths.append(len(tokens))
        progress((number + 1) / len(files))
    builder.finalize(f"{prefix}.idx")
    np.save(_lengths_file(prefix), np.array(lengths, np.int64))
    stamp.write_text(fingerprint)


def document_lengths(prefix: Path) -> np.ndarray:
    """(documents,) tokens of each document of a corpus that is built."""
    return np.load(_lengths_file(prefix))


def _lengths_file(prefix: Path) -> Path:
    return prefix.with_suffix(".lengths.npy")


def _fingerprint() -> str:
    """What the corpus is made from: this file and the library's files."""
    sha = hashlib.sha256(Path(__file__).read_bytes())
    for path in source_files():
        sha.update(f"{path.name} {path.stat().st_size}\n".encode())
    return sha.hexdigest()
