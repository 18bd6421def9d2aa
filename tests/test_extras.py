"""How to get an extra: no registry has this package, so every hint says where pip finds it."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import get_args

import pytest

from megatron_libra.extras import Extra, install_hint

ROOT = Path(__file__).resolve().parent.parent


def extras_of_setup() -> set[str]:
    """The names that pip knows, from setup.py."""
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "EXTRAS":
            return set(ast.literal_eval(node.value))
    raise AssertionError("setup.py has no EXTRAS")


def test_a_hint_is_a_command_for_a_checkout() -> None:
    assert install_hint("fa4") == "pip install -e '.[fa4]' in the checkout"


@pytest.mark.parametrize("extra", get_args(Extra))
def test_every_extra_of_a_hint_is_one_of_setup(extra: str) -> None:
    assert extra in extras_of_setup()


def test_no_text_sends_its_reader_to_a_registry() -> None:
    """pip install NAME[EXTRA] would look for the package where it is not."""
    texts = [
        path for kind in ("py", "sh", "md", "yaml") for path in ROOT.glob(f"[!.]*/**/*.{kind}")
    ]
    texts += ROOT.glob("*.md")
    assert len(texts) > 200
    named = "megatron-libra" + "["
    assert [str(path) for path in texts if named in path.read_text(encoding="utf-8")] == []
