"""scripts/apply_patches.sh on small trees: what it adds, takes back, refuses, never half does."""

from __future__ import annotations

import ast
import importlib.util
import os
import shutil
import subprocess
from pathlib import Path
from types import ModuleType

import pytest

from tests.patches.trees import DEFINITIONS, ROOT, apply_patches, digest, small_tree

HOOKED = {
    "build_pretraining_data_loader",
    "build_train_valid_test_data_iterators",
    "training_log",
    "pretrain",
    "parse_args",
}


def test_commands_of_the_readme_can_be_pasted() -> None:
    """What a reader puts in is in capitals; a shell would pass `...` on as a word."""
    lines = (ROOT / "patches" / "README.md").read_text().splitlines()
    commands = [line.strip() for line in lines if line.startswith(("    torchrun", "    ./"))]
    assert len(commands) == 4
    assert not [command for command in commands if "..." in command.split()]


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A small tree, in a path with a space."""
    return small_tree(tmp_path / "my tree")


@pytest.fixture(scope="module")
def patcher() -> ModuleType:
    """patches/apply.py, to call in this process."""
    spec = importlib.util.spec_from_file_location("libra_apply", ROOT / "patches" / "apply.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def decorated(tree: Path) -> set[str]:
    """Functions of the tree whose innermost decorator is the patch's."""
    return {
        node.name
        for name in DEFINITIONS
        for node in ast.parse((tree / "megatron/training" / name).read_text()).body
        if isinstance(node, ast.FunctionDef)
        and node.decorator_list
        and ast.unparse(node.decorator_list[-1]) == "libra_hooks.around"
    }


def refused(tree: Path, *words: str) -> str:
    """The one line of a refusal, which leaves the tree as it is."""
    before = digest(tree)
    result = apply_patches(tree, *words)
    assert result.returncode == 2
    assert digest(tree) == before
    (line,) = result.stderr.splitlines()
    return line


def test_patching_only_adds_marked_lines(tree: Path) -> None:
    before = {name: (tree / "megatron/training" / name).read_text() for name in DEFINITIONS}
    assert apply_patches(tree).returncode == 0
    assert decorated(tree) == HOOKED
    for name, text in before.items():
        lines = (tree / "megatron/training" / name).read_text().splitlines()
        kept = [line for line in lines if not line.endswith("# added by megatron_libra")]
        assert kept == text.splitlines()


def test_the_import_stands_behind_the_imports(tree: Path) -> None:
    apply_patches(tree)
    lines = (tree / "megatron/training/training.py").read_text().splitlines()
    assert lines[lines.index(")") + 1].startswith("from megatron.training import libra_hooks")


def test_twice_is_once_and_undo_is_exact(tree: Path) -> None:
    before = digest(tree)
    apply_patches(tree)
    after = digest(tree)
    again = apply_patches(tree)
    assert (again.returncode, digest(tree)) == (0, after)
    assert "already patched" in again.stdout
    assert apply_patches(tree, "--undo").returncode == 0
    assert digest(tree) == before
    again = apply_patches(tree, "--undo")
    assert (again.returncode, digest(tree)) == (0, before)
    assert "not patched" in again.stdout


def test_diff_changes_nothing_and_is_what_git_apply_does(tree: Path, tmp_path: Path) -> None:
    before = digest(tree)
    diff = apply_patches(tree, "--diff").stdout
    assert digest(tree) == before
    if shutil.which("git") is None:
        pytest.skip("no git")
    other = small_tree(tmp_path / "other")
    environment = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tmp_path)}
    subprocess.run(["git", "apply"], input=diff, text=True, cwd=other, env=environment, check=True)
    apply_patches(tree)
    assert digest(other) == digest(tree)


@pytest.mark.parametrize("version", [(0, 19, 0), (0, 20, 0)])
def test_supported_versions(tmp_path: Path, version: tuple[int, int, int]) -> None:
    assert apply_patches(small_tree(tmp_path / "tree", version)).returncode == 0


@pytest.mark.parametrize("version", [(0, 18, 2), (0, 21, 0), (1, 19, 0)])
def test_other_versions_are_refused(tmp_path: Path, version: tuple[int, int, int]) -> None:
    line = refused(small_tree(tmp_path / "tree", version))
    assert ".".join(map(str, version)) in line
    assert "0.19 and 0.20" in line


def test_undo_works_on_any_version(tree: Path) -> None:
    before = digest(tree)
    apply_patches(tree)
    info = tree / "megatron/core/package_info.py"
    info.write_text(info.read_text().replace("MINOR = 19", "MINOR = 23"))
    assert apply_patches(tree, "--undo").returncode == 0
    assert decorated(tree) == set()
    info.write_text(info.read_text().replace("MINOR = 23", "MINOR = 19"))
    assert digest(tree) == before


def test_no_tree_is_refused(tmp_path: Path) -> None:
    assert "holds no megatron/core" in refused(tmp_path)


@pytest.mark.parametrize("change", ["rename", "double"])
def test_a_tree_without_a_function_is_refused(tree: Path, change: str) -> None:
    training = tree / "megatron/training/training.py"
    text = training.read_text()
    if change == "rename":
        training.write_text(text.replace("def pretrain(", "def train_all("))
    else:
        training.write_text(text + "\n\ndef pretrain():\n    pass\n")
    line = refused(tree)
    assert f"{training} defines pretrain() {0 if change == 'rename' else 2} times" in line


def test_a_file_that_does_not_parse_is_refused(tree: Path) -> None:
    (tree / "megatron/training/arguments.py").write_text("import os\ndef parse_args(:\n")
    assert "arguments.py, line 2" in refused(tree)


def test_a_foreign_file_of_the_same_name_is_refused(tree: Path) -> None:
    (tree / "megatron/training/libra_hooks.py").write_text("PRECIOUS = True\n")
    assert "is not ours" in refused(tree)
    assert "is not ours" in refused(tree, "--undo")


def test_an_edited_line_of_the_patch_is_refused(tree: Path) -> None:
    apply_patches(tree)
    training = tree / "megatron/training/training.py"
    training.write_text(
        training.read_text().replace("import libra_hooks ", "import x, libra_hooks ")
    )
    assert "was edited" in refused(tree, "--undo")


def test_a_half_patched_tree_becomes_whole(tree: Path) -> None:
    before = digest(tree)
    apply_patches(tree)
    whole = digest(tree)
    training = tree / "megatron/training/training.py"
    first, decorator, rest = training.read_text().partition("@libra_hooks.around")
    training.write_text(first + rest.partition("\n")[2])
    (tree / "megatron/training/libra_hooks.py").unlink()
    assert digest(tree) != whole
    assert apply_patches(tree).returncode == 0
    assert digest(tree) == whole
    (tree / "megatron/training/libra_hooks.py").unlink()
    assert apply_patches(tree, "--undo").returncode == 0
    assert digest(tree) == before


@pytest.mark.parametrize("undo", [False, True])
@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_a_failing_write_puts_everything_back(
    tree: Path, patcher: ModuleType, monkeypatch: pytest.MonkeyPatch, undo: bool, fails_at: int
) -> None:
    if undo:
        apply_patches(tree)
    before = digest(tree)
    replace, calls = os.replace, []

    def failing(source: Path, target: Path) -> None:
        calls.append(target)
        if len(calls) == fails_at + 1:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(patcher.os, "replace", failing)
    assert patcher.main([str(tree), *(["--undo"] if undo else [])]) == 2
    assert digest(tree) == before


def test_the_flag_comes_last_and_goes_first(
    tree: Path, patcher: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, order = os.replace, []

    def recording(source: Path, target: Path) -> None:
        order.append(target.name)
        replace(source, target)

    monkeypatch.setattr(patcher.os, "replace", recording)
    patcher.main([str(tree)])
    assert order == ["libra_hooks.py", "data_samplers.py", "training.py", "arguments.py"]
    order.clear()
    patcher.main([str(tree), "--undo"])
    assert order == ["arguments.py", "training.py", "data_samplers.py"]


@pytest.mark.parametrize("link", [os.link, os.symlink])
def test_files_shared_by_a_link_stay_as_they_are(tree: Path, tmp_path: Path, link) -> None:  # type: ignore[no-untyped-def]
    cache = tmp_path / "cache.py"
    training = tree / "megatron/training/training.py"
    shutil.move(training, cache)
    link(cache, training)
    before = cache.read_bytes()
    apply_patches(tree)
    assert decorated(tree) == HOOKED
    assert cache.read_bytes() == before


def test_newlines_and_odd_characters_stay(tree: Path) -> None:
    arguments = tree / "megatron/training/arguments.py"
    text = arguments.read_text().replace("TAU", "# page\x0c, caf\u00e9 \u2028 end\nTAU")
    arguments.write_bytes(text.replace("\n", "\r\n").encode())
    before = digest(tree)
    apply_patches(tree)
    assert decorated(tree) == HOOKED
    assert arguments.read_bytes().count(b"\n") == arguments.read_bytes().count(b"\r\n")
    apply_patches(tree, "--undo")
    assert digest(tree) == before


def test_a_decorator_that_is_there_stays_outside(tree: Path) -> None:
    training = tree / "megatron/training/training.py"
    text = training.read_text().replace("def pretrain(", "@timed(\n    1\n)\ndef pretrain(")
    training.write_text(text)
    apply_patches(tree)
    (pretrain,) = (
        node
        for node in ast.parse(training.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name == "pretrain"
    )
    assert [ast.unparse(each) for each in pretrain.decorator_list] == [
        "timed(1)",
        "libra_hooks.around",
    ]


def test_no_usable_python_is_one_line(tree: Path) -> None:
    environment = {**os.environ, "PYTHON": "no-such-python"}
    command = [str(ROOT / "scripts" / "apply_patches.sh"), str(tree)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 2
    assert "set PYTHON" in result.stderr
