"""Tests of scripts/gpu: its modules on the path, and dry runs on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
GPU = ROOT / "scripts" / "gpu"


def on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Body of a fixture: the scripts can be imported by name, each test its own."""
    monkeypatch.syspath_prepend(str(GPU))
    yield
    for path in GPU.glob("*.py"):
        sys.modules.pop(path.stem, None)


def dry_run(
    script: str, out: Path, *flags: str, timeout_s: float = 240
) -> tuple[str, list[dict[str, Any]]]:
    """What a benchmark prints, and its JSON lines."""
    command = [sys.executable, str(GPU / script), "--device", "cpu", "--tiny", "--out", str(out)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *flags], capture_output=True, text=True, env=environment, timeout=timeout_s
    )
    assert done.returncode == 0, done.stdout + done.stderr
    file = out / f"{script.removeprefix('bench_').removesuffix('.py')}.jsonl"
    return done.stdout, [json.loads(line) for line in file.read_text().splitlines()]
