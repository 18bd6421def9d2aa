"""Variance-Reduced Sequence Placement (section 4.2, Algorithm 1).

In: the packed sequences of one optimizer step. Out: their order.

Scope `microbatch` is Algorithm 1: every pool of P sequences gets about the same work. Scope `step`
goes beyond the paper: without pipeline stages, pools of one worker group only meet at the gradient
sync, so the sum over a group's pools is balanced first (Algorithm 1 with P * GA members, then
swaps), then its pools (Algorithm 1 with P members). Scope `pipeline` also goes beyond: with
pipeline stages both the heaviest microbatch, which every stage has to wait for, and a group's sum
count, so pools are balanced by Algorithm 1 first and then dealt to the worker groups so that their
sums match; each group runs its heavy pools first, so that groups are in step. Example, work 9 5 4
2, P = 2: pool 0 gets 9 then 2, pool 1 gets 5 and 4.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Literal

import numpy as np

from megatron_libra.config import divisors, positive_integer
from megatron_libra.plan.sequences import check_lengths, read_rows
from megatron_libra.plan.swaps import exact_array, swap

__all__ = ["WindowOrder", "attention_work", "exact_cardinality_lpt", "order_window"]

Scope = Literal["auto", "microbatch", "step", "pipeline"]


@dataclass(frozen=True, slots=True)
class WindowOrder:
    """The order of one optimizer step's GBS packed sequences."""

    order: tuple[int, ...]
    """Indices into the window, GA-major: order[ga * DP + dp_rank]."""
    pools: tuple[tuple[int, ...], ...]
    """The same by pool, GA-major then pool-minor; P indices each, by slot."""
    imbalance: float
    """max / mean - 1 of the work over all pools."""
    step_imbalance: float
    """max / mean - 1 of the work that a worker group does over all GA indices."""
    scope: str
    """microbatch, step or pipeline: what was balanced."""


def attention_work(lengths: Sequence[int]) -> int:
    """F of a packed sequence: the sum of its squared sample lengths (Eq. 4)."""
    return sum(length * length for length in lengths)


def exact_cardinality_lpt(work: Sequence[int], num_bins: int) -> list[list[int]]:
    """Spread items over bins of equal count: heaviest first, to the least loaded bin that is not
    full.

    Returns:
        num_bins lists of len(work) / num_bins item indices, in the order of their placement. Ties:
        item index, bin index. (Algorithm 1, lines 3 to 13.)
    """
    size = len(work) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0, index) for index in range(num_bins)]
    for item in sorted(range(len(work)), key=lambda i: (-work[i], i)):
        load, index = heapq.heappop(heap)
        bins[index].append(item)
        if len(bins[index]) < size:
            heapq.heappush(heap, (load + work[item], index))
    return bins


def order_window(
    sequences: Iterable[Iterable[int]],
    *,
    pool_size: int,
    data_parallel_size: int,
    scope: str = "microbatch",
    pipeline_parallel_size: int = 1,
) -> WindowOrder:
    """Order one optimizer step's packed sequences so that pools weigh the same.

    Args:
        sequences: GBS lists (or, faster, arrays) of sample lengths in tokens, in sampler order.
        pool_size: P, divides data_parallel_size.
        data_parallel_size: DP, divides GBS; GA = GBS / DP.
        scope: microbatch, step, pipeline, or auto: with GA > 1 step without pipeline stages and
            pipeline with them; else microbatch.
        pipeline_parallel_size: PP, only used by scope auto.

    Returns:
        A permutation of the window: no sequence is lost, split or repeated.

    Raises:
        ValueError: P does not divide DP, DP does not divide GBS, an unknown scope or a bad length.
    """
    sequences = read_rows(sequences)
    pool_size = positive_integer("pool_size", pool_size)
    data_parallel_size = positive_integer("data_parallel_size", data_parallel_size)
    pipeline_parallel_size = positive_integer("pipeline_parallel_size", pipeline_parallel_size)
    _check(len(sequences), pool_size, data_parallel_size, scope)
    work = _window_work(sequences)
    num_groups = data_parallel_size // pool_size
    num_steps = len(sequences) // data_parallel_size
    if scope == "auto":
        coupled = "step" if pipeline_parallel_size == 1 else "pipeline"
        scope = coupled if num_steps > 1 else "microbatch"
    pools = PLACEMENTS[scope](work, num_groups, num_steps)
    load = np.array([sum(work[i] for i in pool) for pool in pools], np.float64)
    return WindowOrder(
        order=tuple(index for pool in pools for index in pool),
        pools=tuple(tuple(pool) for pool in pools),
        imbalance=_imbalance(load),
        step_imbalance=_imbalance(load.reshape(num_steps, num_groups).sum(axis=0)),
        scope=scope,
    )


def _window_work(sequences: Sequence[Sequence[int]]) -> list[int]:
    """Work of every sequence, by one array: a window may hold 100,000 samples."""
    try:
        flat = check_lengths(_flat(sequences), 0)
    except (TypeError, ValueError):
        for index, lengths in enumerate(sequences):
            check_lengths(lengths, index)  # names the sequence
        raise
    if int(flat.max(initial=0)) * int(flat.sum()) >= 2**63:  # squares may not fit 64 bits
        return [attention_work([int(length) for length in lengths]) for lengths in sequences]
    total = np.concatenate([np.zeros(1, np.int64), np.cumsum(flat * flat)])
    bounds = np.cumsum([0, *(len(lengths) for lengths in sequences)])
    return [int(work) for work in np.diff(total[bounds])]


def _flat(sequences: Sequence[Sequence[int]]) -> Sequence[int]:
    """All lengths in a row; rows that are arrays stay one, which saves looking at each length."""
    if all(isinstance(row, np.ndarray) and row.ndim == 1 for row in sequences):
        joined: Sequence[int] = np.concatenate(sequences)  # type: ignore[assignment]
        return joined
    return list(chain.from_iterable(sequences))


def _by_microbatch(work: list[int], num_groups: int, num_steps: int) -> list[list[int]]:
    return exact_cardinality_lpt(work, num_groups * num_steps)


def _by_step(work: list[int], num_groups: int, num_steps: int) -> list[list[int]]:
    pools: list[list[int]] = [[] for _ in range(num_groups * num_steps)]
    for group, members in enumerate(swap(work, exact_cardinality_lpt(work, num_groups))):
        members.sort()
        for step, pool in enumerate(exact_cardinality_lpt([work[i] for i in members], num_steps)):
            pools[step * num_groups + group] = [members[i] for i in pool]
    other = _by_microbatch(work, num_groups, num_steps)
    return min((pools, other), key=lambda each: _heaviest_group(work, each, num_groups))


def _heaviest_group(work: list[int], pools: list[list[int]], num_groups: int) -> int:
    """The largest sum over a step of a worker group, whose pools are pools[group::num_groups]."""
    load = exact_array(work)[np.array(pools)].sum(axis=1)
    return int(load.reshape(-1, num_groups).sum(axis=0).max())


def _by_pipeline(work: list[int], num_groups: int, num_steps: int) -> list[list[int]]:
    pools = _by_microbatch(work, num_groups, num_steps)
    load = [sum(work[i] for i in pool) for pool in pools]
    placed: list[list[int]] = [[] for _ in pools]
    for group, members in enumerate(exact_cardinality_lpt(load, num_groups)):
        for step, pool in enumerate(sorted(members, key=lambda k: (-load[k], k))):
            placed[step * num_groups + group] = pools[pool]
    return placed


PLACEMENTS = {"microbatch": _by_microbatch, "step": _by_step, "pipeline": _by_pipeline}
"""Pools by scope; each is called with the work, the worker groups (DP / P) and GA."""


def _check(num_sequences: int, pool_size: int, data_parallel_size: int, scope: str) -> None:
    if data_parallel_size % pool_size:
        raise ValueError(
            f"pool_size ({pool_size}) must divide data_parallel_size ({data_parallel_size}); "
            f"try one of {divisors(data_parallel_size)}."
        )
    if num_sequences == 0 or num_sequences % data_parallel_size:
        raise ValueError(
            f"sequences has {num_sequences} entries (GBS); it must be a positive multiple of "
            f"data_parallel_size ({data_parallel_size}); try "
            f"{max(1, round(num_sequences / data_parallel_size)) * data_parallel_size}."
        )
    if scope not in ("auto", *PLACEMENTS):
        raise ValueError(f"scope ({scope!r}) must be one of auto, {', '.join(PLACEMENTS)}.")


def _imbalance(load: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> float:
    mean = float(load.mean())
    return float(load.max()) / mean - 1 if mean else 0.0
