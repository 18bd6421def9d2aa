"""Measure a machine and fit the cost model to it. In: kernel, head dimensions, seconds. Out:
CostModel, Validation.

For each head dimension: calls of the grid are run and fitted, then the workers of a few long-tailed
pools are run and predicted. Their calls are not fitted, so their errors are those to expect of a
simulation's computation. What was measured can be kept and fitted again without the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.replay.calls import KernelCall, table_of
from megatron_libra.replay.fit import Errors, fit_pass
from megatron_libra.replay.grid import FIT, GridSize, GroupedCall, fit_calls, plan_calls
from megatron_libra.replay.measure import MANY_ENTRIES, CallKind, CallSeconds, CallTimer
from megatron_libra.simulator.call_cost import KernelCost, PassCost
from megatron_libra.simulator.tilings import tiling_of

__all__ = ["FewCalls", "KernelFit", "MeasuredCall", "Validation", "fit_kernel", "measure_calls"]

Float = NDArray[np.float64]
FIT_SHARE = 0.6
"""Of the seconds; the rest is for the pools."""
FEWEST_CALLS = 12
Progress = Callable[[str], None]


class FewCalls(ValueError):
    """Too few calls were measured in the time given."""


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredCall:
    """A call, what it is for, and how long it took."""

    call: KernelCall
    group: str
    """fit, or the pool and worker of a plan whose time its calls make up."""
    seconds: CallSeconds


@dataclass(frozen=True, slots=True)
class Validation:
    """Errors of one pass of a kernel at one head dimension."""

    head_dim: int
    passes: str
    """forward or backward."""
    fitted: Errors
    """On the calls that were fitted."""
    workers: Errors | None
    """On all calls of workers that were not fitted; None if there was no time for them."""


@dataclass(frozen=True, slots=True, eq=False)
class KernelFit:
    """A kernel at one head dimension."""

    cost: KernelCost
    validations: tuple[Validation, Validation]


def measure_calls(
    timer: CallTimer,
    head_dim: int,
    *,
    size: GridSize,
    heads: Sequence[tuple[int, int]],
    budget_s: float,
    progress: Progress = lambda text: None,
) -> list[MeasuredCall]:
    """Run the grid and then the pools, each until its share of the seconds is used up. Kernels that
    compile at their first call do so before.

    Calls that the kernel or the device's memory cannot hold are left out.

    Raises:
        FewCalls: fewer than 12 calls of the grid fitted into the time.
    """
    grid, plans = fit_calls(head_dim, size, heads), plan_calls(head_dim, size)
    progress(f"head dim {head_dim}: kernels")
    timer.warm_up({_kind(each.call) for each in (*grid, *plans)})
    start = time.perf_counter()
    found = _run(grid, timer, start + FIT_SHARE * budget_s, progress, f"head dim {head_dim}: grid")
    if len(found) < FEWEST_CALLS:
        raise FewCalls(
            f"only {len(found)} calls of head dimension {head_dim} ran in {budget_s:.0f} s, which "
            f"is too few to fit; try --seconds {4 * budget_s:.0f} or --quick."
        )
    tested = _run(plans, timer, start + budget_s, progress, f"head dim {head_dim}: pools")
    if len(tested) < len(plans):  # the last worker is not whole
        tested = [each for each in tested if each.group != tested[-1].group]
    return found + tested


def _kind(call: KernelCall) -> CallKind:
    many = len(call.num_queries) > MANY_ENTRIES
    return CallKind(call.head_dim, call.query_heads, call.kv_heads, many)


def _run(
    calls: list[GroupedCall], timer: CallTimer, deadline: float, progress: Progress, title: str
) -> list[MeasuredCall]:
    import torch

    found = []
    for number, each in enumerate(calls):
        if time.perf_counter() > deadline:
            break
        progress(f"{title}, call {number + 1} of {len(calls)}")
        try:
            seconds = timer.seconds(each.call)
        except (ValueError, torch.OutOfMemoryError):
            continue
        found.append(MeasuredCall(each.call, each.group, seconds))
    return found


def fit_kernel(
    measured: Sequence[MeasuredCall],
    *,
    kernel: str,
    head_dim: int,
    num_sms: int,
    host: CallSeconds,
) -> KernelFit:
    """Fit both passes to the calls of the grid, and test them on the workers of the pools."""
    grid = [each for each in measured if each.group == FIT]
    costs, validations = [], []
    for name, host_s in (("forward", host.forward), ("backward", host.backward)):
        seconds = np.array([getattr(each.seconds, name) for each in grid])
        cost = fit_pass(
            table_of(each.call for each in grid),
            seconds,
            tiling_of(kernel, head_dim, backward=name == "backward"),
            num_sms=num_sms,
            host_us=host_s * 1e6,
        )
        costs.append(cost)
        fitted = Errors.of(_seconds(grid, cost, num_sms), seconds)
        workers = _worker_errors(measured, name, cost, num_sms)
        validations.append(Validation(head_dim, name, fitted, workers))
    return KernelFit(
        KernelCost(forward=costs[0], backward=costs[1]), (validations[0], validations[1])
    )


def _seconds(measured: Iterable[MeasuredCall], cost: PassCost, num_sms: int) -> Float:
    return cost.seconds(table_of(each.call for each in measured), num_sms)


def _worker_errors(
    measured: Sequence[MeasuredCall], name: str, cost: PassCost, num_sms: int
) -> Errors | None:
    """Errors of all calls of a worker together, each as often as a layer makes it."""
    tested = [each for each in measured if each.group != FIT]
    if not tested:
        return None
    _, worker = np.unique([each.group for each in tested], return_inverse=True)
    repeats = np.array([each.call.repeats for each in tested])
    measured_s = np.array([getattr(each.seconds, name) for each in tested])
    predicted_s = _seconds(tested, cost, num_sms)
    return Errors.of(
        np.bincount(worker, repeats * predicted_s), np.bincount(worker, repeats * measured_s)
    )
