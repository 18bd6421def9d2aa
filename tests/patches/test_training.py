"""A patched copy of the installed wheel: without libra, refusing, and training."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.patches.trees import ROOT, apply_patches, copy_of_wheel, digest

CONFIG = ROOT / "configs" / "tiny_cpu.yaml"
TRAIN = str(ROOT / "tests" / "patches" / "train.py")
SCRIPT = str(ROOT / "scripts" / "pretrain_gpt.py")
SMALLER = {
    "context-parallel-size": 1,
    "seq-length": 2048,
    "max-position-embeddings": 2048,
    "train-iters": 3,
    "global-batch-size": 4,
    "eval-iters": 0,
}
WITHOUT_LIBRA = """
import sys
sys.modules["megatron_libra"] = None
from megatron.training import arguments, training, pretrain
from megatron.training.datasets import data_samplers
for function in (
    pretrain,
    training.training_log,
    training.build_train_valid_test_data_iterators,
    data_samplers.build_pretraining_data_loader,
):
    assert not hasattr(function, "__wrapped__"), function
parse = arguments.parse_args
assert vars(parse()) == vars(parse.__wrapped__())
assert not hasattr(parse(), "context_parallel_impl")
sys.argv += ["--context-parallel-impl", "libra"]
parse()
"""
BESIDE_INSTALL = """
import runpy
import sys
from megatron_libra.integration import cpu
cpu.install()
from megatron.training import arguments, training
from megatron_libra.integration.install import install
script = sys.argv.pop(1)
names = ("pretrain", "training_log", "build_train_valid_test_data_iterators")
before = [getattr(training, name) for name in names]
install({"libra-block-size": 96})
assert [getattr(training, name) for name in names] == before
assert arguments.parse_args().libra_block_size == 512, "the command line wins"
cpu.installed = lambda: False
try:
    arguments.parse_args()
except SystemExit as refusal:
    assert refusal.code == 2
cpu.installed = lambda: True
runpy.run_path(script, run_name="pretrain_gpt")["main"]()
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the wheel."""
    return copy_of_wheel(tmp_path_factory.mktemp("wheel") / "site packages")


@pytest.fixture(scope="module")
def patched(wheel: Path) -> Path:
    """The copy, patched."""
    result = apply_patches(wheel)
    assert result.returncode == 0, result.stderr
    return wheel


def run(tree: Path, *words: str, num_processes: int = 0) -> subprocess.CompletedProcess[str]:
    """python, or torchrun, in an environment where the tree's megatron comes first."""
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_processes}"]
    return subprocess.run(
        [sys.executable, *(launch if num_processes else []), *words],
        capture_output=True,
        text=True,
        timeout=240,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": f"{tree}:{ROOT}", "OMP_NUM_THREADS": "1"},
    )


def words_of(flags: dict[str, Any]) -> list[str]:
    """Flags as a command line has them."""
    words: list[str] = []
    for name, value in flags.items():
        words += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    return words


def words_of_config() -> list[str]:
    """The run file, without the launcher that reads it."""
    return words_of(yaml.safe_load(CONFIG.read_text()))


def lines_of_libra(result: subprocess.CompletedProcess[str]) -> list[str]:
    """What a refused run says of it; it says nothing else."""
    assert result.returncode == 2, result.stderr[-4000:]
    assert "Traceback" not in result.stderr
    return [line for line in result.stderr.splitlines() if line.startswith("megatron_libra: ")]


def losses(result: subprocess.CompletedProcess[str]) -> list[str]:
    """Loss of each iteration, and libra's own line of it, as Megatron printed them."""
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    found = re.findall(r"lm loss: (\S+)|(intra-pool.*MB per layer: \S+)", result.stdout)
    return ["".join(each) for each in found]


def test_apply_twice_and_undo(tmp_path: Path) -> None:
    tree = copy_of_wheel(tmp_path)
    before = digest(tree)
    assert apply_patches(tree).returncode == 0
    after = digest(tree)
    assert sorted(path for path in after if after[path] != before.get(path)) == [
        "megatron/training/arguments.py",
        "megatron/training/datasets/data_samplers.py",
        "megatron/training/libra_hooks.py",
        "megatron/training/training.py",
    ]
    assert apply_patches(tree).returncode == 0
    assert digest(tree) == after
    assert apply_patches(tree, "--undo").returncode == 0
    assert digest(tree) == before


def test_without_libra_nothing_changes_but_its_flags_are_refused(patched: Path) -> None:
    (line,) = lines_of_libra(run(patched, "-c", WITHOUT_LIBRA))
    assert "--context-parallel-impl needs the package megatron_libra" in line


def test_beside_the_launcher_a_patched_tree_refuses_once_and_in_lines(patched: Path) -> None:
    flags = {**SMALLER, "attention-dropout": 0.1, "libra-pool-size": 1}
    words = [SCRIPT, *words_of_config(), *words_of(flags)]
    not_hidden, dropout = lines_of_libra(run(patched, "-c", BESIDE_INSTALL, *words))
    assert "--libra-cpu must hide the GPUs" in not_hidden
    assert "attention-dropout" in dropout


@pytest.mark.slow
def test_a_patched_tree_trains_as_the_launcher_does(patched: Path) -> None:
    smaller = words_of(SMALLER)
    native = run(patched, TRAIN, *words_of_config(), *smaller, num_processes=2)
    launcher = ("-m", "megatron_libra.run", "--config", str(CONFIG), SCRIPT)
    launched = run(ROOT, *launcher, *smaller, num_processes=2)
    assert len(losses(native)) == 6
    assert losses(native) == losses(launched)
