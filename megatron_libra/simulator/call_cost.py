"""Seconds of varlen attention calls. In: CallTable. Out: seconds of each call, once.

    full clock = call + step * makespan + (empty * empty tiles + probe * probes) / slots
                 + query row * rows of queries + key row * rows of keys
    seconds    = full clock * (1 + clock_loss * min(1, busy * full clock / clock_ms))

The makespan comes from the kernel's tiling (tiling.py, makespan.py); rows are counted once for each
head. A GPU that is busy for long draws more power than it may and lowers its clock: `busy` is the
share of its slots that the call occupies. All coefficients are at least 0 and come from measured
calls (replay/fit.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.makespan import makespan, spread
from megatron_libra.simulator.tiling import Tiling, tile_work

__all__ = ["FEATURES", "Clock", "KernelCost", "PassCost", "call_features"]

Float = NDArray[np.float64]
FEATURES = ("call_us", "step_ns", "empty_tile_ns", "probe_ns", "query_row_ns", "key_row_ns")
"""The coefficients that the seconds are linear in, in the order of call_features."""
UNITS = np.array([1e-6, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9])


@dataclass(frozen=True, slots=True)
class Clock:
    """How a GPU's clock falls under load; see the module docstring."""

    loss: float
    """By what share a call that lasts long takes longer."""
    ms: float
    """Milliseconds of a call on all slots from which the clock is down; above 0."""

    def slowed(self, full: Float, busy: Float) -> Float:
        """Seconds, of those at full clock."""
        seconds: Float = full * (1 + self.loss * np.minimum(1, busy * full / (self.ms * 1e-3)))
        return seconds

    def at_full(self, seconds: Float, busy: Float) -> Float:
        """The other way round."""
        rate = self.loss * busy / (self.ms * 1e-3)
        ramp = 2 * seconds / (1 + np.sqrt(1 + 4 * rate * seconds))
        full: Float = np.maximum(ramp, seconds / (1 + self.loss))
        return full


@dataclass(frozen=True, slots=True, kw_only=True)
class PassCost:
    """One pass of a kernel at one head dimension; every field is a key of the calibration file."""

    tiling: Tiling
    step_ns: float
    """Nanoseconds of a step of a CTA, on an SM that is full."""
    tile_steps: float
    """Steps that a tile costs besides its own."""
    alone: float
    """How long a CTA takes where slots are left over (its SM and the clock are its own), over the
    time on a full device; at most 1."""
    empty_tile_ns: float
    """Nanoseconds that an empty tile of the grid occupies a slot."""
    probe_ns: float
    """Nanoseconds of a slot for each look at entries that are not a tile's own."""
    query_row_ns: float
    """Nanoseconds of the whole device for each query row and query head: passes around backward."""
    key_row_ns: float
    """The same for each key row and kv head."""
    call_us: float
    """Microseconds of a call besides."""
    clock_loss: float
    """By what share a call that lasts long takes longer, because the clock falls."""
    clock_ms: float
    """Milliseconds of a call on a full device from which the clock is down; above 0."""
    host_us: float
    """Microseconds that the host needs to issue a call."""

    def seconds(self, calls: CallTable, num_sms: int) -> Float:
        """(C,) seconds of each call on the device."""
        features, busy = call_features(calls, self.tiling, self.tile_steps, self.alone, num_sms)
        coefficients = np.array([getattr(self, name) for name in FEATURES]) * UNITS
        return Clock(self.clock_loss, self.clock_ms).slowed(features @ coefficients, busy)

    def scaled(self, factor: float) -> PassCost:
        """The cost at a head dimension of factor times this one's."""
        return replace(
            self,
            step_ns=self.step_ns * factor,
            query_row_ns=self.query_row_ns * factor,
            key_row_ns=self.key_row_ns * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCost:
    """A kernel at one head dimension."""

    forward: PassCost
    backward: PassCost

    def scaled(self, factor: float) -> KernelCost:
        """Both passes at another head dimension."""
        return KernelCost(
            forward=self.forward.scaled(factor), backward=self.backward.scaled(factor)
        )


def call_features(
    calls: CallTable, tiling: Tiling, tile_steps: float, alone: float, num_sms: int
) -> tuple[Float, Float]:
    """(C, 6) what the seconds of each call at full clock are linear in, see FEATURES; (C,) the
    share of the slots that it occupies."""
    work, slots = tile_work(calls, tiling), num_sms * tiling.ctas_per_sm
    query_rows = calls.sum(calls.num_queries.astype(np.float64)) * calls.query_heads
    key_rows = calls.sum(calls.num_keys.astype(np.float64)) * calls.kv_heads
    time = makespan(work, tile_steps, slots, alone)
    busy = np.minimum(1, spread(work, tile_steps, slots) / np.maximum(time, 1e-9))
    features = np.stack(
        [
            np.ones(len(calls)),
            time,
            work.empty_tiles() / slots,
            work.probes() / slots,
            query_rows,
            key_rows,
        ],
        axis=1,
    )
    return features, busy
