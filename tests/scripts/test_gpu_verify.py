"""What verify.py runs on several GPUs: its pools, and which transport each takes."""

from __future__ import annotations

from collections import Counter

import pytest

from megatron_libra.config import CHOICES
from megatron_libra.plan.check import check_plan
from tests.scripts.gpu_scripts import on_path


@pytest.fixture(autouse=True)
def _scripts_on_path(monkeypatch):
    yield from on_path(monkeypatch)


@pytest.mark.parametrize("num_workers", [2, 4, 8])
def test_every_split_of_the_workers_has_every_shape_and_placer(num_workers):
    import verify

    found = list(verify.plans(num_workers, 512))
    splits = Counter((plan.config.pool_size, plan.context_parallel_size) for plan in found)
    sizes = [size for size in (1, 2, 4, 8) if size <= num_workers]
    each = len(verify.SHAPES) * len(verify.VARIANTS)
    assert splits == {(size, num_workers // size): each for size in sizes}
    for plan in found:
        check_plan(plan)
    assert {plan.config.placer for plan in found} == set(CHOICES["placer"])
    moving = [plan for plan in found if plan.traffic_bytes.sum() > plan.traffic_bytes.trace()]
    assert {plan.config.pool_size for plan in moving} == set(sizes)


def test_every_transport_of_one_host_takes_its_turn():
    import verify

    # gloo is the CPU's, auto is one of the others
    assert set(verify.TRANSPORTS) == set(CHOICES["transport"]) - {"auto", "gloo"}
    chosen = list(verify.plans(4, 512))
    runs = list(verify.runs_of(chosen, list(verify.TRANSPORTS), "reference"))
    both = [number for number, count in Counter(n for n, _ in runs).items() if count == 2]
    assert both == list(range(0, len(chosen), 3))
    taken = {(plan.config.pool_size, plan.config.transport) for _, plan in runs}
    assert taken == {(size, name) for size in (1, 2, 4) for name in verify.TRANSPORTS}
    assert {plan.config.kernel for _, plan in runs} == {"reference"}
    by_number = dict(runs)
    assert all(by_number[n].sequences == plan.sequences for n, plan in enumerate(chosen))
