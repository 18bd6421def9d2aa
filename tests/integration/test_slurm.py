"""The batch script, with Slurm's commands replaced by ones that print what they were asked."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tests.integration.harness import ROOT

SCRIPT = ROOT / "scripts" / "slurm" / "train.sbatch"


@pytest.fixture
def slurm(tmp_path: Path) -> dict[str, str]:
    commands = {"srun": 'printf "%s\\n" "$@"', "scontrol": "printf 'node7\\nnode8\\n'"}
    for name, line in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_NODELIST": "node[7-8]",
        "SLURM_NNODES": "2",
        "SLURM_JOB_ID": "41",
        "SLURM_SUBMIT_DIR": str(ROOT),
    }


def run(slurm: dict[str, str], *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["bash", SCRIPT, *words], env=slurm, capture_output=True, text=True)


def test_torchrun_is_told_the_nodes_the_run_file_and_the_flags(slurm: dict[str, str]) -> None:
    done = run(slurm, "configs/256k.yaml", "--data-path", "my data", "--lr", "0.1")
    assert done.returncode == 0, done.stderr
    asked = done.stdout.splitlines()
    assert asked[asked.index("--nnodes") + 1] == "2"
    assert asked[asked.index("--rdzv-endpoint") + 1] == "node7:29500"
    launcher = asked.index("megatron_libra.run")
    assert asked[launcher - 1] == "-m"
    assert asked[launcher + 1 :] == [
        *("--config", "configs/256k.yaml", str(ROOT / "scripts" / "pretrain_gpt.py")),
        *("--data-path", "my data", "--lr", "0.1"),
    ]


def test_without_a_run_file_it_says_how(slurm: dict[str, str]) -> None:
    done = run(slurm)
    assert done.returncode == 2 and "usage: sbatch" in done.stderr
