"""What the benchmarks of this folder share: flags, worker processes, JSON lines, a table.

In: cases (plain dicts) and a body that measures one of them on every worker. Out: OUT/NAME.jsonl, a
line for each case as soon as it is measured. A case that raises, crashes or hangs is written with
its trace and the next one goes on, in fresh processes where the old ones may be broken.
"""

from __future__ import annotations

import argparse
import faulthandler
import functools
import gc
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megatron_libra.executor.local import WorkerFailed, run_workers

__all__ = [
    "TOKEN_PAIRS",
    "Case",
    "Job",
    "World",
    "append",
    "arguments",
    "one_line",
    "print_block",
    "read_rows",
    "require_device",
    "run_cases",
    "show",
    "verdict",
]

ROOT = Path(__file__).resolve().parents[2]
Case = dict[str, Any]
Body = Callable[["World", Case], Case]
TRACE_LINES = 40

TOKEN_PAIRS = 500
"""What a query token costs besides its own pairs, in pairs: about 1.7 ns a head, forward and
backward, where a pair takes 3 ps at head dim 128 and 8 ps at 256 (FlashAttention-4, H200)."""


def arguments(doc: str, *, seconds: float) -> argparse.ArgumentParser:
    """A parser with the flags of every benchmark."""
    parser = argparse.ArgumentParser(
        description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=ROOT / "gpu_out", help="folder for JSON lines")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--tiny", action="store_true", help="sizes for a dry run: the times mean nothing"
    )
    parser.add_argument("--seconds", type=float, default=seconds, help="budget of the whole run")
    parser.add_argument("--case-seconds", type=float, default=90, help="limit of one case")
    parser.add_argument("--seed", type=int, default=0)
    return parser


VERDICTS = ("pass", "FAIL")


@dataclass(frozen=True, slots=True)
class Job:
    """How cases are run; made once from the flags."""

    name: str
    """Of the file and in the table."""
    out: Path
    device: str
    num_workers: int
    deadline: float
    """time.time() behind which no case is begun."""
    case_seconds: float

    @classmethod
    def of(cls, name: str, args: argparse.Namespace, num_workers: int) -> Job:
        """Makes the folder; leaves the process if there is no device for each worker."""
        require_device(args.device, num_workers)
        args.out.mkdir(parents=True, exist_ok=True)
        deadline = time.time() + args.seconds
        return cls(name, args.out, args.device, num_workers, deadline, args.case_seconds)

    @property
    def path(self) -> Path:
        """The file of JSON lines."""
        return self.out / f"{self.name}.jsonl"


class World:
    """The workers of a benchmark, one process and one device each; all make the same calls."""

    def __init__(self, device: str) -> None:
        self.worker, self.num_workers = dist.get_rank(), dist.get_world_size()
        self.backend = "nccl" if device == "cuda" else "gloo"
        self.device = torch.device(device, self.worker) if device == "cuda" else torch.device("cpu")
        self.kept: dict[Any, Any] = {}
        """What cases share: process groups are dear to make and are never given back."""
        self._control = dist.new_group(backend="gloo")
        self._token = torch.zeros(1, device=self.device)

    @property
    def on_gpu(self) -> bool:
        """Whether times mean something."""
        return self.device.type == "cuda"

    def gather(self, value: Any) -> list[Any]:
        """Every worker's value, in worker order. Collective; the host waits."""
        values: list[Any] = [None] * self.num_workers
        dist.all_gather_object(values, value, group=self._control)
        return values

    def align(self) -> None:
        """Let the workers' current streams go on together. Collective."""
        if self.num_workers > 1:
            dist.all_reduce(self._token)


def run_cases(body: Body, cases: Iterable[Case], job: Job, *, line: Callable[[Case], str]) -> int:
    """Measure every case on the job's workers; returns how many failed.

    Args:
        body: importable by name; called by every worker, its result on worker 0 is the record.
        line: one printed line for a record.
    """
    waiting, failed = list(cases), 0
    while waiting:
        left = job.deadline - time.time()
        if left <= 0:
            print(f"{job.name}: no time for {len(waiting)} cases", flush=True)
            break
        marker = job.out / f"{job.name}.started"
        marker.write_text("0 0")
        try:
            wrong = run_workers(
                _serve, job.num_workers, body, waiting, job, line,
                backend="nccl" if job.device == "cuda" else "gloo", timeout_s=left + 30,
            )[0]  # fmt: skip
            failed, waiting = failed + wrong, []
        except (WorkerFailed, TimeoutError) as error:
            begun, wrong = map(int, marker.read_text().split())
            case, trace = waiting[begun], f"{error}\n{_take_hangs(job)}"
            append(job.path, {**case, "error": trace[-4000:]})
            print_block(f"{job.name}: {case} failed", trace)
            failed, waiting = failed + wrong + 1, waiting[begun + 1 :]
        finally:
            marker.unlink(missing_ok=True)
            _take_hangs(job)
    return failed


def _take_hangs(job: Job) -> str:
    """Where workers stood that took too long for a case."""
    files = sorted(job.out.glob(f"{job.name}.hang*"))
    text = "\n".join(file.read_text() for file in files if file.stat().st_size)
    for file in files:
        file.unlink()
    return text


def _serve(body: Body, cases: Sequence[Case], job: Job, line: Callable[[Case], str]) -> int:
    """Body of a worker: all cases in order; returns how many failed here."""
    world, failed = World(job.device), 0
    marker = job.out / f"{job.name}.started"
    hang = (job.out / f"{job.name}.hang{world.worker}").open("w")
    for number, case in enumerate(cases):
        if any(world.gather(time.time() > job.deadline)):
            if world.worker == 0:
                print(f"{job.name}: no time for {len(cases) - number} cases", flush=True)
            break
        if world.worker == 0:
            marker.write_text(f"{number} {failed}")
        faulthandler.dump_traceback_later(job.case_seconds, exit=True, file=hang)
        started = time.monotonic()
        try:
            record = body(world, case)
        except Exception as error:
            # others may hang in a collective with this worker, and a broken CUDA context stays so
            if world.num_workers > 1 or isinstance(error, torch.AcceleratorError):
                raise
            record, failed = {"error": traceback.format_exc()[-4000:]}, failed + 1
            print_block(f"{job.name}: {case} failed", record["error"])
        faulthandler.cancel_dump_traceback_later()
        record = {**case, **record, "case_s": round(time.monotonic() - started, 2)}
        if world.worker == 0:
            append(job.path, record)
            if "error" not in record:
                print(line(record), flush=True)
        gc.collect()
        if world.on_gpu:
            torch.cuda.empty_cache()
    return failed


def append(path: Path, record: Case) -> None:
    """Add one JSON line, with when, where and by which version it was measured."""
    before = path.read_bytes() if path.exists() else b""
    cut_off = bool(before) and not before.endswith(b"\n")
    with path.open("a", encoding="utf-8") as file:
        file.write("\n" * cut_off + json.dumps({**record, **_origin()}) + "\n")


def read_rows(path: Path) -> list[Case]:
    """All records of a file that have no error; a line that a killed run left is named."""
    rows = []
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    for number, text in enumerate(lines, start=1):
        try:
            rows.append(json.loads(text))
        except json.JSONDecodeError:
            print(f"{path}, line {number} is not whole: left out", flush=True)
    return [row for row in rows if "error" not in row]


def _origin() -> Case:
    return {
        "when": time.strftime("%Y-%m-%d %H:%M:%S"),
        "commit": _commit(),
        "torch": torch.__version__,
        "gpu": _gpu(),
        "connections": os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS", "unset"),
    }


@functools.cache
def _commit() -> str:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    )
    return done.stdout.strip() or os.environ.get("COMMIT", "unknown")


@functools.cache
def _gpu() -> str:
    """Asked of the driver, so that a process which only writes keeps no CUDA context."""
    if not torch.cuda.is_available():
        return "none: the times mean nothing"
    query = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True)
    return (done.stdout.splitlines() or ["unknown"])[0]


def show(title: str, rows: Sequence[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Print a table of some columns of the records."""
    cells = [list(columns)] + [[_cell(row.get(name, "-")) for name in columns] for row in rows]
    widths = [max(len(row[i]) for row in cells) for i in range(len(columns))]
    dry = any(str(row.get("gpu", "")).startswith("none") for row in rows)
    if dry:
        cells = [["-" if cell in VERDICTS else cell for cell in row] for row in cells]
    print(f"\n{title}" + (" (dry run: the times mean nothing)" if dry else ""))
    for row in cells:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    sys.stdout.flush()


def one_line(record: Mapping[str, Any], columns: Sequence[str]) -> str:
    """Some columns of a record, while others are still being measured."""
    return " | ".join(f"{name} {_cell(record[name])}" for name in columns if name in record)


def require_device(device: str, num_workers: int = 1) -> None:
    """Leave with a line where there is no device for each worker."""
    if device == "cuda" and not torch.cuda.is_available():
        sys.exit("error: no CUDA device here; --device cpu --tiny makes a dry run of a benchmark.")
    if device == "cuda" and num_workers > torch.cuda.device_count():
        sys.exit(
            f"error: {num_workers} workers need as many GPUs, here are "
            f"{torch.cuda.device_count()}; leave the number out, or --device cpu --tiny."
        )


def verdict(value: float, *, at_most: float | None = None, at_least: float | None = None) -> str:
    """pass or FAIL."""
    good = (at_most is None or value <= at_most) and (at_least is None or value >= at_least)
    return VERDICTS[not good]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 100 else f"{value:.0f}"
    return "x".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def print_block(title: str, text: str) -> None:
    """Print the end of a trace in one block."""
    shown = "\n".join(text.splitlines()[-TRACE_LINES:])
    print(f"--- {title}\n{shown}\n---", flush=True)
