"""Fit a pass of a kernel to measured calls. In: calls, seconds. Out: PassCost, errors.

Least squares on relative errors. The five coefficients of call_cost.py are linear and at least 0:
with five, the best of all subsets whose unconstrained solution is positive is the exact answer, so
no solver is needed. What a tile costs besides its steps, and how fast a CTA runs alone, enter the
makespan and are searched on a grid, then once more around the best point.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.call_cost import FEATURES, UNITS, PassCost, call_features
from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.tiling import Tiling

__all__ = ["Errors", "fit_pass", "least_squares"]

Float = NDArray[np.float64]
TILE_STEPS = (0.0, 0.2, 0.4, 0.7, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 9.0, 14.0, 20.0, 30.0)
ALONE = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


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
    first = [
        _fit(calls, seconds, tiling, num_sms, tile_steps, alone)
        for tile_steps, alone in product(TILE_STEPS, ALONE)
    ]
    _, tile_steps, alone, _ = min(first, key=lambda found: found[0])
    near = [
        _fit(calls, seconds, tiling, num_sms, tile_steps * factor, min(1.0, alone + shift))
        for factor, shift in product((0.75, 0.87, 1.0, 1.15, 1.3), (-0.05, 0.0, 0.05))
    ]
    _, tile_steps, alone, coefficients = min(near, key=lambda found: found[0])
    values = dict(zip(FEATURES, (coefficients / UNITS).tolist(), strict=True))
    return PassCost(tiling=tiling, tile_steps=tile_steps, alone=alone, host_us=host_us, **values)


def _fit(
    calls: CallTable,
    seconds: Float,
    tiling: Tiling,
    num_sms: int,
    tile_steps: float,
    alone: float,
) -> tuple[float, float, float, Float]:
    """(sum of squared relative errors, tile_steps, alone, coefficients)."""
    features = call_features(calls, tiling, tile_steps, alone, num_sms) / seconds[:, None]
    coefficients = least_squares(features, np.ones(len(seconds)))
    residual = features @ coefficients - 1
    return float(residual @ residual), tile_steps, alone, coefficients


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
