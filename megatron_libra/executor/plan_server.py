"""Plan in another process, so that planning never holds the training process's interpreter lock.

In: sequences of a pool, through a pipe. Out: the bytes of its plan. The other process imports the
planner and nothing of torch, and does not run the user's main module again. It ends when its pipe
is closed, so also when the training process dies. Frames are a length and a pickle.
"""

from __future__ import annotations

import os
import pickle
import signal
import struct
import subprocess
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.pool_plan import plan_pool

__all__ = ["PlanServer", "PlanSettings", "serve"]

HEADER = struct.Struct("<Q")
EXIT_S = 1.0
PACKAGE_ROOT = Path(__file__).resolve().parents[2]
COMMAND = (
    "import sys; sys.argv[1] in sys.path or sys.path.insert(0, sys.argv[1]); "
    "from megatron_libra.executor.plan_server import serve; serve()"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanSettings:
    """What all plans of a run share; equal on every rank."""

    context_parallel_size: int
    shape: AttentionShape
    """Heads of one tensor-parallel rank."""
    config: LibraConfig
    seq_length: int
    """L, tokens of one packed sequence."""


class PlanServer:
    """The planner process, seen from the training process. One caller at a time."""

    def __init__(self, settings: PlanSettings) -> None:
        """Start the process; the first plan waits until it is up (about 0.2 s)."""
        self._process = subprocess.Popen(
            [sys.executable, "-c", COMMAND, str(PACKAGE_ROOT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C is for the training process
        )
        assert self._process.stdin is not None and self._process.stdout is not None
        self._to_planner, self._from_planner = self._process.stdin, self._process.stdout
        self._settings: PlanSettings | None = settings

    @property
    def pid(self) -> int:
        """Process id of the planner."""
        return self._process.pid

    def plan(self, sequences: Sequence[Sequence[int]]) -> bytes:
        """The bytes of the plan of one pool. Waits for it.

        Raises:
            ValueError: the sequences break a rule of the planner.
            PlanError: the planner failed or died.
        """
        try:
            if self._settings is not None:
                _write(self._to_planner, self._settings)
                self._settings = None
            _write(self._to_planner, [list(lengths) for lengths in sequences])
            kind, value = _read(self._from_planner)
        except (OSError, EOFError, ValueError) as error:  # ValueError: a pipe closed by close()
            raise PlanError(
                f"the planner process {self.pid} died ({self._ending()}); restart the job, and see "
                "the host's memory and the lines above for the reason."
            ) from error
        if kind == "ValueError":
            raise ValueError(value)
        if kind != "plan":
            raise PlanError(f"the planner failed:\n{value}")
        return bytes(value)

    def _ending(self) -> str:
        try:
            code = self._process.wait(EXIT_S)
        except subprocess.TimeoutExpired:
            return "it closed its pipe"
        return f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"

    def close(self) -> None:
        """End the process, which has nothing to lose; a plan() under way then raises PlanError."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._to_planner, self._from_planner):
            with suppress(OSError):  # a frame that was never read
                pipe.close()


def serve() -> None:
    """Main loop of the planner process: settings once, then sequences -> plan bytes until EOF."""
    requests, answers = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever prints goes to stderr, not between the frames
    try:
        settings: PlanSettings = _read(requests)
        while True:
            _write(answers, _answer(settings, _read(requests)))
    except (EOFError, BrokenPipeError):
        return


def _answer(settings: PlanSettings, sequences: list[list[int]]) -> tuple[str, str | bytes]:
    try:
        plan = plan_pool(
            sequences,
            context_parallel_size=settings.context_parallel_size,
            shape=settings.shape,
            config=settings.config,
            seq_length=settings.seq_length,
        )
        return "plan", plan.to_bytes()
    except ValueError as error:
        return "ValueError", str(error)
    except Exception:
        return "Exception", traceback.format_exc()


def _write(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(HEADER.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: BinaryIO) -> Any:
    header = pipe.read(HEADER.size)
    if len(header) < HEADER.size:
        raise EOFError("pipe closed")
    (size,) = HEADER.unpack(header)
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError("pipe closed inside a frame")
    return pickle.loads(data)
