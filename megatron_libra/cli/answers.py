"""Plans as JSON answers. In: PoolPlan, WindowOrder. Out: dicts of ints, floats and lists."""

from __future__ import annotations

import math
from typing import Any

from megatron_libra.plan.pool_plan import PoolPlan
from megatron_libra.plan.vrsp import WindowOrder

__all__ = ["order_answer", "plan_answer", "verify_answer"]


def plan_answer(plan: PoolPlan, plan_ms: float) -> dict[str, Any]:
    """The answer of `libra plan`; traffic_bytes[a][b]: a sends to b in one layer's forward."""
    return {
        "workers": plan.num_workers,
        "tiles": _tile_rows(plan),
        "loads": plan.loads.tolist(),
        "imbalance": plan.imbalance,
        "max_tile_over_mean": plan.max_tile_over_mean,
        "traffic_bytes": plan.traffic_bytes.tolist(),
        "rounds": plan.num_rounds.tolist(),
        "peak_resident_kv_bytes": plan.peak_resident_kv_bytes.tolist(),
        "plan_ms": round(plan_ms, 3),
        "digest": plan.digest,
    }


def _tile_rows(plan: PoolPlan) -> list[dict[str, int]]:
    names = ("slot", "head_shard", "start", "stop", "pairs", "home", "worker")
    columns = [getattr(plan.tiles, name).tolist() for name in names]
    return [
        {"tile": tile, **dict(zip(names, row, strict=True))}
        for tile, row in enumerate(zip(*columns, strict=True))
    ]


def order_answer(order: WindowOrder) -> dict[str, Any]:
    """The answer of `libra order`; order is GA-major, order[ga * DP + dp_rank]."""
    return {
        "order": list(order.order),
        "pools": [list(pool) for pool in order.pools],
        "imbalance": order.imbalance,
        "step_imbalance": order.step_imbalance,
        "scope": order.scope,
    }


def verify_answer(report: dict[str, Any]) -> dict[str, Any]:
    """The answer of `libra verify`; an error that is not finite is null in JSON."""
    errors = {name: _finite(error) for name, error in report["errors"].items()}
    return {**report, "errors": errors, "max_error": _finite(report["max_error"])}


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
