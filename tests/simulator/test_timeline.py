"""The timeline by hand, its invariants on random pools, and what its spans say."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.simulator.timeline import (
    Links,
    PassCompute,
    PassTraffic,
    Timeline,
    simulate_pass,
)

LINKS = Links(intra_node_gb_s=1.0, inter_node_gb_s=0.5, message_us=0.0, overlap_loss=0.0)
GB = 1e9


def _compute(workers: int = 2, steps: int = 2, **parts: float) -> PassCompute:
    """Every worker the same; zero where nothing is said."""
    each = {name: parts.get(name, 0.0) for name in ("early", "late", "pack", "gather")}
    return PassCompute(
        steps=np.full((steps, workers), parts.get("step", 0.0)),
        names=tuple(f"near {s}" for s in range(steps)),
        **{name: np.full(workers, seconds) for name, seconds in each.items()},
    )


def _traffic(dispatch: float, return_: float, steps: int = 2) -> PassTraffic:
    """GB of every step from worker 0 to worker 1, and back."""
    there, back = np.zeros((2, steps, 2, 2))
    there[:, 0, 1], back[:, 1, 0] = dispatch * GB, return_ * GB
    return PassTraffic(there, back)


def _run(
    compute: PassCompute, traffic: PassTraffic, links: Links = LINKS, apart: bool = False
) -> Timeline:
    size = len(compute.early)
    return simulate_pass(compute, traffic, links, np.eye(size, dtype=bool) | (not apart))


def test_local_work_hides_both_ends() -> None:
    """A second for each dispatch, step, return and local half: nothing waits."""
    timeline = _run(_compute(early=1, step=1, late=1), _traffic(1, 1))
    assert timeline.end == pytest.approx([4, 4]) and not timeline.wait.any()
    assert timeline.dispatch_stop[:, 1] == pytest.approx([1, 2])
    assert timeline.return_start[:, 1] == pytest.approx([2, 3])


def test_without_local_work_the_ends_are_exposed() -> None:
    timeline = _run(_compute(step=1), _traffic(1, 1))
    assert timeline.first_wait == pytest.approx([1, 1])
    assert timeline.last_wait == pytest.approx([1, 1])
    assert timeline.end == pytest.approx([4, 4]) and not timeline.middle_wait.any()


def test_transfers_that_outlast_the_computation_are_waited_for() -> None:
    timeline = _run(_compute(step=1), _traffic(3, 0))
    assert timeline.first_wait[1] == pytest.approx(3)
    assert timeline.middle_wait[1] == pytest.approx(2)
    assert timeline.end[1] == pytest.approx(7)


def test_bytes_between_nodes_take_their_own_bandwidth_and_a_message_its_time() -> None:
    links = replace(LINKS, message_us=1e5)
    assert _run(_compute(), _traffic(1, 0), links).end[1] == pytest.approx(2 * 1.1)
    assert _run(_compute(), _traffic(1, 0), links, apart=True).end[1] == pytest.approx(2 * 2.1)


def test_both_directions_of_a_port_are_independent() -> None:
    """Dispatches 0 -> 1 and 1 -> 0 at once take no longer than one of them."""
    there, back = np.zeros((2, 2, 2, 2))
    there[:, 0, 1] = there[:, 1, 0] = GB
    assert _run(_compute(), PassTraffic(there, back)).end == pytest.approx([2, 2])


def test_a_dispatch_and_a_return_share_a_port() -> None:
    """Worker 1 sends D to 2 and R to 0. D1 begins at 1 s alone, R0 (ready at 1 s) shares: both are
    half done at 2 s. D1 (1 s of port) is over at 3, R0 at 3.
    """
    there, back = np.zeros((2, 2, 3, 3))
    there[:, 1, 2], back[0, 1, 0] = GB, GB
    compute = _compute(workers=3)
    timeline = _run(compute, PassTraffic(there, back))
    assert timeline.dispatch_stop[:, 1] == pytest.approx([1, 3])
    assert timeline.return_stop[0, [0, 1]] == pytest.approx([3, 3])


def test_a_return_is_faster_once_the_dispatches_are_through() -> None:
    """As above with 3 s of R0: it gets half of the port until 3 s, then all: 1 + 2 + 2."""
    there, back = np.zeros((2, 2, 3, 3))
    there[:, 1, 2], back[0, 1, 0] = GB, 3 * GB
    timeline = _run(_compute(workers=3), PassTraffic(there, back))
    assert timeline.dispatch_stop[1, 1] == pytest.approx(3)
    assert timeline.return_stop[0, 1] == pytest.approx(5)


def test_a_slow_source_delays_who_receives_from_it() -> None:
    """Worker 1 computes 5 s a step; worker 0, which waits for its results, nothing."""
    compute = replace(_compute(), steps=np.array([[0.0, 5.0]] * 2))
    timeline = _run(compute, _traffic(0, 1))
    assert timeline.end == pytest.approx([11, 11])
    assert timeline.last_wait == pytest.approx([11, 1])


def test_packing_delays_the_first_dispatch_and_gathering_comes_last() -> None:
    timeline = _run(_compute(pack=0.5, gather=0.25, step=1), _traffic(1, 1))
    assert timeline.dispatch_stop[0, 1] == pytest.approx(1.5)
    assert timeline.end == pytest.approx([0.5 + 1 + 2 + 1 + 0.25] * 2)


def test_overlapped_transfers_slow_the_computation() -> None:
    """D0 under 1 s of the early work, D1 and R0 under one step each, R1 under the late work."""
    links = replace(LINKS, overlap_loss=0.2)
    timeline = _run(_compute(early=1, step=1, late=1), _traffic(1, 1), links)
    compute = timeline.compute_stop - timeline.compute_start
    assert compute[1:-1, 1] == pytest.approx([1.2, 1.2, 1.2, 1.2])


def test_exposed_transfers_slow_nothing() -> None:
    links = replace(LINKS, overlap_loss=0.2)
    assert _run(_compute(steps=1, step=1), _traffic(1, 1, steps=1), links).end[1] == 3


def _near_and_far(near: float, far: float) -> PassTraffic:
    """Steps near 0, far 0, far 1, near 1 of workers 0 and 1 on one node, 2 on another: GB of each
    step that 0 sends to 1 (near) and 2 to 1 (far), and back."""
    there = np.zeros((4, 3, 3))
    there[[0, 3], 0, 1], there[[1, 2], 2, 1] = near * GB, far * GB
    return PassTraffic(there, there.transpose(0, 2, 1))


IN_ORDER = ("near 0", "far 0", "far 1", "near 1")
NODES = np.array([[True, True, False], [True, True, False], [False, False, True]])


def test_near_chunks_hide_the_first_dispatch_and_the_last_return_of_far_ones() -> None:
    """All steps take 2 s. Far transfers of 1 GB take 2 s between nodes, near ones none. In front of
    the far steps is near 0, which hides the dispatch of far 0; near 1 hides the return of far 1.
    """
    compute = replace(_compute(workers=3, steps=4, step=2), names=IN_ORDER)
    timeline = simulate_pass(compute, _near_and_far(0, 1), LINKS, NODES)
    assert timeline.dispatch_stop[1:3, 1] == pytest.approx([2, 4])
    assert timeline.return_stop[1:3, 1] == pytest.approx([6, 8])
    assert timeline.end == pytest.approx([8, 8, 8]) and not timeline.wait.any()


def test_without_near_chunks_far_transfers_are_exposed() -> None:
    """The same with near steps of 0 s: the first dispatch and the last return show, 2 s each."""
    compute = replace(_compute(workers=3, steps=4), names=IN_ORDER)
    compute = replace(compute, steps=np.array([[0.0], [2.0], [2.0], [0.0]]) * np.ones(3))
    timeline = simulate_pass(compute, _near_and_far(0, 1), LINKS, NODES)
    assert timeline.middle_wait[1:] == pytest.approx([2, 2])
    assert timeline.last_wait[1:] == pytest.approx([2, 2])
    assert timeline.end[1] == pytest.approx(8)


def test_near_and_far_transfers_do_not_queue_up_behind_each_other() -> None:
    """Far 0 is on its way from the start, although near 0 takes 3 s and was started before; near 1
    comes home while far 1 does."""
    compute = replace(_compute(workers=3, steps=4), names=IN_ORDER)
    timeline = simulate_pass(compute, _near_and_far(3, 1), LINKS, NODES)
    assert timeline.dispatch_stop[:, 1] == pytest.approx([3, 2, 4, 6])
    assert timeline.return_start[3, 1] == pytest.approx(6)
    far = [s for s in timeline.spans() if s.worker == 1 and s.stream == "far dispatch"]
    assert [(s.name, s.start_s, s.stop_s) for s in far] == [("far 0", 0, 2), ("far 1", 2, 4)]


def test_a_worker_receives_at_once_what_others_computed_before_it() -> None:
    """Worker 1 is at its far step until 9 s; near 1 comes back from worker 0 at 1 s and waits for
    nothing."""
    compute = replace(_compute(workers=3, steps=4), names=IN_ORDER)
    compute = replace(compute, steps=np.array([[0.0, 0, 0], [0, 9, 0], [0, 0, 0], [0, 0, 0]]))
    back = np.zeros((4, 3, 3))
    back[3, 0, 1] = GB
    timeline = simulate_pass(compute, PassTraffic(np.zeros((4, 3, 3)), back), LINKS, NODES)
    assert timeline.return_stop[3, 1] == pytest.approx(1)
    assert timeline.end == pytest.approx([1, 9, 0])


def test_merged_work_hides_nothing() -> None:
    compute = replace(_compute(workers=3, steps=4, early=1, step=1, late=1), names=IN_ORDER)
    timeline = simulate_pass(compute.merged, _near_and_far(0, 1).merged, LINKS, NODES)
    assert timeline.end[1] == pytest.approx(4 + 6 + 4)
    assert timeline.first_wait[1] == timeline.last_wait[1] == pytest.approx(4)


def _random(rng: np.random.Generator) -> tuple[PassCompute, PassTraffic]:
    workers, steps = int(rng.integers(2, 7)), int(rng.integers(1, 6))
    shape = (steps, workers, workers)
    there, back = (rng.random(shape) * GB * (rng.random(shape) < 0.5) for _ in range(2))
    for moved in (there, back):
        moved[:, np.arange(workers), np.arange(workers)] = 0
    parts = {name: rng.random(workers) for name in ("early", "late", "pack", "gather")}
    names = tuple(f"{('near', 'far')[s % 2]} {s}" for s in range(steps))
    compute = PassCompute(steps=rng.random((steps, workers)), names=names, **parts)
    return compute, PassTraffic(there, back)


@pytest.mark.parametrize("seed", range(20))
def test_every_pass_keeps_the_order_of_its_parts(seed: int) -> None:
    """No part overlaps the one before, no step begins before its data are there, and the end is
    between the bounds of computation and ports and their sum.
    """
    rng = np.random.default_rng(seed)
    compute, traffic = _random(rng)
    apart = bool(seed % 2)
    timeline = _run(compute, traffic, apart=apart)
    starts, stops = timeline.compute_start, timeline.compute_stop
    assert (starts[1:] >= stops[:-1] - 1e-9).all()
    assert (starts[2:-2] >= timeline.dispatch_stop - 1e-9).all()
    assert (timeline.return_stop <= starts[-1] + 1e-9).all()
    assert timeline.end == pytest.approx(compute.total + timeline.wait)
    rate = (LINKS.inter_node_gb_s if apart else LINKS.intra_node_gb_s) * GB
    both = traffic.dispatch + traffic.return_
    sent, received = both.sum(axis=(0, 2)) / rate, both.sum(axis=(0, 1)) / rate
    assert (timeline.end >= np.maximum(sent, received) - 1e-9).all()
    assert timeline.seconds <= compute.total.sum() + both.sum() / rate


@pytest.mark.parametrize("seed", range(5))
def test_more_bandwidth_is_never_slower(seed: int) -> None:
    compute, traffic = _random(np.random.default_rng(seed))
    fast = replace(LINKS, intra_node_gb_s=2.0)
    assert (_run(compute, traffic, fast).end <= _run(compute, traffic).end + 1e-9).all()


def test_spans_are_the_bars_of_a_trace() -> None:
    spans = _run(_compute(early=1, step=1), _traffic(1, 1)).spans()
    mine = [(s.stream, s.name, s.start_s, s.stop_s) for s in spans if s.worker == 1]
    assert mine == [
        ("compute", "local early", 0, 1),
        ("dispatch", "near 0", 0, 1),
        ("compute", "near 0", 1, 2),
        ("dispatch", "near 1", 1, 2),
        ("compute", "near 1", 2, 3),
        ("return", "near 0", 2, 3),
        ("return", "near 1", 3, 4),
    ]
