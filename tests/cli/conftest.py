"""Runs the command line in this process: same main(), captured output, exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from megatron_libra.cli import main
from tests.helpers.replay_cases import STEP

POOL: dict[str, Any] = {
    "sequences": [[1200, 3000, 92], [4292]],
    "seq_length": 4292,
    "context_parallel_size": 2,
    "attention": {"query_heads": 8, "kv_heads": 2, "head_dim": 16, "bytes_per_element": 2},
    "libra": {
        "pool_size": 2,
        "block_size": 512,
        "head_split": 2,
        "chunks": 2,
        "placer": "paper",
        "kv_fetch": "group",
        "layout": "zigzag",
        "load_slack": 0.03,
    },
}
WINDOW: dict[str, Any] = {
    "sequences": [[9], [1, 1], [8], [2], [5, 3], [4], [7], [6]],
    "pool_size": 2,
    "data_parallel_size": 4,
}


@dataclass(frozen=True)
class Run:
    """What a command printed, and its exit code."""

    code: int
    out: str
    err: str

    @property
    def answer(self) -> Any:
        """The JSON on stdout."""
        return json.loads(self.out)


@pytest.fixture
def libra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Run]:
    """Run `libra ARGS...`."""

    def run(*args: object) -> Run:
        monkeypatch.setattr("sys.argv", ["libra", *map(str, args)])
        with pytest.raises(SystemExit) as exit_info:
            main()
        captured = capsys.readouterr()
        return Run(int(exit_info.value.code or 0), captured.out, captured.err)

    return run


@pytest.fixture
def write(tmp_path: Path) -> Callable[[object], Path]:
    """Write a value as JSON, or bytes and text as they are; returns the path."""

    def to_file(value: object, name: str = "request.json") -> Path:
        path = tmp_path / name
        if isinstance(value, bytes):
            path.write_bytes(value)
        else:
            path.write_text(value if isinstance(value, str) else json.dumps(value))
        return path

    return to_file


@pytest.fixture
def corpus(write: Callable[..., Path]) -> Path:
    """Two steps of eight packed sequences, for libra replay."""
    return write(STEP * 2, "packs.json")


@pytest.fixture
def pool() -> dict[str, Any]:
    """A valid POOL.json, to be changed at will."""
    return json.loads(json.dumps(POOL))


@pytest.fixture
def window() -> dict[str, Any]:
    """A valid WINDOW.json, to be changed at will."""
    return json.loads(json.dumps(WINDOW))
