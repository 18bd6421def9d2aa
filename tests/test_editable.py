"""The installed package is found from any folder, also from the one that holds the checkout."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
USE = "import megatron_libra; print(megatron_libra.plan_pool.__name__)"


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    """As a user who sets no path."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, "-c", USE], cwd=folder, env=environment, capture_output=True, text=True
    )


def test_a_checkout_does_not_hide_the_package(tmp_path: Path) -> None:
    if run(tmp_path).returncode:
        pytest.skip("megatron_libra is not installed here")
    (tmp_path / "megatron_libra").symlink_to(ROOT)
    found = run(tmp_path)
    assert found.stdout.strip() == "plan_pool", found.stderr
