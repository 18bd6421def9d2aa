"""What a new user meets first: an old Python, and an install without the extra for training."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
WITHOUT = """
import runpy, sys
sys.modules[{name!r}] = None
sys.argv = ["run", "--config", "configs/tiny_cpu.yaml", "scripts/pretrain_gpt.py"]
runpy.run_module("megatron_libra.run", run_name="__main__")
"""


def test_an_older_python_is_told_at_once():
    source = (ROOT / "megatron_libra" / "_python.py").read_text(encoding="ascii")
    namespace = {"__name__": "megatron_libra._python"}
    exec(compile(source, "_python.py", "exec"), namespace)  # this one will do
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "version_info", (3, 11, 7, "final", 0))
        with pytest.raises(ImportError, match=r"needs Python 3\.12 or later, this is 3\.11\.7"):
            exec(compile(source, "_python.py", "exec"), namespace)


def test_the_version_is_looked_at_before_anything_else():
    text = (ROOT / "megatron_libra" / "__init__.py").read_text(encoding="ascii")
    imports = [line for line in text.splitlines() if "import" in line and "megatron_libra" in line]
    assert imports[0] == "from megatron_libra import _python as _python"


@pytest.mark.parametrize("name", ["torch", "yaml", "megatron"])
def test_training_without_its_extra_is_one_line(name):
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT.format(name=name)],
        capture_output=True, text=True, timeout=60, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        f"megatron_libra: training needs {name}; pip install -e '.[megatron]' in the checkout.\n"
    )
