"""Cutting a batch: positions by hand, pieces of every layout, checked lengths, sharing by
chunks."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import numpy as np
import pytest
import torch

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.executor.plan_index import index_plan
from megatron_libra.plan.errors import PlanError
from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool
from tests.integration.harness import call

SEQUENCES = ((5, 3, 7, 1), (16,))
SHAPE = AttentionShape(query_heads=2, kv_heads=1, head_dim=4)
LAYOUT = TokenLayout("zigzag", 16, 2)


def small_plan(sequences: tuple[tuple[int, ...], ...] = SEQUENCES) -> PoolPlan:
    config = LibraConfig(pool_size=2, block_size=4, chunks=1)
    return plan_pool(sequences, context_parallel_size=2, shape=SHAPE, config=config, seq_length=16)


def batch(lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """As Megatron's loader yields it: boundaries padded to L + 1 entries."""
    boundaries = torch.full((1, 17), 16, dtype=torch.int32)
    boundaries[0, : len(lengths) + 1] = torch.tensor([0, *np.cumsum(lengths)])
    tokens = torch.arange(16)[None]
    return {
        "tokens": tokens,
        "labels": tokens + 1,
        "loss_mask": (tokens % 3 > 0).float(),
        "cu_seqlens": boundaries,
    }


def splitter(worker: int, num_chunks: int = 1) -> Any:
    """A splitter of a rank without a process group: one tensor-parallel rank."""
    from megatron.core import parallel_state

    from megatron_libra.executor.kernels import pick_kernel
    from megatron_libra.executor.runtime import PoolRuntime
    from megatron_libra.integration.batch import BatchSplitter

    parallel_state.set_tensor_model_parallel_rank(0)
    parallel_state.set_tensor_model_parallel_world_size(1)
    device = torch.device("cpu")
    kernel = pick_kernel(
        "reference", device=device, dtype=torch.float32, head_dim=4, deterministic=False
    )
    place = type("Place", (), {"worker": worker, "num_workers": 4})()
    runtime = PoolRuntime(place, place, kernel, device, LibraConfig(pool_size=2))
    return BatchSplitter(LAYOUT, runtime, worker, num_chunks)


def ready_plan(plan: PoolPlan, worker: int) -> Any:
    """As a coordinator makes it."""
    from megatron_libra.executor.coordinator import ReadyPlan

    return ReadyPlan(plan, worker, index_plan(plan.worker_plan(worker)))


def split(
    worker: int,
    lengths: tuple[int, ...] | None,
    plan: PoolPlan,
    embeds: bool = False,
    has_loss: bool = False,
) -> tuple[dict[str, list[Any] | None], list[int], int]:
    """Tensors by name, boundaries, longest sample; lengths are the loader's, None without data."""
    data = None if lengths is None else batch(lengths)
    return split_batch(worker, data, plan, embeds, has_loss)


def split_batch(
    worker: int,
    data: dict[str, torch.Tensor] | None,
    plan: PoolPlan,
    embeds: bool = False,
    has_loss: bool = False,
) -> tuple[dict[str, list[Any] | None], list[int], int]:
    """The same, of what the loader yields."""
    from megatron_libra.integration.plan_stream import PlannedBatch

    planned = PlannedBatch("train", 0, ready_plan(plan, worker), data)
    made = splitter(worker).split(planned, embeds=embeds, has_loss=has_loss)
    names = ("tokens", "labels", "loss_mask", "position_ids")
    tensors = {name: getattr(made, name) for name in names}
    lists = {name: None if each is None else each.tolist() for name, each in tensors.items()}
    return lists, made.params.cu_seqlens_q.tolist(), made.params.max_seqlen_q


@pytest.mark.parametrize("worker", range(4))
def test_local_tokens_and_positions(worker: int) -> None:
    slot, cp_rank = divmod(worker, 2)
    tensors, boundaries, longest = call(split, worker, SEQUENCES[slot], small_plan(), True, True)
    held = {0: [0, 1, 2, 3, 12, 13, 14, 15], 1: [4, 5, 6, 7, 8, 9, 10, 11]}[cp_rank]
    position = {
        0: [0, 1, 2, 3, 4, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 0],
        1: list(range(16)),
    }[slot]
    assert tensors["tokens"] == [held]
    assert tensors["labels"] == [[token + 1 for token in held]]
    assert tensors["loss_mask"] == [[float(token % 3 > 0) for token in held]]
    assert tensors["position_ids"] == [[position[token] for token in held]]
    assert boundaries == [0, *np.cumsum(SEQUENCES[slot])]
    assert longest == max(SEQUENCES[slot])


def test_a_middle_stage_needs_no_data() -> None:
    tensors, _, _ = call(split, 1, None, small_plan())
    assert [name for name, tensor in tensors.items() if tensor is not None] == ["position_ids"]


def test_tokens_behind_the_last_sample_have_positions_and_no_sample() -> None:
    plan = small_plan(((5, 3), ()))
    tensors, boundaries, _ = call(split, 0, None, plan)
    assert tensors["position_ids"] == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert boundaries == [0, 5, 8]
    tensors, boundaries, longest = call(split, 3, None, plan)
    assert (boundaries, longest) == ([0], 1)


def fault(kind: str) -> str:
    with pytest.raises(PlanError) as error:
        if kind == "other data":
            split(0, (4, 4, 7, 1), small_plan(), True, True)
        elif kind == "more data":
            split(0, (5, 3, 7, 1), small_plan(((5, 3), ())), True, True)
        else:
            split(0, None, small_plan(), True, False)
    return str(error.value)


def test_other_data_than_the_plan_s_is_an_error() -> None:
    message = call(fault, "other data")
    assert "microbatch 0 of train" in message and "[0, 4, 8, 15, 16, 16, ...]" in message


def test_samples_behind_the_plan_s_last_are_an_error() -> None:
    """They would be taken for padding: attention zero, and a loss that nobody doubts."""
    message = call(fault, "more data")
    assert "[0, 5, 8, 15, 16" in message and "the plan at [0, 5, 8]" in message


def padding_tails() -> list[list[int]]:
    """Boundaries as given to the model; the loader fills up with L, or with the last boundary."""
    plan, made = small_plan(((5, 3), ())), []
    for fill in (16, 8):
        data = batch((5, 3))
        data["cu_seqlens"][0, 3:] = fill
        made.append(split_batch(0, data, plan)[1])
    return made


def test_a_padding_tail_is_no_sample() -> None:
    assert call(padding_tails) == [[0, 5, 8]] * 2


def empty_documents() -> list[list[int]]:
    """Boundaries as given to the model, where the loader's repeat some; other ends of its list."""
    made = []
    for end in (16, 0, -1):
        data = batch(SEQUENCES[0])
        data["cu_seqlens"][0, :8] = torch.tensor([0, 0, 5, 5, 5, 8, 15, 16])
        data["cu_seqlens"][0, 8:] = end
        made.append(split_batch(0, data, small_plan())[1])
    return made


def test_a_document_without_tokens_is_no_sample() -> None:
    assert call(empty_documents) == [[0, 5, 8, 15, 16]] * 3


def test_missing_data_is_an_error() -> None:
    assert "no data loader" in call(fault, "no data")


def shared(num_chunks: int) -> tuple[list[int], int]:
    from megatron_libra.integration.plan_stream import PlannedBatch

    plan, made = small_plan(), splitter(0, num_chunks)
    batches = [PlannedBatch("train", index, ready_plan(plan, 0), None) for index in (0, 1)]
    order = [batches[0], batches[1], batches[0], batches[1]]
    bound = [made.split(each, embeds=False, has_loss=False).params.bound_plan for each in order]
    return [bound.index(each) for each in bound], len(made._params)


def test_model_chunks_share_a_bound_plan() -> None:
    assert call(shared, 2) == ([0, 1, 0, 1], 0)
    assert call(shared, 1) == ([0, 1, 2, 3], 0)


def replayed(num_chunks: int) -> tuple[bool, bool]:
    """Whether row numbers are gone once they are bound, though the batch is kept as Megatron keeps
    it for a rerun; and whether the rerun then computes the same."""
    from megatron_libra.integration.plan_stream import PlannedBatch

    ready = ready_plan(small_plan(), 0)
    rows = weakref.ref(ready.index.query_position)
    batches = [PlannedBatch("train", 0, ready, None) for _ in range(num_chunks)]
    saved, made = [copy.copy(each) for each in batches], splitter(0, num_chunks)

    def run(each: Any) -> list[int]:
        bound = made.split(each, embeds=False, has_loss=False).params.bound_plan
        return bound.query_rows_at_home.tolist()

    first = [run(each) for each in batches]
    return rows() is None, first == [run(each) for each in saved]


@pytest.mark.parametrize("num_chunks", [1, 2])
def test_row_numbers_are_not_kept_for_a_rerun(num_chunks: int) -> None:
    assert call(replayed, num_chunks) == (True, True)
