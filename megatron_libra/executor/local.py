"""Run a function on W local processes joined in one process group; for `libra verify` and tests.

In: an importable function and its arguments. Out: its results, in worker order. Processes come from
a fork server that has torch loaded (0.2 s for four, against 17 s for spawn); they meet through a
file, so no port is needed. A worker that fails or is killed ends the run at once, and the error has
its trace.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from megatron_libra.orphans import end_with_parent

__all__ = ["WorkerFailed", "run_workers"]

PRELOAD = [
    "torch",
    "torch.distributed",
    "torch.fx.experimental.symbolic_shapes",  # which torch.autograd.grad imports when first called
    "megatron_libra.executor.attention",
]
GRACE_S = 0.3
"""A worker that dies takes its peers along; this long all of them may say so."""
LEAVE_S = 10.0


class WorkerFailed(RuntimeError):
    """A worker raised, or was killed; the message has its number and trace."""


@dataclass(frozen=True, slots=True)
class _Settings:
    rank: int
    num_workers: int
    store: str
    backend: str
    timeout_s: float
    num_threads: int


def run_workers(
    fn: Callable[..., Any],
    num_workers: int,
    *args: Any,
    backend: str = "gloo",
    timeout_s: float = 120.0,
    num_threads: int = 1,
) -> list[Any]:
    """Call fn(*args) on local processes with torch.distributed ready; return what it returns.

    Args:
        fn: importable by name in a fresh process; torch.distributed.get_rank() is its worker.
        backend: "gloo", or "nccl" with one GPU for each worker (worker i uses cuda:i).
        timeout_s: seconds for the whole run, and for any collective in it.
        num_threads: torch threads of each worker.

    Raises:
        WorkerFailed: a worker raised or was killed; the others are stopped at once.
        TimeoutError: the run took longer than timeout_s.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory(prefix="libra-") as directory:
        workers, store = [], os.path.join(directory, "store")
        try:
            for rank in range(num_workers):
                reader, writer = context.Pipe(duplex=False)
                settings = _Settings(rank, num_workers, store, backend, timeout_s, num_threads)
                process = context.Process(
                    target=_work, args=(writer, settings, fn, args), daemon=True
                )
                process.start()
                writer.close()
                workers.append((process, reader))
            results = _collect(workers, timeout_s)
            for process, _ in workers:
                process.join(LEAVE_S)
            return results
        finally:
            for process, reader in workers:
                process.kill()
                process.join()
                reader.close()


def _collect(workers: list[tuple[BaseProcess, Connection]], timeout_s: float) -> list[Any]:
    """Results of all workers; raises soon after the first failure."""
    deadline = time.monotonic() + timeout_s
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {reader: rank for rank, (_, reader) in enumerate(workers)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for reader in ready:
            rank = waiting.pop(reader)
            failure = _receive(rank, workers[rank][0], reader, results)
            if failure and not failures:
                deadline = min(deadline, time.monotonic() + GRACE_S)
            failures += [failure] if failure else []
    if failures:
        raise WorkerFailed("\n".join(sorted(failures, key=len)))
    if waiting:
        names = sorted(waiting.values())
        raise TimeoutError(f"workers {names} did not finish within {timeout_s:g} s.")
    return [results[rank] for rank in range(len(workers))]


def _receive(
    rank: int, process: BaseProcess, reader: Connection, results: dict[int, Any]
) -> str | None:
    """Store a worker's result, or return why there is none."""
    try:
        succeeded, value = pickle.loads(reader.recv_bytes())
    except (EOFError, OSError):  # OSError: a worker was killed while it sent
        process.join()
        code = process.exitcode or 0
        reason = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"worker {rank} ended without a result ({reason})."
    if not succeeded:
        return f"worker {rank} failed:\n{value}"
    results[rank] = value
    return None


def _work(
    writer: Connection, settings: _Settings, fn: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """Body of a worker process."""
    end_with_parent()
    try:
        _join(settings)
        _send(writer, True, fn(*args))
        _leave()
    except BaseException:
        _send(writer, False, traceback.format_exc())
        # peers may hang in a collective with this worker, so it does not leave the group in order
        os._exit(1)


def _send(writer: Connection, succeeded: bool, value: Any) -> None:
    # by value: Connection.send would share a tensor's memory, which goes away with this process
    writer.send_bytes(pickle.dumps((succeeded, value)))


def _join(settings: _Settings) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(settings.num_threads)
    if settings.backend == "nccl":
        torch.cuda.set_device(settings.rank)
    dist.init_process_group(
        settings.backend,
        init_method=f"file://{settings.store}",
        rank=settings.rank,
        world_size=settings.num_workers,
        timeout=timedelta(seconds=settings.timeout_s),
    )


def _leave() -> None:
    import torch.distributed as dist

    dist.barrier()
    dist.destroy_process_group()
