"""Row numbers of a route, the bound plan made of them, and the sum at the home. No processes.

Layers: the drawn example, then properties on random plans, checked against per-row bookkeeping.
"""

from __future__ import annotations

from dataclasses import fields, replace
from itertools import accumulate, product

import numpy as np
import pytest
import torch

from megatron_libra.config import LibraConfig
from megatron_libra.executor.bind import bind
from megatron_libra.executor.bound_route import PartRows, bind_route
from megatron_libra.executor.kernels import pick_kernel
from megatron_libra.executor.local_rows import LocalRows, TokenRanges
from megatron_libra.executor.route_index import (
    NOWHERE,
    contributions_at_home,
    index_route,
    positions_at_home,
)
from megatron_libra.executor.row_moves import add_at_home
from megatron_libra.executor.runtime import PoolRuntime
from megatron_libra.executor.transport import LoopbackTransport, Mailbox, MailboxPlaces, RowTraffic
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.parts import FAR, NEAR
from megatron_libra.plan.worker_plan import LocalPart, Round, WorkerRoute
from tests.helpers.cases import CASES, plan_of, pool, random_pools

CPU = torch.device("cpu")


class FakeTransport(LoopbackTransport):
    """A place in a pool of several workers, without the others."""

    def __init__(self, worker: int, num_workers: int) -> None:
        self.worker, self.num_workers = worker, num_workers


def runtime_of(worker: int, num_workers: int) -> PoolRuntime:
    """A runtime to bind with; nothing can be exchanged."""
    transport = FakeTransport(worker, num_workers)
    kernel = pick_kernel("auto", device=CPU, dtype=torch.float64, head_dim=8)
    return PoolRuntime(transport, transport, kernel, CPU, LibraConfig())


def route(**columns: list[int]) -> WorkerRoute:
    """A WorkerRoute from lists."""
    return WorkerRoute(**{name: np.array(column, np.int32) for name, column in columns.items()})


def test_drawn_example() -> None:
    """The example of route_index: worker 0 computes its tokens 2, 3 and a token of worker 1."""
    index = index_route(
        route(
            send_peer=[0, 1], send_token=[2, 0], send_count=[2, 2], send_shard=[0, 0],
            recv_peer=[0, 1], recv_row=[0, 2], recv_count=[2, 1],
        ),
        worker=0, num_shards=1,
    )  # fmt: skip
    assert index.sent_rows.tolist() == [0, 1, 2, 3]
    assert index.depart.tolist() == [2, 0, 1]
    assert index.arrange.tolist() == [1, 2, 0]


def test_local_rows_take_compute_order() -> None:
    """A worker that computes only its own tokens, in another order than it holds them."""
    index = index_route(
        route(
            send_peer=[0, 0], send_token=[4, 0], send_count=[2, 2], send_shard=[1, 0],
            recv_peer=[0, 0], recv_row=[2, 0], recv_count=[2, 2],
        ),
        worker=0, num_shards=2,
    )  # fmt: skip
    assert index.arrange.tolist() == index.depart.tolist() == [0, 1, 2, 3]
    assert index.sent_rows.tolist() == [0, 2, 9, 11]


@pytest.mark.parametrize("seed", range(5))
def test_every_row_arrives_where_it_should(seed: int) -> None:
    """Simulate the exchange of random plans with labelled rows."""
    plan = random_pools(seed, 4, num_workers=4)[seed % 4]
    heads = plan.heads
    for part, (kind, shards) in product(
        ("near", "far"), (("query", heads.head_split), ("kv", heads.kv_shards))
    ):
        workers = [plan.worker_plan(w) for w in range(plan.num_workers)]
        routes = [getattr(getattr(w, part), kind) for w in workers]
        indexes = [index_route(r, worker=w, num_shards=shards) for w, r in enumerate(routes)]
        for worker, (index, own) in enumerate(zip(indexes, routes, strict=True)):
            expected = np.full((own.num_rows, 2), -1)
            for peer, theirs in enumerate(routes):
                sent = np.flatnonzero(theirs.send_peer == worker)
                rows = own.recv_row[own.recv_peer == peer]
                for i, row in zip(sent, rows, strict=True):
                    count, token = theirs.send_count[i], theirs.send_token[i]
                    expected[row : row + count, 0] = peer
                    expected[row : row + count, 1] = (
                        np.arange(token, token + count) * shards + theirs.send_shard[i]
                    )
            assert np.array_equal(arrived(indexes, routes, worker)[index.arrange], expected)


def arrived(indexes: list, routes: list, worker: int) -> np.ndarray:
    """(rows, 2) source worker and home row, in travel order."""
    parts = []
    for peer, (index, theirs) in enumerate(zip(indexes, routes, strict=True)):
        sizes = np.bincount(theirs.send_peer, theirs.send_count, len(routes)).astype(int)
        travels = np.where(np.arange(len(routes)) == peer, 0, sizes)
        end = int(travels[: worker + 1].sum())
        rows = index.sent_rows[end - travels[worker] : end]
        if peer != worker:
            parts.append(np.stack([np.full(len(rows), peer), rows], axis=1))
        else:
            own = index.sent_rows[int(travels.sum()) :]
    return np.concatenate([*parts, np.stack([np.full(len(own), worker), own], axis=1)])


def test_mailbox_rows_of_both_directions() -> None:
    """The drawn example as the near part, with two chunks, around one far chunk that sends home row
    9 to worker 1. Dispatch of a near chunk: one row arrives, two leave and two stay."""
    rows = [torch.tensor(x, dtype=torch.int32) for x in ([0, 1, 2, 3], [1, 2, 0], [2, 0, 1])]
    near = PartRows(RowTraffic(np.array([[2, 2], [1, 5]]), 0), *rows)
    none = torch.zeros(0, dtype=torch.int32)
    far_row = torch.tensor([9], dtype=torch.int32)
    far = PartRows(RowTraffic(np.array([[0, 1], [0, 0]]), 0), far_row, none, none)
    bound = bind_route([near, far], [(NEAR, 0), (FAR, 0), (NEAR, 1)], 2)
    # mailbox: received 0, 2 | own 0: leave leave stay stay | own 1: leave | own 2: as own 0
    assert bound.pack.tolist() == [0, 2, 4, 6, 18, 1, 3, 5, 7]
    assert bound.pack_places == (0, 4, 5, 9)
    assert [rows.tolist() for rows in bound.arrange] == [[4, 5, 0], [], [9, 10, 1]]
    # back: received 0: 0 1 | 1: 2 | 2: 3 4 | own 0: leave stay stay | own 2: leave stay stay
    position = torch.tensor([0, 1, 2, 3, 4, NOWHERE], dtype=torch.int32)
    assert bound.rows_at_home(position)[:4].tolist() == [[0, 3], [1, 4], [6, 9], [7, 10]]
    # of the far part only chunk 0 was bound
    assert bound.rows_at_home(position)[4:, 0].tolist() == [2, 11]


def test_a_mailbox_has_room_for_both_directions() -> None:
    traffic = RowTraffic(np.array([[2, 2], [1, 5]]), 0)
    assert (traffic.send, traffic.receive, traffic.num_local) == ((0, 2), (0, 1), 2)
    assert (traffic.inverse.send, traffic.inverse.receive) == ((0, 1), (0, 2))
    assert traffic.moves and not RowTraffic(np.array([[2, 0], [0, 5]]), 0).moves
    traffics = (traffic, traffic)
    mailbox = Mailbox(torch.arange(11)[:, None], traffics, MailboxPlaces.of(traffics))
    assert mailbox.received(1).flatten().tolist() == [1]
    assert mailbox.own(0, 2).flatten().tolist() == list(range(2, 10))
    assert mailbox.sent(1).flatten().tolist() == [6, 7]


def drawn_ranges() -> TokenRanges:
    """The example of local_rows: ranges of 3 and 2 tokens at tokens 1 and 5, early and late."""
    none = route(**{field.name: [] for field in fields(WorkerRoute)})
    rounds = [
        Round(start, start + n, start, start + n, *[np.array([0, n], np.int32)] * 2, n, n)
        for start, n in ((0, 3), (3, 2))
    ]
    local = LocalPart(none, none, tuple(rounds), 1, 0)
    return TokenRanges.of(local, np.array([1, 2, 3, 5, 6], np.int32))


def test_local_rounds_in_place() -> None:
    ranges = drawn_ranges()
    assert ranges.gaps(8) == ((0, 1), (4, 5), (7, 8))
    rounds, num_early = ranges.rounds(9)
    assert num_early == 1  # early and late work is never one call
    assert [(r.query_start, r.query_stop) for r in rounds] == [(1, 4), (5, 7)]
    (found,), num_early = replace(ranges, is_early=np.array([True, True])).rounds(1)
    assert num_early == 1
    assert (found.query_start, found.query_stop, found.key_start, found.key_stop) == (1, 7, 1, 7)
    assert found.cu_queries.tolist() == [0, 3, 4, 4, 6]
    assert found.cu_keys.tolist() == [0, 3, 3, 4, 6]
    assert (found.max_queries, found.max_keys) == (3, 3)


def test_large_gaps_end_a_call() -> None:
    ranges = TokenRanges(np.array([0, 5, 9]), np.array([3, 8, 12]), np.array([False, True, True]))
    rounds, num_early = ranges.rounds(0)
    assert [(r.key_start, r.key_stop) for r in rounds] == [(5, 8), (9, 12), (0, 3)]
    assert num_early == 2
    assert len(ranges.rounds(1)[0]) == 2  # the early ones are one call
    nothing = TokenRanges(*[np.zeros(0, np.int64)] * 2, np.zeros(0, np.bool_))
    assert nothing.rounds(1) == ((), 0) and nothing.gaps(4) == ((0, 4),)


def test_local_rows_in_place_and_as_copies() -> None:
    home = torch.arange(8.0).view(4, 2)
    in_place = LocalRows(None)
    assert in_place.take(home) is home and in_place.results(home).shape == home.shape
    copies = LocalRows(torch.tensor([3, 1]))
    assert torch.equal(copies.take(home), home[[3, 1]])
    results = copies.results(home, torch.float64)
    assert results.shape == (2, 2) and results.dtype == torch.float64
    copies.put(home, torch.full((2, 2), 9.0))
    assert home.tolist() == [[0, 1], [9, 9], [4, 5], [9, 9]]


@pytest.mark.parametrize(("placer", "in_place"), [("home_first", True), ("ulysses", False)])
def test_what_is_mostly_local_is_computed_in_place(placer: str, in_place: bool) -> None:
    """CP = 1 and a few tiles that leave; Ulysses of CP = 2, where half of all rows leave."""
    cp = 1 if in_place else 2
    plan = plan_of(
        pool([[20] * 4, [10] * 6][: 3 - cp], 80, cp, (8, 2, 8), block_size=8, chunks=1,
             placer=placer, head_split=2)
    )  # fmt: skip
    bound = bind(plan.worker_plan(0), runtime_of(0, plan.num_workers))
    assert bound.steps and (bound.local.rows.index is None) is in_place
    assert bound.local.gaps == ((0, 40),) or in_place


def test_positions_at_home() -> None:
    """Three home rows, the second is padding."""
    position = positions_at_home(np.array([2, 0], np.int32), 3)
    assert position.tolist() == [1, NOWHERE, 0]


def test_contributions_at_home() -> None:
    """Worker 0 was sent rows 3 0 1, worker 2 rows 1 3, and rows 1 2 stayed; row 4 is padding."""
    sent = np.array([3, 0, 1, 1, 3, 1, 2], np.int32)
    passes, rows = contributions_at_home(sent)
    assert rows.tolist() == [1, 3, 0, 2]
    assert [p.tolist() for p in passes] == [[2, 0, 1, 6], [3, 4], [5]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_add_at_home(dtype: torch.dtype) -> None:
    """Contributions of one home row are added in travel order, in float32 or better."""
    for seed in range(3):
        plan = random_pools(seed, 2, num_workers=4)[1]
        worker = plan.worker_plan(seed)
        bound = bind(worker, runtime_of(seed, 4))
        pieces, segments = plan.heads.kv_pieces, bound.kv.segments
        if not segments:
            continue
        home_sum = bound.kv_sum
        starts = [0, *accumulate(home_sum.pass_sizes)]
        assert home_sum.pass_starts.tolist() == [*starts, len(home_sum.contributions)]
        request = bound.kv.return_request(4, dtype)
        rows = torch.randn(request.num_rows, 4, dtype=torch.float64).to(dtype)
        rows[-1] = 0
        mailbox = request.mailbox(rows)
        shards, width = plan.heads.kv_shards, 2
        size = (worker.num_local_tokens, shards * pieces, width)
        dk, dv = (torch.randn(size, dtype=torch.float64).to(dtype) for _ in range(2))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        expected = torch.cat([dk, dv], dim=2).to(wide).view(-1, pieces, 4)
        add_at_home(dk, dv, rows, home_sum)
        for part, piece in sorted(segments):
            route = worker.exchanged[part].kv
            index = index_route(route, worker=seed, num_shards=plan.heads.kv_shards)
            number = segments.index((part, piece))
            stayed = mailbox.own(number, number + 1)[mailbox.traffics[number].num_sent :]
            returned = torch.cat([mailbox.received(number), stayed])
            for position, home in enumerate(index.sent_rows.tolist()):
                expected[home, piece] += returned[position]
        whole = torch.cat([dk, dv], dim=2).view(expected.shape)
        assert torch.equal(whole, expected.to(dtype))


def test_a_plan_of_another_worker_is_refused() -> None:
    plan = plan_of(CASES["one_against_many"])
    with pytest.raises(PlanError, match=r"worker 1 of 4 was given to worker 0 of 4.*plan\(0\)"):
        bind(plan.worker_plan(1), runtime_of(0, 4))
    with pytest.raises(PlanError, match="worker 0 of 4 was given to worker 0 of 2"):
        bind(plan.worker_plan(0), runtime_of(0, 2))


def test_chunks_that_share_kv_heads_bring_them_once() -> None:
    """8 query heads on 2 kv heads, 4 chunks: 0 and 2 bring K and V, 1 and 3 finish them, in each
    part; near chunks stand around the far ones."""
    plan = plan_of(CASES["chunks_share_kv_heads"])
    bound = bind(plan.worker_plan(0), runtime_of(0, 4))
    near, far = ([step for step in bound.steps if step.part == part] for part in (NEAR, FAR))
    for part in (near, far):
        assert [step.chunk for step in part] == [0, 1, 2, 3]
        assert [step.brings_kv for step in part] == [True, False, True, False]
        assert [step.finishes_kv for step in part] == [False, True, False, True]
        assert part[0].kv_segment == part[1].kv_segment != part[2].kv_segment
    assert bound.steps == (*near[:2], *far, *near[2:])
    assert [step.part for step in bound.steps] == [part for part, _ in bound.query.segments]
    assert bound.kv.segments == ((NEAR, 0), (FAR, 0), (FAR, 1), (NEAR, 1))


def test_row_numbers_beyond_int32_are_refused() -> None:
    worker = replace(plan_of(CASES["one_worker"]).worker_plan(0), num_local_tokens=2**30)
    with pytest.raises(ValueError, match=r"\d+ row numbers do not fit int32; lower head_split"):
        bind(worker, runtime_of(0, 1))
