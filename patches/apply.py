"""Make `--context-parallel-impl` a native flag of a Megatron tree. In: a tree. Out: it, patched.

    python patches/apply.py TREE            patch (again: changes nothing)
    python patches/apply.py TREE --diff     print what that would change
    python patches/apply.py TREE --undo     take it all back, byte for byte

Lines are put in front of functions that are found by name, in the file as it is: no line numbers,
no context of any version. Every file is made in memory and compiled before the first one is
written; a write that fails puts the earlier ones back. Stdlib only.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import io
import os
import shutil
import sys
from pathlib import Path

HOOKS = {
    "datasets/data_samplers.py": ("build_pretraining_data_loader",),
    "training.py": ("build_train_valid_test_data_iterators", "training_log", "pretrain"),
    "arguments.py": ("parse_args",),
}
"""File of megatron/training -> functions to extend. Written in this order (undone in reverse), so
the flag exists only where everything behind it does."""
SUPPORTED = ((0, 19), (0, 20))
SHIM = Path(__file__).resolve().with_name("libra_hooks.py")
MARK = "  # added by megatron_libra"
IMPORT = "from megatron.training import libra_hooks" + MARK
DECORATOR = "@libra_hooks.around" + MARK

Contents = dict[Path, str | None]
"""Text of each file; None where there is no file."""


class TreeError(Exception):
    """A tree that cannot be patched or restored; the message says why and what to do."""


def main(argv: list[str] | None = None) -> int:
    """Patch, print or undo; returns the exit code: 0, or 2 with one line on stderr."""
    parser = argparse.ArgumentParser(prog="apply_patches.sh", allow_abbrev=False)
    parser.add_argument(
        "tree", metavar="TREE", help="the folder that holds megatron/: a checkout or site-packages"
    )
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--undo", action="store_true", help="take the patch back")
    action.add_argument("--diff", action="store_true", help="print the patch and change nothing")
    options = parser.parse_args(argv)
    try:
        print(_act(Path(options.tree), undo=options.undo, diff=options.diff))
    except (TreeError, OSError) as error:
        print(f"apply_patches.sh: {error}", file=sys.stderr)
        return 2
    return 0


def _act(tree: Path, *, undo: bool, diff: bool) -> str:
    version = _version(tree)
    if not undo and version[:2] not in SUPPORTED:
        raise TreeError(
            f"{tree} holds megatron-core {'.'.join(map(str, version))}; the hooks fit 0.19 and "
            "0.20. Update the tree; nothing was changed."
        )
    present = _read(tree / "megatron" / "training")
    original = {path: _without_hooks(path, text) for path, text in present.items()}
    wanted = original if undo else {path: _with_hooks(path, t) for path, t in original.items()}
    changed = {path: text for path, text in wanted.items() if text != present[path]}
    if diff:
        return _diff(present, changed, tree) or "(no change)"
    name = f"megatron-core {'.'.join(map(str, version))} in {tree}"
    if not changed:
        return f"{name} is {'not patched' if undo else 'already patched'}; nothing to do."
    _write(present, dict(reversed(changed.items())) if undo else changed)
    return f"{name}: {'restored' if undo else 'patched'} {len(changed)} files."


def _version(tree: Path) -> tuple[int, ...]:
    """megatron-core's version, read without importing it."""
    info = tree / "megatron" / "core" / "package_info.py"
    if not info.is_file() or not (tree / "megatron" / "training" / "training.py").is_file():
        raise TreeError(
            f"{tree} holds no megatron/core and megatron/training; give the root of a Megatron-LM "
            "checkout, or the site-packages folder of a megatron-core wheel (0.19 or newer)."
        )
    numbers = {
        node.targets[0].id: node.value.value
        for node in ast.parse(info.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Name)
        and isinstance(node.value, ast.Constant)
    }
    return tuple(numbers[part] for part in ("MAJOR", "MINOR", "PATCH"))


def _read(training: Path) -> Contents:
    """The shim's file first, then the hooked ones."""
    paths = [training / SHIM.name, *(training / name for name in HOOKS)]
    missing = [str(path) for path in paths[1:] if not path.is_file()]
    if missing:
        raise TreeError(f"{missing[0]} is missing; nothing was changed.")
    # Bytes and back: newlines stay what they are.
    return {path: path.read_bytes().decode() if path.exists() else None for path in paths}


def _without_hooks(path: Path, text: str | None) -> str | None:
    """A file without our lines; None for the shim."""
    if text is None or path.name == SHIM.name:
        if text is not None and _lines(text)[:1] != _lines(SHIM.read_text(encoding="utf-8"))[:1]:
            raise TreeError(f"{path} is not ours; rename it. Nothing was changed.")
        return None
    lines = _lines(text)
    kept = [line for line in lines if line.rstrip("\r\n") not in (IMPORT, DECORATOR)]
    if any(MARK.strip() in line for line in kept):
        raise TreeError(
            f"{path} has a line of the patch that was edited; restore or remove the line that "
            f"says {MARK.strip()!r}. Nothing was changed."
        )
    return "".join(kept)


def _with_hooks(path: Path, text: str | None) -> str:
    """A file with an import behind its imports and a decorator on each function to extend."""
    if text is None:
        return SHIM.read_text(encoding="utf-8")
    body = _parse(path, text).body
    first = next(
        (i for i, node in enumerate(body) if isinstance(node, ast.FunctionDef | ast.ClassDef)),
        len(body),
    )
    imports = [node for node in body[:first] if isinstance(node, ast.Import | ast.ImportFrom)]
    if not imports:
        raise TreeError(f"{path} imports nothing before its functions; nothing was changed.")
    names = next(hooked for name, hooked in HOOKS.items() if path.match(name))
    added = [(imports[-1].end_lineno or 0, IMPORT)]
    added += [(_line_of(name, body, path) - 1, DECORATOR) for name in names]
    lines = _lines(text)
    newline = "\r\n" if lines[0].endswith("\r\n") else "\n"
    # From the end, so that the line numbers above stay true.
    for line, word in sorted(added, key=lambda at: at[0])[::-1]:
        lines.insert(line, word + newline)
    patched = "".join(lines)
    _parse(path, patched)
    return patched


def _line_of(name: str, body: list[ast.stmt], path: Path) -> int:
    """Line of `def name`, below decorators that it may have: ours sees the function itself."""
    found = [node for node in body if isinstance(node, ast.FunctionDef) and node.name == name]
    if len(found) != 1:
        raise TreeError(
            f"{path} defines {name}() {len(found)} times at its top level, and must once; "
            "nothing was changed."
        )
    return found[0].lineno


def _lines(text: str) -> list[str]:
    """Lines as Python counts them (str.splitlines also breaks at form feeds), with their ends."""
    return list(io.StringIO(text, newline=""))


def _parse(path: Path, text: str) -> ast.Module:
    try:
        return ast.parse(text)
    except SyntaxError as error:
        python = ".".join(map(str, sys.version_info[:2]))
        raise TreeError(
            f"{path}, line {error.lineno}: Python {python} does not parse it ({error.msg}); set "
            "PYTHON to the Python that runs Megatron. Nothing was changed."
        ) from error


def _diff(present: Contents, changed: Contents, tree: Path) -> str:
    """Unified, for `git apply` or `patch -p1`, with as little of the tree as they can do with."""
    parts = []
    for path, text in changed.items():
        name = path.relative_to(tree).as_posix()
        before, after = present[path], text
        parts += difflib.unified_diff(
            _lines(before or ""),
            _lines(after or ""),
            "/dev/null" if before is None else f"a/{name}",
            "/dev/null" if after is None else f"b/{name}",
            n=1,
        )
    return "".join(parts).rstrip("\n")


def _write(present: Contents, changed: Contents) -> None:
    """Put the new contents in place, each file by a rename; on a fault, put the old ones back.

    A rename never writes through a hard or symbolic link, so a package cache that an installed
    wheel shares its files with stays as it is.
    """
    staged = {path: path.with_name(f".{path.name}.{os.getpid()}") for path in changed}
    done: list[Path] = []
    try:
        for path, text in changed.items():
            _stage(path, staged[path], text)
        for path, text in changed.items():
            _place(path, staged[path], text)
            done.append(path)
    except BaseException:
        for path in reversed(done):
            _stage(path, staged[path], present[path])
            _place(path, staged[path], present[path])
        raise
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _stage(path: Path, temporary: Path, text: str | None) -> None:
    if text is not None:
        temporary.write_bytes(text.encode())
        shutil.copymode(path if path.exists() else path.with_name("training.py"), temporary)


def _place(path: Path, temporary: Path, text: str | None) -> None:
    if text is None:
        path.unlink()
    else:
        os.replace(temporary, path)


if __name__ == "__main__":
    sys.exit(main())
