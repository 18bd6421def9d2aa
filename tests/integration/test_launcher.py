"""The real command lines: torchrun with a run file, the script alone, and every way to be
refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.integration.harness import ROOT, SCRIPT, train
from tests.integration.layouts import Layout

TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
LAUNCHER = ["-m", "megatron_libra.run"]


def start(
    command: Sequence[str], directory: Path, **variables: str | None
) -> subprocess.Popen[str]:
    """Start it with these variables, None for one that must not be there."""
    wanted: dict[str, str | None] = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "OMP_NUM_THREADS": "1",
        **variables,
    }
    environment = {name: value for name, value in wanted.items() if value is not None}
    return subprocess.Popen(
        command,
        cwd=directory,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    assert process.returncode == 0, output[-5000:]
    return output


def as_settings(words: Sequence[str]) -> dict[str, Any]:
    """Words of a command line as a run file's mapping."""
    settings: dict[str, Any] = {}
    for word in words:
        if word.startswith("--"):
            key = word[2:]
            settings[key] = True
        else:
            settings[key] = word if settings[key] is True else [settings[key], word]
    return settings


def scalars(directory: Path) -> dict[str, list[float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(directory))
    events.Reload()
    tags = [tag for tag in events.Tags()["scalars"] if tag.startswith("libra/")]
    return {tag: [event.value for event in events.Scalars(tag)] for tag in tags}


def test_torchrun_with_a_run_file(corpus: str, tmp_path: Path) -> None:
    """The file says 50 iterations, the command line 3; both kinds of log tell the losses' story."""
    layout = Layout(dp=2, pool=2)
    settings = as_settings(layout.command_line(corpus)) | {"train-iters": 50}
    (tmp_path / "run.yaml").write_text(json.dumps(settings))  # JSON is YAML
    logs = [
        "--libra-log-file",
        "log.jsonl",
        "--tensorboard-dir",
        "tb",
        "--tensorboard-log-interval",
        "1",
    ]
    words = [*LAUNCHER, "--config", "run.yaml", str(SCRIPT), "--train-iters", "3", *logs]
    output = finish(start([*TORCHRUN, "--nproc-per-node", "2", *words], tmp_path))

    expected = train(2, layout.command_line(corpus, "--train-iters", "3"))[-1].losses
    lines = [json.loads(line) for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert [line["iteration"] for line in lines] == [1, 2, 3]
    assert [line["losses"]["lm loss"] for line in lines] == pytest.approx(expected, rel=1e-6)
    assert all(line["exchanged_bytes"] > 0 for line in lines)
    assert all(line["straggler_pairs"] >= line["mean_pairs"] > 0 for line in lines)
    assert all(line["intra_pool_imbalance"] <= 0.5 for line in lines)
    assert output.count("[libra] iteration") == 3
    assert "process groups created by this rank" in output
    written = scalars(tmp_path / "tb")
    assert written["libra/straggler_pairs"] == pytest.approx(
        [line["straggler_pairs"] for line in lines]
    )


def test_the_run_file_for_a_cpu_needs_no_variable(tmp_path: Path) -> None:
    """The command that configs/tiny_cpu.yaml shows, in a shell without Megatron's variables."""
    words = [*LAUNCHER, "--config", str(ROOT / "configs" / "tiny_cpu.yaml"), str(SCRIPT)]
    fewer = ["--train-iters", "3", "--eval-iters", "0"]
    command = [*TORCHRUN, "--nproc-per-node", "4", *words, *fewer]
    output = finish(start(command, tmp_path, CUDA_DEVICE_MAX_CONNECTIONS=None))
    assert output.count("[libra] iteration") == 3


def test_the_script_needs_no_launcher(corpus: str, tmp_path: Path) -> None:
    layout = Layout()
    words = layout.command_line(corpus, "--train-iters", "2", "--libra-log-file", "log.jsonl")
    finish(start([*TORCHRUN, "--nproc-per-node", "1", str(SCRIPT), *words], tmp_path))
    assert len((tmp_path / "log.jsonl").read_text().splitlines()) == 2


def test_help_shows_the_flags_beside_megatrons(tmp_path: Path) -> None:
    output = finish(start([sys.executable, *LAUNCHER, str(SCRIPT), "--help"], tmp_path))
    assert "--libra-pool-size POOL_SIZE" in output
    assert "(e.g. 1.10 = 10%)" in " ".join(output.split())  # of Megatron, with a bare percent sign
    assert "exceed the mean load to save traffic (0.01 = 1 %)" in " ".join(output.split())


def test_a_run_that_cannot_start_says_so_in_lines(corpus: str, tmp_path: Path) -> None:
    """Exit code 2, a line for each fault, no trace."""
    (tmp_path / "typo.yaml").write_text("libra-cpu: true\nseq-lenght: 4096\n")
    fine = Layout(cp=1, dp=1).command_line(corpus)
    on_gpu = [word for word in fine if word != "--libra-cpu"]
    script = str(SCRIPT)
    cases: dict[str, tuple[list[str], list[str]]] = {
        "nothing": ([], ["usage: torchrun"]),
        "script": (["none.py"], ["SCRIPT (none.py) is not a file"]),
        "file": (["--config", "none.yaml", script], ["--config none.yaml: No such file"]),
        "unset": (["--config=", script, *fine], ["--config : Is a directory; give the path"]),
        "typo": (["--config", "typo.yaml", script, *fine], ["did you mean seq-length?"]),
        "flag": ([script, *fine, "--libra-pol-size", "4"], ["did you mean --libra-pool-size?"]),
        "gpu": ([script, *on_gpu], ["no GPU is visible to torch; add --libra-cpu"]),
        "refused": (
            [script, *fine, "--attention-dropout", "0.1", "--libra-pool-size", "3"],
            ["attention dropout is 0.1", "--libra-pool-size (3) must divide"],
        ),
        "processes": (
            [script, *fine, "--context-parallel-size", "2"],
            ["3 processes are not a multiple of TP 1 x PP 1 x CP 2 = 2; start 2 or 4, or change"],
        ),
        "batch": ([script, *fine], ["--global-batch-size (8) must be a multiple of the data-par"]),
    }
    processes = {"processes": "3", "batch": "3"}
    started = {
        name: start(
            [sys.executable, *LAUNCHER, *words], tmp_path, WORLD_SIZE=processes.get(name, "1")
        )
        for name, (words, _) in cases.items()
    }
    for name, (_, expected) in cases.items():
        output, _ = started[name].communicate(timeout=300)
        lines = [line for line in output.splitlines() if line.startswith("megatron_libra: ")]
        assert started[name].returncode == 2, (name, output)
        assert len(lines) == len(expected), (name, output)
        assert all(part in line for part, line in zip(expected, lines, strict=True)), (name, lines)
        assert "Traceback" not in output, (name, output)
        assert "usage: pretrain_gpt.py" not in output, (name, output)
