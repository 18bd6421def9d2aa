"""setup_venv.sh without installing anything: which Python it takes, what it says without one."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


@pytest.fixture
def checkout(tmp_path):
    """A checkout with a space in its path and only what the script reads."""
    root = tmp_path / "a checkout"
    (root / "scripts").mkdir(parents=True)
    shutil.copy(SCRIPTS / "setup_venv.sh", root / "scripts")
    for name in ("constraints.txt", "setup.py"):
        (root / name).write_text("torch==0\n")
    return root


def set_up(root, **environment):
    """Run the script with a bare PATH, so that nothing of this machine is found by accident."""
    tools = root / "tools"
    tools.mkdir(exist_ok=True)
    for tool in ("bash", "sh", "cat", "sha256sum", "cut", "sed", "tail", "rm", "mkdir", "ls",
                 "dirname", "realpath", "sleep", "flock", "cp"):  # fmt: skip
        if (found := shutil.which(tool)) and not (tools / tool).exists():
            (tools / tool).symlink_to(found)
    base = {"PATH": str(tools), "HOME": str(root)}
    return subprocess.run(
        [str(root / "scripts" / "setup_venv.sh")],
        capture_output=True,
        text=True,
        env=base | environment,
        timeout=60,
    )


def fake_python(path, body):
    """An executable that stands for a Python."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def test_without_a_python_the_ways_out_are_named(checkout):
    run = set_up(checkout)
    assert run.returncode == 1
    for word in ("no Python 3.12", "apt-get install", "pyenv install 3.12", "uv python", "PYTHON="):
        assert word in run.stderr
    assert not (checkout / ".venv").exists()


def test_a_shim_that_fails_is_passed_over(checkout):
    """pyenv puts a python3.12 on PATH even if no such version is selected; it exits with 127."""
    fake_python(checkout / "tools" / "python3.12", "exit 127")
    # This stands for the real one below pyenv's folder; it only says that it was asked.
    fake_python(
        checkout / ".pyenv" / "versions" / "3.12.1" / "bin" / "python",
        f'case "$*" in *ensurepip*) exit 0;; *venv*) echo "chosen" >&2; exit 9;; esac\n'
        f'exec {sys.executable} "$@"',
    )
    run = set_up(checkout)
    assert run.returncode == 1
    assert "'virtual environment' failed (status 9)" in run.stderr and "chosen" in run.stderr
    assert str(checkout / ".venv" / "setup.log") in run.stderr


def test_a_python_that_is_asked_for_must_do(checkout):
    run = set_up(checkout, PYTHON="/missing/python")
    assert run.returncode == 1 and "/missing/python" in run.stderr


def test_a_finished_environment_is_left_alone_and_a_half_made_one_is_not(checkout):
    fake = fake_python(
        checkout / "fake" / "python",
        'case "$*" in\n'
        "*ensurepip*) exit 0;;\n"
        '"-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python";;\n'
        f'*pip*) echo "$@" >> "{checkout}/pip.log";;\n'
        "*) echo Python 3.12.0;;\nesac",
    )
    pip_log = checkout / "pip.log"
    assert set_up(checkout, PYTHON=str(fake)).returncode == 0
    assert len(pip_log.read_text().splitlines()) == 2
    again = set_up(checkout, PYTHON=str(fake))
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")
    # Interrupted before the stamp: made again from nothing.
    (checkout / ".venv" / "libra-stamp").unlink()
    (checkout / ".venv" / "left over").touch()
    assert "Replacing" in set_up(checkout, PYTHON=str(fake)).stderr
    assert not (checkout / ".venv" / "left over").exists()
    # Other pinned versions: made again.
    (checkout / "constraints.txt").write_text("torch==1\n")
    assert "Replacing" in set_up(checkout, PYTHON=str(fake)).stderr
    assert len(pip_log.read_text().splitlines()) == 6


def test_a_folder_that_is_no_environment_is_never_removed(checkout):
    (checkout / ".venv").mkdir()
    (checkout / ".venv" / "thesis.txt").write_text("precious")
    run = set_up(checkout, PYTHON=sys.executable)
    assert run.returncode == 1 and "is no virtual environment" in run.stderr
    assert (checkout / ".venv" / "thesis.txt").exists()


@pytest.mark.skipif(shutil.which("bash") is None, reason="the scripts are bash")
@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("*.sh")), ids=lambda path: path.name)
def test_scripts_parse_and_are_executable(script):
    assert os.access(script, os.X_OK)
    subprocess.run(["bash", "-n", str(script)], check=True)
