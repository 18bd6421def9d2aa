"""Train scripts/pretrain_gpt.py on local processes. In: flags. Out: losses, gradient norms, orders.

A fork server holds torch and Megatron; a layout costs its ranks' forks (about a second) and its
iterations. Ranks meet through a file.
"""

from __future__ import annotations

import functools
import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
import traceback
import zlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "pretrain_gpt.py"
PRELOAD = ["tests.integration.preload"]
TIMEOUT_S = 240


@dataclass
class Record:
    """What one rank saw of a run."""

    losses: list[float] = field(default_factory=list)
    """By iteration; on ranks of the last pipeline stage."""
    grad_norms: list[float] = field(default_factory=list)
    """By iteration."""
    evaluations: list[float] = field(default_factory=list)
    """Loss of each evaluation; on ranks of the last pipeline stage."""
    squares: list[float | None] = field(default_factory=list)
    """By iteration: Megatron's sum of squared sample lengths, from which it counts FLOPs."""
    order: list[tuple[str, Any, int | None]] = field(default_factory=list)
    """By microbatch: stream, sample lengths of the pool, checksum of the tokens if there are
    any."""
    tensor_bytes: list[int] = field(default_factory=list)
    """By iteration: bytes of all live tensors."""


def train(
    world_size: int,
    flags: Sequence[str],
    *,
    script: Path = SCRIPT,
    arrange: Callable[[], None] | None = None,
) -> list[Record]:
    """Run the script on so many ranks; returns each rank's record.

    Args:
        world_size: number of processes.
        flags: the script's command line.
        script: what to run.
        arrange: called in each process before the script, to replace names.

    Raises:
        AssertionError: a rank failed; the message is its trace.
    """
    with tempfile.TemporaryDirectory(prefix="libra-test-") as directory:
        job = (world_size, os.path.join(directory, "store"), str(script), list(flags), arrange)
        return _run_all([(_run, (rank, *job)) for rank in range(world_size)])


def call(function: Callable[..., Any], *args: Any) -> Any:
    """Run one function in a process that has Megatron; returns its result."""
    return _run_all([(function, args)])[0]


def _run_all(jobs: Sequence[tuple[Callable[..., Any], tuple[Any, ...]]]) -> list[Any]:
    """Run each job in a process of its own; AssertionError with its trace when one fails."""
    context = _context()
    processes, waiting = [], {}
    for number, (function, args) in enumerate(jobs):
        reader, writer = context.Pipe(duplex=False)
        process = context.Process(target=_work, args=(writer, function, args))
        process.start()
        writer.close()
        processes.append(process)
        waiting[reader] = number
    try:
        return _collect(waiting)
    finally:
        for process in processes:
            _end(process)


def _end(process: BaseProcess) -> None:
    """With all that it started: Megatron's checkpoints start a server that would stay."""
    started: list[psutil.Process] = []
    with suppress(psutil.NoSuchProcess):
        started = psutil.Process(process.pid).children(recursive=True)
    process.terminate()
    process.join()
    for each in started:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    psutil.wait_procs(started, timeout=1)


def _context() -> multiprocessing.context.ForkServerContext:
    """Of a fork server that has Megatron; one that other tests left, without it, is ended first."""
    context = multiprocessing.get_context("forkserver")
    if forkserver._forkserver._preload_modules != PRELOAD:
        forkserver._forkserver._stop()
        context.set_forkserver_preload(PRELOAD)
    return context


def _collect(waiting: dict[Connection, int]) -> list[Any]:
    results: dict[int, Any] = {}
    while waiting:
        ready = wait(list(waiting), timeout=TIMEOUT_S)
        assert ready, f"processes {sorted(waiting.values())} did not finish within {TIMEOUT_S} s"
        for reader in ready:
            number = waiting.pop(reader)
            try:
                failed, result = reader.recv()
            except EOFError:
                failed, result = True, "it ended without an answer"
            assert not failed, f"process {number} failed:\n{result}"
            results[number] = result
    return [results[number] for number in sorted(results)]


def _work(writer: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """Run a job, its output in a file that is shown if it fails."""
    with tempfile.TemporaryFile("w+") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        try:
            writer.send((False, function(*args)))
        except BaseException:
            sys.stdout.flush()
            log.seek(0)
            tail = "".join(log.readlines()[-40:])
            writer.send((True, f"{tail}\n{traceback.format_exc()}"))


def _run(
    rank: int,
    world_size: int,
    store: str,
    script: str,
    flags: list[str],
    arrange: Callable[[], None] | None,
) -> Record:
    import torch

    from megatron_libra.integration.install import install

    torch.set_num_threads(1)
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(world_size),
        LOCAL_RANK=str(rank),
        CUDA_DEVICE_MAX_CONNECTIONS="1",
    )
    torch.distributed.init_process_group = functools.partial(
        torch.distributed.init_process_group, init_method=f"file://{store}"
    )
    install()
    _skip_warm_up()
    record = Record()
    _observe(record)
    if arrange is not None:
        arrange()
    sys.argv = [script, *flags]
    runpy.run_path(script, run_name="__main__")
    return record


def _skip_warm_up() -> None:
    """Megatron warms up fused kernels with dropout on tensors whose size depends on CP.

    On a GPU that draws from the CUDA generator alone; on CPU it would move the one from which
    routers are initialized, and the model would differ from its reference.
    """
    from megatron.training import training

    training.set_jit_fusion_options = lambda **sizes: None


def _observe(record: Record) -> None:
    """Note what Megatron logs, exactly."""
    import torch
    from megatron.training import training

    from megatron_libra.integration.plan_stream import PlannedBatches

    log, evaluate = training.training_log, training.evaluate
    take = PlannedBatches.__next__

    def training_log(loss_dict: Any, *args: Any, **kwargs: Any) -> Any:
        record.losses += [float(loss_dict["lm loss"])] if loss_dict else []
        record.grad_norms.append(float(args[6]))
        record.squares.append(kwargs["seqlen_squared_sum_in_batch"])
        gc.collect()
        tensors = [each for each in gc.get_objects() if type(each) is torch.Tensor]
        record.tensor_bytes.append(sum(each.nbytes for each in tensors))
        return log(loss_dict, *args, **kwargs)

    def evaluation(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        record.evaluations += [float(result[0]["lm loss"])] if result[0] else []
        return result

    def next_batch(self: Any) -> Any:
        planned = take(self)
        tokens = None if planned.batch is None else planned.batch["tokens"]
        checksum = None if tokens is None else zlib.crc32(tokens.numpy().tobytes())
        record.order.append((planned.stream, planned.plan.sequences, checksum))
        return planned

    training.training_log, training.evaluate = training_log, evaluation
    PlannedBatches.__next__ = next_batch
