"""The arrows config <- plan <- {data <- simulator <- bench, executor} <- integration, replay, cli.

Also held: only integration knows megatron, plan needs numpy alone and touches nothing outside its
arguments, only cli prints, and the package imports where numpy is all there is.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "megatron_libra"

INNER = {
    "_python": set(),
    "config": set(),
    "orphans": set(),
    "extras": set(),
    "plan": {"config"},
    "data": {"config", "plan", "orphans", "extras"},
    "simulator": {"config", "plan", "data", "orphans", "extras"},
    "bench": {"config", "plan", "data", "simulator"},
    "executor": {"config", "plan", "orphans", "extras"},
    "replay": {"config", "plan", "data", "simulator", "bench", "executor", "orphans"},
    "integration": {"config", "plan", "data", "executor", "extras", ""},
    "cli": {"config", "plan", "data", "simulator", "bench", "executor", "replay", "extras", ""},
    # The package itself, `python -m megatron_libra.run` and `python -m megatron_libra`.
    "": {"_python", "config", "plan", "executor"},
    "run": {"integration"},
    "__main__": {"cli"},
}
"""Layer -> layers of this package that it may import, besides itself; "" is the package itself."""
OUTER = {
    "_python": set(),
    "config": set(),
    "orphans": set(),
    "extras": set(),
    "plan": {"numpy"},
    "data": {"numpy", "pyarrow"},
    "simulator": {"numpy", "matplotlib"},
    "bench": {"numpy"},
    "executor": {"cuda", "numpy", "torch", "triton"},
    "replay": {"numpy", "torch", "matplotlib"},
    "integration": {"numpy", "torch", "megatron", "yaml"},
    "cli": {"numpy", "rich", "torch", "typer"},
    "": set(),
    "run": set(),
    "__main__": set(),
}
"""Layer -> packages besides the standard library that it may import."""
IMPURE = {
    "asyncio", "datetime", "io", "logging", "multiprocessing", "os", "pathlib", "platform",
    "random", "secrets", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "uuid",
}  # fmt: skip
"""Standard modules that would make a plan depend on more than its arguments."""
LAUNCHER = "megatron_libra.integration.launch"
"""`python -m megatron_libra.run` is a command line as well: it says on stderr why it refuses."""


def layer_of(module: str) -> str:
    """The layer of a dotted module name inside the package."""
    return module.partition(".")[2].partition(".")[0]


def imported(tree: ast.AST, module: str, is_package: bool) -> Iterator[str]:
    """Absolute dotted names that a module imports, anywhere in it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".") + ([] if not is_package else [""])
            base = ".".join(parts[: -node.level]) if node.level else ""
            yield ".".join(filter(None, [base, node.module or ""]))


def import_faults(source: str, module: str, is_package: bool = False) -> list[str]:
    """Imports that the arrows forbid."""
    layer = layer_of(module)
    faults = []
    for name in imported(ast.parse(source), module, is_package):
        top = name.partition(".")[0]
        if top == "megatron_libra":
            target = layer_of(name)
            fine = target == layer or target in INNER[layer]
        elif top in sys.stdlib_module_names:
            fine = layer not in ("config", "plan") or top not in IMPURE
        else:
            fine = top in OUTER[layer]
        if not fine:
            faults.append(f"{module} imports {name}")
    return faults


def print_calls(source: str) -> list[int]:
    """Lines that print, or write to the standard streams."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        is_print = isinstance(node, ast.Name) and node.id == "print"
        is_stream = (
            isinstance(node, ast.Attribute)
            and node.attr in ("stdout", "stderr")
            and isinstance(node.value, ast.Name)
            and node.value.id == "sys"
        )
        if is_print or is_stream:
            lines.append(node.lineno)
    return lines


def modules() -> list[tuple[str, Path]]:
    """Every module of the package, with its dotted name."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = list(path.relative_to(ROOT).with_suffix("").parts)
        found.append((".".join(parts[:-1] if parts[-1] == "__init__" else parts), path))
    return found


def test_every_import_follows_the_arrows():
    faults = [
        fault
        for module, path in modules()
        for fault in import_faults(path.read_text(), module, path.name == "__init__.py")
    ]
    assert not faults, "\n".join(faults)


def test_every_layer_is_known():
    assert {layer_of(module) for module, _ in modules()} <= set(INNER)


def test_only_the_command_line_prints():
    faults = [
        f"{path.relative_to(ROOT)}:{line}"
        for module, path in modules()
        if layer_of(module) != "cli" and module != LAUNCHER
        for line in print_calls(path.read_text())
    ]
    assert not faults, faults


def test_every_folder_is_a_package():
    folders = {path.parent for _, path in modules()}
    assert [str(f) for f in sorted(folders) if not (f / "__init__.py").exists()] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_libra.plan.tiles", "import torch"),
        ("megatron_libra.plan.tiles", "def f():\n    import os"),
        ("megatron_libra.plan.tiles", "from megatron_libra.executor.bind import bind"),
        ("megatron_libra.plan.tiles", "from ..data import lengths"),
        ("megatron_libra.plan.placers.paper", "from ...executor import bind"),
        ("megatron_libra.executor.bind", "import megatron.core"),
        ("megatron_libra.executor.bind", "from megatron_libra.integration.state import state"),
        ("megatron_libra.data.sampler", "from torch.utils.data import Dataset"),
        ("megatron_libra.cli.app", "from megatron_libra.integration import run"),
    ],
)
def test_forbidden_imports_are_seen(module, source):
    assert import_faults(source, module)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("megatron_libra.plan.placers.paper", "from ..tiles import cut_blocks"),
        ("megatron_libra.plan.placers.paper", "from megatron_libra.config import LibraConfig"),
        ("megatron_libra.integration.run", "import os, torch\nfrom megatron.core import mpu"),
    ],
)
def test_allowed_imports_pass(module, source):
    assert import_faults(source, module) == []


@pytest.mark.parametrize("source", ["print(1)", "import sys\nsys.stderr.write('x')", "f = print"])
def test_prints_are_seen(source):
    assert print_calls(source)


def run_without(blocked: tuple[str, ...], code: str) -> subprocess.CompletedProcess[str]:
    """Run Python code where importing one of the blocked packages fails."""
    guard = (
        "import sys\n"
        "class Guard:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] in {blocked!r}:\n"
        "            raise ModuleNotFoundError(f'{name} is blocked', name=name)\n"
        "sys.meta_path.insert(0, Guard())\n"
    )
    return subprocess.run(
        [sys.executable, "-c", guard + code], capture_output=True, text=True, cwd=ROOT, timeout=60
    )


def test_the_package_imports_with_numpy_alone():
    blocked = ("torch", "megatron", "typer", "rich", "yaml", "pyarrow", "psutil", "matplotlib")
    run = run_without(
        blocked,
        "import megatron_libra as m\n"
        "plan = m.plan_pool([[5], [3]], context_parallel_size=1, config=m.LibraConfig(pool_size=2,"
        " chunks=1), shape=m.AttentionShape(query_heads=1, kv_heads=1, head_dim=1))\n"
        "assert plan.loads.sum() == 21\n"
        "try:\n    m.libra_attention\nexcept ModuleNotFoundError as e:\n    print(e.name)",
    )
    assert (run.returncode, run.stderr, run.stdout.strip()) == (0, "", "torch")


def test_the_command_line_starts_without_torch():
    run = run_without(
        ("torch", "megatron"),
        "sys.argv = ['libra', 'doctor']\nfrom megatron_libra.cli import main\nmain()",
    )
    assert (run.returncode, run.stderr) == (0, "")
    assert "pip install -e '.[megatron]'" in " ".join(run.stdout.split())
