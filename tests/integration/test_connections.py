"""How CUDA is started while CUDA_DEVICE_MAX_CONNECTIONS is 1, and what the log says of it.

A driver that notes the variable stands for CUDA's: as a Python object, and once as a library.
"""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from megatron_libra.integration import connections, state
from megatron_libra.integration.errors import RunError
from tests.integration.harness import ROOT, SCRIPT, train
from tests.integration.layouts import Layout

VARIABLE = "CUDA_DEVICE_MAX_CONNECTIONS"
LIBRARY = """
#include <stdio.h>
#include <stdlib.h>
static int started = 0;
int cuDeviceGetCount(int *count) { *count = 1; return started ? 0 : 3; }
int cuInit(unsigned flags) {
    const char *value = getenv("CUDA_DEVICE_MAX_CONNECTIONS");
    if (!started) fprintf(stderr, "cuInit sees %s\\n", value ? value : "nothing");
    started = 1;
    return 0;
}
"""


class Driver:
    """CUDA's driver, as far as it is asked here."""

    def __init__(self, *, started: bool = False, result: int = 0) -> None:
        self.started, self.result, self.seen = started, result, list[str | None]()

    def cuDeviceGetCount(self, count: Any) -> int:
        return 0 if self.started else 3

    def cuInit(self, flags: int) -> int:
        self.seen.append(os.environ.get(VARIABLE))
        self.started = self.result == 0
        return self.result


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    monkeypatch.setenv(VARIABLE, "1")
    monkeypatch.setattr(state, "_has_queues", False)
    return use(Driver(), monkeypatch)


def use(driver: Driver | None, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(connections, "_driver", lambda: driver)
    return driver


def start(words: str, **settings: Any) -> str | None:
    """Start CUDA as the launcher does; returns the line that follows."""
    connections.start(shlex.split(words), settings)
    return connections.report(connections._read(shlex.split(words), settings))


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("--context-parallel-impl libra --num-layers 2 --data-path a b", {}),
        ("--context-parallel-impl=ulysses --tensor-model-parallel-size=1", {}),
        ("", {"context-parallel-impl": "libra", "seq-length": 4096, "data-path": ["a", "b"]}),
        ("--tensor-model-parallel-size 1 --context-parallel-impl libra",
         {"context-parallel-impl": "megatron", "tensor-model-parallel-size": 2}),
        ("--context-parallel-impl libra", {"libra-keep-one-queue": False}),
        ("--context-parallel-impl libra --tensor-model-parallel-size 01", {}),
    ],
    ids=["libra", "ulysses", "run file", "the command line wins", "false in the run file", "01"],
)  # fmt: skip
def test_cuda_starts_without_it_and_megatron_sees_it(
    words: str, settings: dict[str, Any], driver: Driver
) -> None:
    line = start(words, **settings)
    assert driver.seen == [None]
    assert os.environ[VARIABLE] == "1"
    assert line is not None and "CUDA started with several" in line
    assert "--libra-keep-one-queue" in line


@pytest.mark.parametrize(
    ("words", "settings"),
    [
        ("", {}),
        ("--context-parallel-impl megatron", {"context-parallel-impl": "libra"}),
        ("--context-parallel-impl libra --tensor-model-parallel-size 2", {}),
        ("--context-parallel-impl libra", {"tensor-model-parallel-size": 2}),
        ("--context-parallel-impl libra --libra-keep-one-queue", {}),
        ("--context-parallel-impl libra", {"libra-keep-one-queue": True}),
        ("--context-parallel-impl libra --libra-cpu", {}),
        ("--context-parallel-impl libra --use-mp-args-from-checkpoint-args", {}),
        ("--context-parallel-impl libra --tensor-model-parallel-size", {}),
        ("--context-parallel-impl", {}),
    ],
)  # fmt: skip
def test_it_holds_where_it_is_wanted(words: str, settings: dict[str, Any], driver: Driver) -> None:
    assert start(words, **settings) is None
    assert driver.seen == []
    assert os.environ[VARIABLE] == "1"


def test_a_wrong_flag_is_left_to_megatron_s_parser(
    driver: Driver, capsys: pytest.CaptureFixture[str]
) -> None:
    connections.start(["--context-parallel-impl", "libra", "--libra-keep-one-queue=1"])
    assert driver.seen == [] and os.environ[VARIABLE] == "1"
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("value", [None, "8", "32"])
def test_other_values_are_the_user_s(
    value: str | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE)
    if value is not None:
        monkeypatch.setenv(VARIABLE, value)
    assert start("--context-parallel-impl libra") is None
    assert driver.seen == []
    assert os.environ.get(VARIABLE) == value


@pytest.mark.parametrize("driver_", [Driver(started=True), None], ids=["started", "none"])
def test_too_late_is_said_with_the_way_out(
    driver_: Driver | None, driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(driver_, monkeypatch)
    line = start("--context-parallel-impl libra")
    assert driver_ is None or driver_.seen == []
    assert os.environ[VARIABLE] == "1"
    assert line is not None and "CUDA started with one hardware queue" in line
    assert "python -m megatron_libra.run" in line


def test_a_driver_that_does_not_start_has_no_queues(
    driver: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = use(Driver(result=100), monkeypatch)
    start("--context-parallel-impl libra")
    assert broken.seen == [None] and os.environ[VARIABLE] == "1"
    assert not state.has_queues()


def test_a_second_start_changes_nothing(driver: Driver) -> None:
    assert start("--context-parallel-impl libra") == start("--context-parallel-impl libra")
    assert driver.seen == [None]


def test_a_setting_that_does_not_suit_is_refused(driver: Driver) -> None:
    with pytest.raises(RunError, match="libra-keep-one-queue: 'yes' must be true or false"):
        start("--context-parallel-impl libra", **{"libra-keep-one-queue": "yes"})


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a libcuda.so.1 that says what cuInit sees, and has no device for torch."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler (cc)")
    folder = tmp_path_factory.mktemp("driver")
    (folder / "driver.c").write_text(LIBRARY)
    target = folder / "libcuda.so.1"
    command = [compiler, "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(target)]
    subprocess.run([*command, str(folder / "driver.c")], check=True, timeout=60)
    return folder


@pytest.mark.parametrize(
    ("run_file", "words", "expected"),
    [
        ("context-parallel-impl: libra\n", "", ["cuInit sees nothing"]),
        ("context-parallel-impl: libra\n", "--tensor-model-parallel-size 2", []),
    ],
)
def test_the_launcher_is_the_first_to_start_cuda(
    run_file: str, words: str, expected: list[str], library: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text(run_file)
    launch = ["-m", "megatron_libra.run", "--config", str(tmp_path / "run.yaml"), str(SCRIPT)]
    environment = {**os.environ, VARIABLE: "1", "LD_LIBRARY_PATH": str(library)}
    environment["PYTHONPATH"] = str(ROOT)
    result = subprocess.run(
        [sys.executable, *launch, *words.split()],
        env=environment, capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    lines = result.stderr.splitlines()
    assert [line for line in lines if line.startswith("cuInit")] == expected
    assert "no GPU is visible to torch" in lines[-1]


def test_megatron_checks_the_variable_in_a_run_that_started_without_it(corpus: str) -> None:
    layout = Layout(cp=2, flags="--train-iters 1 --eval-iters 0")
    records = train(layout.world_size, layout.command_line(corpus), arrange=_as_on_gpus)
    assert len(records[-1].losses) == 1


def _as_on_gpus() -> None:
    """In a training process: start as the launcher would, and look when Megatron checks."""
    from megatron.training import arguments, training

    from megatron_libra.integration import hooks

    driver = Driver()
    connections._driver = lambda: driver  # type: ignore[assignment,return-value]
    start("--context-parallel-impl libra")
    assert driver.seen == [None]
    validate, initialize = arguments.validate_args, training.initialize_megatron
    checked: list[str | None] = []
    printed: list[str] = []

    def validate_args(*args: object, **kwargs: object) -> object:
        checked.append(os.environ.get(VARIABLE))
        return validate(*args, **kwargs)

    def initialize_megatron(*args: object, **kwargs: object) -> object:
        assert checked == ["1"] and os.environ[VARIABLE] == "1"
        assert len(printed) == 1 and "several hardware queues" in printed[0]
        return initialize(*args, **kwargs)

    arguments.validate_args, training.initialize_megatron = validate_args, initialize_megatron
    hooks.print_rank_0 = lambda line, rank=None: printed.append(line)
