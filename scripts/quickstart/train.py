"""Run one training of the comparison. In: its flags. Out: RunResult, one record an iteration.

A run leaves train.log and telemetry.jsonl in its folder, and `done` when it ended well. A finished
run is read again instead of repeated, unless its command or the package's sources changed since.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from settings import CONTEXT_PARALLEL, DATA_PARALLEL, ITERATIONS

__all__ = ["RunFailed", "RunResult", "train"]

ROOT = Path(__file__).resolve().parents[2]
STALL_SECONDS = 240
"""A run whose log stands still for so long is taken for hung."""


STOP_SECONDS = 40
"""torchrun gives its workers 30 s to end."""


class RunFailed(RuntimeError):
    """A training did not end well; the message has the path and the end of its log."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """What one training reported."""

    name: str
    records: list[dict[str, Any]]
    """One telemetry record for each iteration, in order."""

    @property
    def losses(self) -> list[float]:
        """Language-model loss of each iteration."""
        return [record["losses"]["lm loss"] for record in self.records]

    def column(self, name: str) -> list[float]:
        """One number of each iteration."""
        return [record[name] for record in self.records]


def train(
    name: str, run_file: Path, flags: list[str], folder: Path, progress: Callable[[int], None]
) -> RunResult:
    """Train, or read what an earlier call of the same command left.

    Args:
        name: of the run, for messages.
        run_file: what it shares with other runs, as YAML.
        flags: what it does not share.
        folder: for logs; made if missing.
        progress: called with the number of iterations that are done.

    Raises:
        RunFailed: the training failed, hung, or reported fewer iterations than it was asked for.
    """
    folder.mkdir(parents=True, exist_ok=True)
    command = _command(run_file, flags, folder)
    done, telemetry = folder / "done", folder / "telemetry.jsonl"
    fingerprint = _fingerprint(command, run_file)
    if not (done.exists() and done.read_text() == fingerprint):
        done.unlink(missing_ok=True)
        telemetry.unlink(missing_ok=True)
        # Megatron's index files; an interrupted run may have left half of one.
        shutil.rmtree(folder / "cache", ignore_errors=True)
        _run(name, command, folder, lambda: progress(_count_lines(telemetry)))
    records = [json.loads(line) for line in telemetry.read_text().splitlines()]
    if len(records) != ITERATIONS:
        raise RunFailed(
            f"{name}: {telemetry} has {len(records)} iterations, {ITERATIONS} were asked for."
        )
    progress(ITERATIONS)
    done.write_text(fingerprint)
    return RunResult(name, records)


def _command(run_file: Path, flags: list[str], folder: Path) -> list[str]:
    workers = DATA_PARALLEL * CONTEXT_PARALLEL
    return [
        *(sys.executable, "-m", "torch.distributed.run"),
        *("--standalone", "--nproc-per-node", str(workers), "-m", "megatron_libra.run"),
        *("--config", str(run_file), str(ROOT / "scripts" / "pretrain_gpt.py"), *flags),
        *("--data-cache-path", str(folder / "cache")),
        *("--libra-log-file", str(folder / "telemetry.jsonl")),
    ]


def _run(name: str, command: list[str], folder: Path, watch: Callable[[], None]) -> None:
    """Run the command in its own process group, so that an interruption ends all of it."""
    log = folder / "train.log"
    # Megatron asks for one connection whenever context parallelism is on, also on the CPU.
    needed = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    with log.open("w") as output:
        output.write(f"+ {shlex.join(command)}\n")
        output.flush()
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=os.environ | needed,
            start_new_session=True,
        )
        try:
            status = _wait(process, log, watch)
        finally:
            _stop(process)
    if status != 0:
        raise RunFailed(f"{name} {_verdict(status)}; the end of {log}:\n{_tail(log)}")


def _stop(process: subprocess.Popen[bytes]) -> None:
    """End the launcher, and by it the workers, which have sessions of their own."""
    if process.poll() is not None:
        return
    os.killpg(process.pid, signal.SIGTERM)
    try:
        process.wait(timeout=STOP_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait(process: subprocess.Popen[bytes], log: Path, watch: Callable[[], None]) -> int | None:
    """The exit status; None if the log stood still for too long."""
    while process.poll() is None:
        watch()
        if time.time() - log.stat().st_mtime > STALL_SECONDS:
            return None
        time.sleep(0.25)
    return process.returncode


def _verdict(status: int | None) -> str:
    return f"printed nothing for {STALL_SECONDS} s" if status is None else f"ended with {status}"


def _tail(log: Path, count: int = 25) -> str:
    """The end of the log; behind a failing process, not behind torchrun's summary of it."""
    lines = log.read_text(errors="replace").splitlines()
    stop = next((i for i, line in enumerate(lines) if "elastic/multiprocessing" in line), None)
    return "\n".join(lines[:stop][-count:])


def _count_lines(path: Path) -> int:
    return path.read_text().count("\n") if path.exists() else 0


def _fingerprint(command: list[str], run_file: Path) -> str:
    """The command and everything that it may load."""
    sha = hashlib.sha256("\0".join(command).encode() + run_file.read_bytes())
    for folder, pattern in (("megatron_libra", "*.py"), ("scripts", "*.py")):
        for path in sorted((ROOT / folder).rglob(pattern)):
            sha.update(path.read_bytes())
    return sha.hexdigest()
