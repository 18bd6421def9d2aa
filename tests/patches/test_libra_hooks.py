"""The file that the patch adds, without Megatron: its decorator with and without libra."""

from __future__ import annotations

import importlib.util
import sys
import types
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SHIM = Path(__file__).resolve().parents[2] / "patches" / "libra_hooks.py"


def load() -> ModuleType:
    """The file as a module, executed now."""
    spec = importlib.util.spec_from_file_location("libra_hooks", SHIM)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse_args(*args: Any, **kwargs: Any) -> Any:
    """Stands for Megatron's."""
    return args, kwargs


def pretrain(*args: Any, **kwargs: Any) -> Any:
    """Stands for Megatron's."""
    return args, kwargs


@pytest.fixture
def without_libra(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The module where no package of that name can be found."""
    monkeypatch.setitem(sys.modules, "megatron_libra", None)
    module = load()
    assert not module.INSTALLED
    return module


def test_without_libra_functions_are_themselves(without_libra: ModuleType) -> None:
    assert without_libra.around(pretrain) is pretrain


def test_without_libra_other_flags_pass(
    without_libra: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1", "libra"])
    wrapped = without_libra.around(parse_args)
    assert wrapped(1, ignore_unknown_args=True) == ((1,), {"ignore_unknown_args": True})
    assert wrapped.__wrapped__ is parse_args


@pytest.mark.parametrize(
    "flag", ["--context-parallel-impl", "--context-parallel-impl=libra", "--libra-pool-size"]
)
def test_without_libra_its_flags_are_one_line(
    without_libra: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flag: str,
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", flag, "libra"])
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit) as exit_:
        without_libra.around(parse_args)()
    assert exit_.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert flag in line and "install" in line and sys.executable in line


def test_only_rank_0_speaks_and_it_goes_first(
    without_libra: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--context-parallel-impl", "libra"])
    monkeypatch.setenv("RANK", "3")
    waited: list[float] = []
    monkeypatch.setattr(without_libra.time, "sleep", waited.append)
    with pytest.raises(SystemExit) as exit_:
        without_libra.around(parse_args)()
    assert exit_.value.code == 2
    assert waited and waited[0] >= 5
    assert capsys.readouterr().err == ""


def test_with_libra_calls_go_to_its_extension(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    def call(function: Any, *args: Any, **kwargs: Any) -> str:
        calls.append((function, args, kwargs))
        return "extended"

    native = types.ModuleType("native")
    native.call = call  # type: ignore[attr-defined]
    integration = types.ModuleType("megatron_libra.integration")
    integration.native = native  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron_libra.integration", integration)
    wrapped = load().around(pretrain)
    assert wrapped.__name__ == "pretrain" and wrapped.__wrapped__ is pretrain
    assert calls == []
    assert wrapped(1, key=2) == "extended"
    assert calls == [(pretrain, (1,), {"key": 2})]
