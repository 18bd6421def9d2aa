"""Run many independent tasks. In: a module's function, tasks. Out: results in the tasks' order.

One process runs them here; several run in fresh interpreters, which need no GPU and no torch.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from types import TracebackType

from megatron_libra.orphans import end_with_parent

__all__ = ["TaskPool"]


class TaskPool:
    """A context manager: `with TaskPool(2) as pool: pool.run(function, tasks)`."""

    def __init__(self, num_processes: int) -> None:
        if num_processes < 1:
            raise ValueError(f"processes ({num_processes}) must be at least 1; try 2.")
        self._num_processes = num_processes
        self._executor: ProcessPoolExecutor | None = None

    def __enter__(self) -> TaskPool:
        if self._num_processes > 1:
            # spawn: a fork would copy the locks of the threads that draw the progress bar.
            context = multiprocessing.get_context("spawn")
            self._executor = ProcessPoolExecutor(
                self._num_processes, mp_context=context, initializer=end_with_parent
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor:
            self._executor.shutdown(cancel_futures=True)

    def run[T, R](
        self,
        function: Callable[[T], R],
        tasks: Sequence[T],
        done: Callable[[int, int], None] = lambda finished, total: None,
    ) -> list[R]:
        """Results in the order of the tasks; `done(finished, total)` is called after each."""
        if self._executor is None:
            results = []
            for task in tasks:
                results.append(function(task))
                done(len(results), len(tasks))
            return results
        futures = [self._executor.submit(function, task) for task in tasks]
        for finished, future in enumerate(as_completed(futures), start=1):
            future.result()  # the first failure ends the run
            done(finished, len(tasks))
        return [future.result() for future in futures]
