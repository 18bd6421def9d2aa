"""Seconds of varlen attention calls. In: CallTable. Out: seconds of each call, once.

    seconds = call + step * makespan + (empty * empty tiles + probe * probes) / slots
              + query row * rows of queries + key row * rows of keys

The makespan comes from the kernel's tiling (tiling.py); rows are counted once for each head. All
coefficients are at least 0 and come from measured calls (replay/fit.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.tiling import Tiling, tile_work

__all__ = ["FEATURES", "KernelCost", "PassCost", "call_features"]

Float = NDArray[np.float64]
FEATURES = ("call_us", "step_ns", "empty_tile_ns", "probe_ns", "query_row_ns", "key_row_ns")
"""The coefficients that the seconds are linear in, in the order of call_features."""
UNITS = np.array([1e-6, 1e-9, 1e-9, 1e-9, 1e-9, 1e-9])


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
    host_us: float
    """Microseconds that the host needs to issue a call."""

    def seconds(self, calls: CallTable, num_sms: int) -> Float:
        """(C,) seconds of each call on the device."""
        features = call_features(calls, self.tiling, self.tile_steps, self.alone, num_sms)
        coefficients = np.array([getattr(self, name) for name in FEATURES]) * UNITS
        seconds: Float = features @ coefficients
        return seconds

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
) -> Float:
    """(C, 6) what the seconds of each call are linear in, see FEATURES."""
    work, slots = tile_work(calls, tiling), num_sms * tiling.ctas_per_sm
    query_rows = calls.sum(calls.num_queries.astype(np.float64)) * calls.query_heads
    key_rows = calls.sum(calls.num_keys.astype(np.float64)) * calls.kv_heads
    return np.stack(
        [
            np.ones(len(calls)),
            work.makespan(tile_steps, slots, alone),
            work.empty_tiles() / slots,
            work.probes() / slots,
            query_rows,
            key_rows,
        ],
        axis=1,
    )
