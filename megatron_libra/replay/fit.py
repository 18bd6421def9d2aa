"""Fit a pass of a kernel to measured calls. In: calls, seconds. Out: PassCost, errors.

Least squares on relative errors of the seconds at full clock. The six coefficients of call_cost.py
are linear and at least 0: with six, the best of all subsets whose unconstrained solution is
positive is the exact answer, so no solver is needed. The others are searched on grids, in turns:
what a tile costs besides its steps and how fast a CTA runs alone, then the clock. The last turn is
around the best point. A clock that falls is taken only where it explains clearly more.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.call_cost import FEATURES, UNITS, Clock, PassCost, call_features
from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.tiling import Tiling

__all__ = ["Errors", "fit_pass", "least_squares"]

Float = NDArray[np.float64]
TILE_STEPS: tuple[float, ...] = (
    0.0,
    0.2,
    0.4,
    0.7,
    1.0,
    1.5,
    2.0,
    3.0,
    4.0,
    6.0,
    9.0,
    14.0,
    20.0,
    30.0,
)
ALONE: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
CLOCK_LOSS = (0.0, 0.03, 0.06, 0.1, 0.15, 0.2, 0.25)
CLOCK_MS = (3.0, 6.0, 10.0, 15.0, 22.0)
TURNS = 3
LEAST_GAIN = 0.87
"""A clock that falls is two more numbers: it has to lower the squared error to this share, which is
where they are significant (F test, 5 %) for about 50 calls."""


@dataclass(frozen=True, slots=True)
class Errors:
    """Relative errors of predictions, predicted over measured - 1, without sign."""

    median: float
    worst: float
    count: int

    @classmethod
    def of(cls, predicted: Float, measured: Float) -> Errors:
        """Compare two arrays of seconds; measured is above 0."""
        errors = np.abs(predicted / measured - 1)
        return cls(float(np.median(errors)), float(errors.max()), len(errors))


def fit_pass(
    calls: CallTable, seconds: Float, tiling: Tiling, *, num_sms: int, host_us: float = 0.0
) -> PassCost:
    """The cost that predicts the calls best.

    Args:
        calls: (C,) of any sizes; the more unlike they are, the better.
        seconds: (C,) measured, above 0.
        tiling: how the kernel cuts them.
        num_sms: of the device; 1 for a CPU.
        host_us: passed on.
    """
    fit = _Fit(calls, seconds, tiling, num_sms)
    steady = _search(fit, ((0.0, CLOCK_MS[0]),))
    best = _search(fit, tuple(product(CLOCK_LOSS, CLOCK_MS)))
    if best.error > LEAST_GAIN * steady.error:
        best = steady
    return PassCost(
        tiling=tiling,
        tile_steps=best.tile_steps,
        alone=best.alone,
        clock_loss=best.clock.loss,
        clock_ms=best.clock.ms,
        host_us=host_us,
        **dict(zip(FEATURES, (best.coefficients / UNITS).tolist(), strict=True)),
    )


def _search(fit: _Fit, clocks: Sequence[tuple[float, float]]) -> _Point:
    """The best point with a clock of these (loss, ms) or, if there are several, near them."""
    best = fit.at(0.0, 1.0, Clock(0.0, clocks[0][1]))
    tiles, alone = TILE_STEPS, ALONE
    for turn in range(TURNS):
        if turn == TURNS - 1:
            tiles = tuple(best.tile_steps * factor for factor in (0.75, 0.87, 1.0, 1.15, 1.3))
            alone = tuple(min(1.0, best.alone + shift) for shift in (-0.05, 0.0, 0.05))
            if len(clocks) > 1:
                clocks = _near(best.clock)
        given = best.clock
        best = min((fit.at(*each, given) for each in product(tiles, alone)), key=_error)
        found = [fit.at(best.tile_steps, best.alone, Clock(*each)) for each in clocks]
        best = min((best, *found), key=_error)
    return best


def _near(clock: Clock) -> tuple[tuple[float, float], ...]:
    losses = (max(0.0, clock.loss + shift) for shift in (-0.02, -0.01, 0.0, 0.01, 0.02))
    return tuple(product(losses, (0.8 * clock.ms, clock.ms, 1.25 * clock.ms)))


@dataclass(frozen=True, slots=True, eq=False)
class _Point:
    """A fit with everything but the linear coefficients given."""

    error: float
    """Sum of squared relative errors."""
    tile_steps: float
    alone: float
    clock: Clock
    coefficients: Float


def _error(point: _Point) -> float:
    return point.error


@dataclass(frozen=True, slots=True, eq=False)
class _Fit:
    """What is fitted to."""

    calls: CallTable
    seconds: Float
    tiling: Tiling
    num_sms: int

    def at(self, tile_steps: float, alone: float, clock: Clock) -> _Point:
        """The best coefficients of a point."""
        features, busy = call_features(self.calls, self.tiling, tile_steps, alone, self.num_sms)
        full = clock.at_full(self.seconds, busy)
        coefficients = least_squares(features / full[:, None], np.ones(len(full)))
        residual = clock.slowed(features @ coefficients, busy) / self.seconds - 1
        return _Point(float(residual @ residual), tile_steps, alone, clock, coefficients)


def least_squares(features: Float, target: Float) -> Float:
    """(K,) the coefficients of at least 0 with the least squared error; K is small."""
    scale = np.abs(features).max(axis=0)
    used = [k for k in range(features.shape[1]) if scale[k] > 0]
    best, best_error = np.zeros(features.shape[1]), float(target @ target)
    for count in range(1, len(used) + 1):
        for subset in combinations(used, count):
            columns = list(subset)
            solution, *_ = np.linalg.lstsq(features[:, columns] / scale[columns], target)
            if (solution < 0).any():
                continue
            residual = features[:, columns] / scale[columns] @ solution - target
            error = float(residual @ residual)
            if error < best_error:
                best_error = error
                best = np.zeros(features.shape[1])
                best[columns] = solution / scale[columns]
    return best
