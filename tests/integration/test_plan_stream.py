"""Plans beside batches: order of requests, sharing by model chunks, streams that run out,
pipelines."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_libra.data.sampler import Microbatch
from megatron_libra.executor.coordinator import ReadyPlan
from megatron_libra.integration.plan_stream import PlannedBatches, PlanStream, pipeline_skew


class Plans:
    """Remembers requests; a plan is the sequences it was made of, its row numbers the key."""

    def __init__(self) -> None:
        self.requested: list[tuple[Any, Any]] = []
        self.taken: list[Any] = []
        self.last_plan_ms = 7.0

    def request(self, key: Any, sequences: Any) -> None:
        self.requested.append((key, sequences))

    def take(self, key: Any) -> Any:
        assert key not in self.taken
        self.taken.append(key)
        return ReadyPlan(dict(self.requested)[key], 0, key)


def microbatch(*lengths: int) -> Microbatch:
    return Microbatch(start=0, ga_index=0, sample=0, pool=(0,), sequences=(lengths,))


def stream(plans: Plans, ahead: int, upcoming: list[Microbatch] | None) -> PlanStream:
    made = PlanStream("train", plans, ahead=ahead, pool_size=1)
    made.start(None if upcoming is None else iter(upcoming))
    return made


def test_requests_run_ahead_from_the_start() -> None:
    plans = Plans()
    batches = PlannedBatches(stream(plans, 1, [microbatch(n) for n in (5, 6, 7)]), None)
    assert [key for key, _ in plans.requested] == [("train", 0), ("train", 1)]
    assert next(batches).plan == ((5,),)
    second = next(batches)
    assert (second.plan, second.plan_ms) == (((6,),), 7.0)
    assert second.ready.take_index() == ("train", 1)
    assert [key for key, _ in plans.requested] == [("train", n) for n in range(3)]


def test_ranks_without_data_make_the_same_requests() -> None:
    coordinator, other = Plans(), Plans()
    for plans, upcoming in ((coordinator, [microbatch(5)]), (other, None)):
        batches = PlannedBatches(stream(plans, 2, upcoming), None)
        plans.requested[0] = (plans.requested[0][0], "plan")
        assert next(batches).plan == "plan"
    assert [key for key, _ in coordinator.requested] == [key for key, _ in other.requested]
    assert all(sequences is None for _, sequences in other.requested[1:])


def test_a_stream_that_ran_out_asks_for_empty_plans() -> None:
    plans = Plans()
    stream(plans, 3, [microbatch(5)])
    assert [sequences for _, sequences in plans.requested] == [((5,),), ((),), ((),), ((),)]


def test_model_chunks_share_each_plan_in_any_order() -> None:
    plans = Plans()
    shared = stream(plans, 0, [microbatch(n) for n in (5, 6, 7)])
    first, second = PlannedBatches(shared, None), PlannedBatches(shared, None)
    seen = [next(first).plan, next(first).plan, next(second).plan, next(first).plan]
    seen += [next(second).plan, next(second).plan]
    assert seen == [((5,),), ((6,),), ((5,),), ((7,),), ((6,),), ((7,),)]
    assert plans.taken == [("train", n) for n in range(3)]
    assert not shared._ready, "plans that every chunk has read are forgotten"


def test_batches_travel_with_their_plans_and_end_the_stream() -> None:
    batches = PlannedBatches(
        stream(Plans(), 0, [microbatch(5), microbatch(6)]), iter([{"a": 1}, {"a": 2}])
    )
    both = list(batches)
    assert [(b.stream, b.index, b.batch, b.plan) for b in both] == [
        ("train", 0, {"a": 1}, ((5,),)),
        ("train", 1, {"a": 2}, ((6,),)),
    ]


@pytest.mark.parametrize("num_stages", range(1, 9))
@pytest.mark.parametrize("num_chunks", [1, 2, 3, 4])
@pytest.mark.parametrize("group", [None, 8, 11])
def test_skew_covers_the_warm_up(num_stages: int, num_chunks: int, group: int | None) -> None:
    """The first stage's next forward, when it must wait for the last stage's first backward."""
    size = group or num_stages
    if num_chunks == 1:
        begun = num_stages - 1
    else:
        number = 2 * (num_stages - 1) + (num_chunks - 1) * size
        begun = max(n // (size * num_chunks) * size + n % size for n in range(number + 1))
    needed = begun + 1 if num_stages > 1 else 0
    assert pipeline_skew(num_stages, num_chunks, group) >= needed
