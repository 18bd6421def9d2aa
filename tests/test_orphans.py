"""Processes that libra starts end with the one that started them, also when that one is killed."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).resolve().parent.parent
WORKERS = """
import time
from megatron_libra.executor.local import run_workers
def sleep():
    print("up", flush=True)
    time.sleep(1000)
if __name__ == "__main__":
    run_workers(sleep, 2)
"""
TASKS = """
import time
from megatron_libra.simulator.processes import TaskPool
def sleep(_):
    print("up", flush=True)
    time.sleep(1000)
if __name__ == "__main__":
    with TaskPool(2) as pool:
        pool.run(sleep, [1, 2])
"""
COUNTING = """
import time
from pathlib import Path
from megatron_libra.data import jsonl
def counter(record):
    print("up", flush=True)
    time.sleep(1000)
if __name__ == "__main__":
    jsonl.RANGE_BYTES = 4
    lines = Path("lines.jsonl")
    lines.write_text('{"a": 1}\\n{"a": 2}\\n')
    jsonl.count_jsonl(lines, tokenizer="program:counter", num_workers=2)
"""


def computes(process: psutil.Process) -> bool:
    """Whether it still runs; nobody may be there to reap an orphan that has ended."""
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("program", [WORKERS, TASKS, COUNTING], ids=["verify", "tasks", "jsonl"])
def test_no_process_outlives_a_killed_parent(tmp_path: Path, program: str) -> None:
    (tmp_path / "program.py").write_text(program)
    parent = subprocess.Popen(
        [sys.executable, "program.py"],
        cwd=tmp_path,
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    assert [parent.stdout.readline() for _ in range(2)] == ["up\n", "up\n"]
    family = psutil.Process(parent.pid).children(recursive=True)
    assert len(family) >= 2
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    deadline = time.monotonic() + 20
    while (alive := list(filter(computes, family))) and time.monotonic() < deadline:
        time.sleep(0.1)
    for process in alive:
        process.kill()
    assert not alive
