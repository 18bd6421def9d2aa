"""Hypothesis settings: a busy machine is no failure, and every run tries the same cases."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "data", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("data")
