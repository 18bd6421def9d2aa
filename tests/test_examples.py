"""The examples run as their first lines say, and the README shows their code."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
LAYER = ROOT / "examples" / "layer.py"
BROKEN = """
import runpy
import megatron_libra.executor.attention as attention
true = attention.libra_attention
attention.libra_attention = lambda *a: true(*a) * 1.001
runpy.run_path({path!r}, run_name="__main__")
"""


TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]


def start(command):
    """Exit code and what it prints on stdout and stderr."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    environment.pop("WORLD_SIZE", None)
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_a_layer_equals_dense_attention():
    code, printed, errors = start([*TORCHRUN, str(LAYER)])
    assert code == 0, errors[-3000:]
    (line,) = printed.splitlines()
    numbers = re.fullmatch(
        r"4 workers: largest error of out, dq, dk, dv (\S+);"
        r" slowest worker (\S+) -> (\S+) times the mean load",
        line,
    )
    assert numbers is not None, line
    error, at_home, placed = map(float, numbers.groups())
    assert 0 < error < 1e-13
    assert placed == pytest.approx(1, abs=0.02) and at_home > 1.3


@pytest.mark.slow
def test_a_wrong_layer_ends_with_an_error(tmp_path):
    script = tmp_path / "broken.py"
    script.write_text(BROKEN.format(path=str(LAYER)))
    code, printed, _ = start([*TORCHRUN, str(script)])
    assert code != 0
    assert float(printed.split("dv ")[1].split(";")[0]) > 1e-5


def test_a_start_without_torchrun_is_refused():
    code, printed, errors = start([sys.executable, str(LAYER)])
    assert (code, printed) == (2, "")
    assert errors == (
        "error: processes (none of torchrun) must be P x CP = 4; "
        "start it with torchrun --nproc-per-node 4 examples/layer.py.\n"
    )


def test_the_readme_shows_the_layer_s_code():
    """Line by line, so that nobody copies what does not run."""
    readme = (ROOT / "README.md").read_text()
    shown = readme.split("in your own layers:")[1].split("A worker's tokens")[0]
    code = [line.strip() for line in shown.splitlines() if line.startswith("    ")]
    code = [line.split("  #")[0].strip() for line in code if not line.startswith("#")]
    source = " ".join(LAYER.read_text().split())
    missing = [line for line in code if " ".join(line.split()) not in source]
    assert len(code) > 8 and not missing, missing
