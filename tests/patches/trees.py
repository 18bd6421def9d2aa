"""Megatron trees to patch. In: a folder. Out: a tree in it."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "apply_patches.sh"

DEFINITIONS = {
    "datasets/data_samplers.py": "build_pretraining_data_loader",
    "training.py": "training_log pretrain build_train_valid_test_data_iterators",
    "arguments.py": "add_flags parse_args validate_args",
}


def small_tree(root: Path, version: tuple[int, int, int] = (0, 19, 2)) -> Path:
    """A tree with the names that the patch looks for, and nothing else of Megatron."""
    core, training = root / "megatron" / "core", root / "megatron" / "training"
    core.mkdir(parents=True)
    numbers = zip(("MAJOR", "MINOR", "PATCH"), version, strict=True)
    (core / "package_info.py").write_text("".join(f"{name} = {n}\n" for name, n in numbers))
    for name, functions in DEFINITIONS.items():
        text = '"""Doc."""\n\nimport os\nfrom math import (\n    pi,\n)\n\nTAU = 2 * pi\n'
        for function in functions.split():
            text += f"\n\ndef {function}(\n    first, second=None\n):\n    return os.sep, first\n"
        text += "\n\nimport sys  # noqa: E402\n"
        (training / name).parent.mkdir(parents=True, exist_ok=True)
        (training / name).write_text(text)
    return root


def copy_of_wheel(root: Path) -> Path:
    """The installed megatron package, compiled files included, in a folder of its own."""
    spec = importlib.util.find_spec("megatron.training")
    assert spec is not None, "these tests need megatron-core"
    assert spec.origin is not None
    installed = Path(spec.origin).parents[1]
    shutil.copytree(installed, root / "megatron")
    return root


def apply_patches(*words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run scripts/apply_patches.sh as a user does."""
    environment = {**os.environ, "PYTHON": sys.executable}
    command = [str(SCRIPT), *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)


def digest(tree: Path) -> dict[str, str]:
    """Every Python file of a tree, and a hash of its bytes."""
    return {
        str(path.relative_to(tree)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(tree.rglob("*"))
        if path.is_file() and "__pycache__" not in path.parts
    }
