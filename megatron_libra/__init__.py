"""Libra: attention load balancing for long-context LLM training, as a Megatron plugin.

Importing this package needs numpy only; `libra_attention` loads torch when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from megatron_libra import _python as _python
from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from megatron_libra.plan.vrsp import order_window

if TYPE_CHECKING:
    from megatron_libra.executor.attention import libra_attention

__version__ = "0.1.0"
__all__ = [
    "AttentionShape",
    "LibraConfig",
    "PoolPlan",
    "libra_attention",
    "order_window",
    "plan_pool",
]


def __getattr__(name: str) -> Any:
    if name == "libra_attention":
        from megatron_libra.executor.attention import libra_attention

        return libra_attention
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
