"""The fit: exact where the model is, the best of all subsets, robust to noise."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.replay.calls import table_of
from megatron_libra.replay.fit import Errors, fit_pass, least_squares
from megatron_libra.replay.grid import GridSize, fit_calls
from megatron_libra.simulator.call_cost import Clock, PassCost
from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.tilings import tiling_of

SIZE = GridSize(tokens=16_384, flops=2e12)


def _calls() -> CallTable:
    return table_of(each.call for each in fit_calls(128, SIZE, ((8, 1), (32, 4))))


def _truth(*, backward: bool, kernel: str = "fa4") -> PassCost:
    return PassCost(
        tiling=tiling_of(kernel, 128, backward=backward),
        step_ns=1500.0,
        tile_steps=2.0,
        alone=0.8,
        empty_tile_ns=100.0 if kernel == "torch_flash" else 0.0,
        probe_ns=300.0 if kernel == "fa4" else 0.0,
        query_row_ns=0.4 if backward else 0.0,
        key_row_ns=0.0,
        call_us=20.0,
        clock_loss=0.0,
        clock_ms=10.0,
        host_us=76.0,
    )


@pytest.mark.parametrize("kernel", ["fa4", "torch_flash"])
@pytest.mark.parametrize("backward", [False, True])
def test_a_fit_finds_what_made_the_times(kernel: str, backward: bool) -> None:
    calls, truth = _calls(), _truth(backward=backward, kernel=kernel)
    seconds = truth.seconds(calls, 132)
    found = fit_pass(calls, seconds, truth.tiling, num_sms=132, host_us=76.0)
    errors = Errors.of(found.seconds(calls, 132), seconds)
    assert errors.median < 1e-3 and errors.worst < 0.02
    assert found.step_ns == pytest.approx(1500, rel=0.01)
    assert found.tile_steps == pytest.approx(2, rel=0.2) and found.host_us == 76
    assert found.alone == pytest.approx(0.8, abs=0.051)


def test_noise_does_not_move_the_time_of_a_step() -> None:
    calls, truth = _calls(), _truth(backward=True)
    seconds = truth.seconds(calls, 132)
    noisy = seconds * np.random.default_rng(0).normal(1, 0.03, len(seconds))
    found = fit_pass(calls, noisy, truth.tiling, num_sms=132)
    assert found.step_ns == pytest.approx(1500, rel=0.03)
    assert Errors.of(found.seconds(calls, 132), seconds).median < 0.02


def test_a_clock_that_falls_is_found() -> None:
    calls = _calls()
    truth = replace(_truth(backward=True), clock_loss=0.17, clock_ms=2.0, alone=1.0)
    seconds = truth.seconds(calls, 132)
    found = fit_pass(calls, seconds, truth.tiling, num_sms=132)
    assert found.clock_loss == pytest.approx(0.17, abs=0.02)
    assert found.step_ns == pytest.approx(1500, rel=0.01)
    assert Errors.of(found.seconds(calls, 132), seconds).worst < 0.03


def test_noise_is_no_falling_clock() -> None:
    calls, truth = _calls(), _truth(backward=True)
    noise = np.random.default_rng(1).normal(1, 0.04, len(calls))
    found = fit_pass(calls, truth.seconds(calls, 132) * noise, truth.tiling, num_sms=132)
    assert found.clock_loss == 0


def test_a_clock_by_hand() -> None:
    """10 % from 4 ms of all slots on: half of it after 2 ms, or after 4 ms on half of the slots."""
    clock = Clock(0.1, 4.0)
    full, busy = np.array([2e-3, 4e-3, 4e-3, 9e-3]), np.array([1.0, 0.5, 1.0, 1.0])
    slowed = clock.slowed(full, busy)
    assert slowed == pytest.approx([2.1e-3, 4.2e-3, 4.4e-3, 9.9e-3])
    assert clock.at_full(slowed, busy) == pytest.approx(full)
    assert Clock(0.0, 4.0).at_full(full, busy) == pytest.approx(full)


def test_a_fit_holds_for_calls_of_another_seed_and_head_count() -> None:
    calls, truth = _calls(), _truth(backward=False)
    found = fit_pass(calls, truth.seconds(calls, 132), truth.tiling, num_sms=132)
    others = table_of(each.call for each in fit_calls(128, SIZE, ((4, 1),), seed=5))
    errors = Errors.of(found.seconds(others, 132), truth.seconds(others, 132))
    assert errors.worst < 0.03


def test_seconds_at_full_clock_are_linear_in_the_coefficients() -> None:
    calls, truth = _calls(), _truth(backward=True)
    parts = [
        replace(truth, **{name: 0.0 for name in names}).seconds(calls, 132)
        for names in (("call_us",), ("step_ns", "probe_ns", "query_row_ns"))
    ]
    assert parts[0] + parts[1] == pytest.approx(truth.seconds(calls, 132))


def test_least_squares_by_hand() -> None:
    """Without a bound, the second coefficient would be -1."""
    features = np.array([[1.0, 0.0], [1.0, 1.0], [1.0, 2.0]])
    assert least_squares(features, np.array([3.0, 2.0, 1.0])) == pytest.approx([2, 0])
    assert least_squares(features, np.array([1.0, 2.0, 3.0])) == pytest.approx([1, 1])
    assert least_squares(features, np.array([-1.0, -2.0, -3.0])).tolist() == [0, 0]


@pytest.mark.parametrize("seed", range(5))
def test_least_squares_is_no_worse_than_any_other_point(seed: int) -> None:
    rng = np.random.default_rng(seed)
    features, target = rng.normal(size=(20, 4)), rng.normal(size=20)
    best = ((features @ least_squares(features, target) - target) ** 2).sum()
    for _ in range(300):
        other = rng.exponential(size=4) * (rng.random(4) < 0.5)
        assert best <= ((features @ other - target) ** 2).sum() + 1e-12


def test_errors_by_hand() -> None:
    errors = Errors.of(np.array([1.1, 2.0, 2.7]), np.array([1.0, 2.0, 3.0]))
    assert (errors.median, errors.worst, errors.count) == (
        pytest.approx(0.1), pytest.approx(0.1), 3,
    )  # fmt: skip
