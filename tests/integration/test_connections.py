"""When CUDA_DEVICE_MAX_CONNECTIONS=1 is lifted, and what the log says of it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator

import pytest

from megatron_libra.integration import connections
from megatron_libra.integration.arguments import add_arguments
from tests.integration.harness import train
from tests.integration.layouts import Layout

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"


@pytest.fixture(autouse=True)
def one_queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(connections, "_has_context", lambda: False)
    yield


def run(*words: str, **megatron: int) -> argparse.Namespace:
    """A run of libra on GPUs, with P = 2, TP = 1 and CP = 2 unless given."""
    parser = add_arguments(argparse.ArgumentParser(allow_abbrev=False))
    args = parser.parse_args(["--context-parallel-impl", "libra", "--libra-pool-size", "2", *words])
    sizes = {"tensor_model_parallel_size": 1, "context_parallel_size": 2}
    vars(args).update(sizes | megatron)
    return args


@pytest.mark.parametrize(
    "args",
    [
        run(),
        run(context_parallel_size=1),
        run("--libra-transport", "nccl"),
        run("--libra-transport", "symmetric"),
        run("--context-parallel-impl", "ulysses"),
    ],
    ids=["auto", "cp1", "nccl", "symmetric", "ulysses"],
)
def test_lifted_where_only_the_check_wants_it(args: argparse.Namespace) -> None:
    line = connections.lift(args)
    assert VARIABLE not in os.environ
    assert line is not None and "=1 is lifted" in line and "--libra-keep-one-queue" in line


@pytest.mark.parametrize(
    "args",
    [
        run(tensor_model_parallel_size=2),
        run("--libra-keep-one-queue"),
        run("--libra-cpu"),
        run("--libra-pool-size", "1", context_parallel_size=1),
        run("--context-parallel-impl", "ulysses", context_parallel_size=1),
    ],
    ids=["tp2", "opted out", "cpu", "one worker", "one worker of ulysses"],
)
def test_stays_where_it_is_wanted_or_harmless(args: argparse.Namespace) -> None:
    assert connections.lift(args) is None
    assert os.environ[VARIABLE] == "1"


@pytest.mark.parametrize("value", [None, "8", "32"])
def test_other_values_are_the_user_s(value: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert connections.lift(run()) is None
    assert os.environ.get(VARIABLE) == value


def test_a_context_made_too_early_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "_has_context", lambda: True)
    line = connections.lift(run())
    assert os.environ[VARIABLE] == "1"
    assert line is not None and "=1 stays" in line and "a CUDA context was made" in line


def test_megatron_checks_first_and_initializes_without_it(corpus: str) -> None:
    layout = Layout(cp=2, flags="--train-iters 1 --eval-iters 0")
    records = train(layout.world_size, layout.command_line(corpus), arrange=_as_on_gpus)
    assert len(records[-1].losses) == 1


def _as_on_gpus() -> None:
    """In a training process: lift on the CPU too, and look when Megatron would make contexts."""
    from megatron.training import arguments, training

    connections._in_the_way = lambda args: True  # type: ignore[assignment]
    connections._has_context = lambda: False  # type: ignore[assignment]
    validate, initialize = arguments.validate_args, training.initialize_megatron
    checked: list[str | None] = []

    def validate_args(*args: object, **kwargs: object) -> object:
        result = validate(*args, **kwargs)
        checked.append(os.environ.get(VARIABLE))
        return result

    def initialize_megatron(*args: object, **kwargs: object) -> object:
        assert checked == ["1"] and VARIABLE not in os.environ
        return initialize(*args, **kwargs)

    arguments.validate_args, training.initialize_megatron = validate_args, initialize_megatron
