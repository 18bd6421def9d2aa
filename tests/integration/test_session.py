"""What a session lets VRSP balance."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from tests.integration.harness import call


def scope_of(scope: str, sizes: dict[str, Any]) -> str:
    from megatron_libra.integration.session import _scope

    names = ("tensor_model", "context", "expert_model", "expert_tensor")
    args = {f"{name}_parallel_size": 1 for name in names}
    args |= {"context_parallel_impl": "libra", "libra_pool_size": 1}
    return str(_scope(argparse.Namespace(**(args | sizes)), scope))


def sizes(pool: int, cp: int, tp: int, ep: int, expert_tp: int) -> dict[str, Any]:
    return {
        "libra_pool_size": pool,
        "context_parallel_size": cp,
        "tensor_model_parallel_size": tp,
        "expert_model_parallel_size": ep,
        "expert_tensor_parallel_size": expert_tp,
    }


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        (sizes(4, 2, 1, 1, 1), "auto"),  # no experts, or each rank has all of them
        (sizes(4, 2, 1, 8, 1), "auto"),  # spread over just the pool
        (sizes(4, 2, 1, 4, 1), "auto"),  # over half of it
        (sizes(4, 2, 1, 16, 1), "microbatch"),  # over two pools
        (sizes(3, 2, 1, 4, 1), "microbatch"),  # ranks 4 to 7 are of two pools of 6
        (sizes(2, 2, 4, 8, 1), "auto"),  # over the tensor-parallel ranks of two workers
        (sizes(2, 1, 1, 2, 2), "microbatch"),  # 2 x 2 ranks are two pools of 2
    ],
)
def test_experts_that_pools_share_couple_them(run: dict[str, Any], expected: str) -> None:
    assert call(scope_of, "auto", run) == expected
    assert call(scope_of, "step", run) == "step"


def test_ulysses_keeps_megatron_s_order() -> None:
    assert call(scope_of, "auto", {"context_parallel_impl": "ulysses"}) == "off"
