"""`python -m megatron_libra` is the command line."""

from __future__ import annotations

import subprocess
import sys

from megatron_libra import __version__


def call(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_libra", *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_the_module_is_the_command():
    done = call("--version")
    assert done.returncode == 0 and __version__ in done.stdout
    wrong = call("plan", "no-such-file.json")
    assert wrong.returncode == 2 and "no-such-file.json" in wrong.stderr
    assert "Traceback" not in wrong.stderr
