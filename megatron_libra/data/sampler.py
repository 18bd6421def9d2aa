"""Which sample each replica trains on. In: consumed samples and lengths. Out: microbatches.

    consumed -> window of GBS samples -> VRSP -> order[ga * DP + dp_rank], and the pool around it

A window is the samples [consumed, consumed + GBS) of one optimizer step: exactly those that
Megatron's own sampler gives to the step; only their places (GA index, DP rank) change. All is a
pure function of consumed samples and lengths, so every rank computes it alone and ahead of time,
and a resumed run continues with the same order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from megatron_libra.data.lengths import LengthTable
from megatron_libra.data.schedule import BatchSize, constant_batch_size
from megatron_libra.plan.vrsp import order_window

__all__ = ["LibraSampler", "Microbatch", "ReplicaLayout", "Window", "order_samples"]

Scope = Literal["off", "auto", "microbatch", "step", "pipeline"]
Tail = Literal["drop", "reuse"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaLayout:
    """How many replicas share the samples of a step, and how they are ordered."""

    data_parallel_size: int
    """DP, replicas that each take one packed sequence at a time."""
    pool_size: int
    """P, contiguous replicas of one pool; divides DP."""
    scope: Scope = "auto"
    """VRSP scope (see plan.vrsp); off keeps Megatron's order."""
    pipeline_parallel_size: int = 1
    """PP, used by scope auto."""
    micro_batch_size: int = 1
    """Packed sequences of one microbatch of a replica; must be 1."""

    def __post_init__(self) -> None:
        if self.micro_batch_size != 1:
            raise ValueError(
                f"micro_batch_size ({self.micro_batch_size}) must be 1 with Libra; set it to 1 and "
                "raise seq_length instead, which packs the same tokens into one sequence."
            )
        if self.pool_size < 1 or self.data_parallel_size % self.pool_size:
            raise ValueError(
                f"pool_size ({self.pool_size}) must divide data_parallel_size "
                f"({self.data_parallel_size}); try {self.data_parallel_size} or 1."
            )


@dataclass(frozen=True, slots=True)
class Microbatch:
    """One forward and backward pass of a replica, and of the pool it belongs to."""

    start: int
    """Consumed samples before the step."""
    ga_index: int
    """Index of the pass within the step, 0 to GA - 1."""
    sample: int
    """Dataset index that this replica loads."""
    pool: tuple[int, ...]
    """(P,) dataset indices of the pool's replicas, by slot."""
    sequences: tuple[tuple[int, ...], ...]
    """(P,) their sample lengths: the input of plan_pool."""


@dataclass(frozen=True, slots=True)
class Window:
    """The samples of one optimizer step, in the order in which replicas take them."""

    start: int
    """Consumed samples before the step."""
    layout: ReplicaLayout
    samples: tuple[int, ...]
    """(GBS,) dataset indices, GA-major: samples[ga * DP + dp_rank]."""
    sequences: tuple[tuple[int, ...], ...]
    """(GBS,) their sample lengths."""

    @property
    def num_microbatches(self) -> int:
        """GA, passes of each replica."""
        return len(self.samples) // self.layout.data_parallel_size

    def microbatch(self, ga_index: int, data_parallel_rank: int) -> Microbatch:
        """What one replica does at one GA index."""
        pool_size = self.layout.pool_size
        place = ga_index * self.layout.data_parallel_size + data_parallel_rank
        first = place - data_parallel_rank % pool_size
        return Microbatch(
            start=self.start,
            ga_index=ga_index,
            sample=self.samples[place],
            pool=self.samples[first : first + pool_size],
            sequences=self.sequences[first : first + pool_size],
        )


def order_samples(
    table: LengthTable, samples: Sequence[int], *, start: int, layout: ReplicaLayout
) -> Window:
    """Order the samples of one step: nothing is added, lost or repeated.

    Args:
        table: lengths of the dataset.
        samples: GBS dataset indices in Megatron's order; GBS is a multiple of DP.
        start: consumed samples before the step.
        layout: replicas, pools and scope.
    """
    sequences = [table.lengths(sample) for sample in samples]
    order: Sequence[int] = range(len(samples))
    if layout.scope != "off":
        order = order_window(
            sequences,
            pool_size=layout.pool_size,
            data_parallel_size=layout.data_parallel_size,
            scope=layout.scope,
            pipeline_parallel_size=layout.pipeline_parallel_size,
        ).order
    return Window(
        start=start,
        layout=layout,
        samples=tuple(samples[i] for i in order),
        sequences=tuple(sequences[i] for i in order),
    )


class LibraSampler:
    """Batch sampler for a torch DataLoader: yields [sample] of one replica.

    Takes the place of Megatron's MegatronPretrainingSampler (tail drop) and, for full validation,
    of MegatronFullValidationSampler (tail reuse).
    """

    def __init__(
        self,
        table: LengthTable,
        layout: ReplicaLayout,
        *,
        data_parallel_rank: int,
        batch_size: int | BatchSize,
        consumed_samples: int = 0,
        tail: Tail = "drop",
    ) -> None:
        """Describe the samples of one replica; nothing is read yet.

        Args:
            table: lengths of the dataset.
            layout: replicas, pools and scope.
            data_parallel_rank: this replica.
            batch_size: GBS, or a pure function of consumed samples; always a multiple of DP.
            consumed_samples: where to begin; any count, a step begins there.
            tail: samples behind the last multiple of DP are dropped (drop), or the replicas
                without one take the first sample of theirs again (reuse).

        Raises:
            ValueError: no sample is left, too few to give each replica one of its own, or the rank
                is outside the replicas.
        """
        size = layout.data_parallel_size
        if not 0 <= data_parallel_rank < size:
            raise ValueError(f"data_parallel_rank ({data_parallel_rank}) must be in [0, {size}).")
        self._table = table
        self._layout = layout
        self._rank = data_parallel_rank
        self._batch_size = _as_schedule(batch_size)
        self._start = consumed_samples
        self._num_samples = len(table)
        self._stop = _stop_of(self._num_samples, consumed_samples, size, tail)
        self._latest: Window | None = None

    def __len__(self) -> int:
        """Microbatches of this replica, from its first step to its last."""
        return (self._stop - self._start) // self._layout.data_parallel_size

    def __iter__(self) -> Iterator[list[int]]:
        """As a torch batch sampler: the one dataset index of each microbatch."""
        return ([microbatch.sample] for microbatch in self.microbatches())

    def microbatches(self) -> Iterator[Microbatch]:
        """This replica's microbatches in training order; the same in each call, so a planner may
        read ahead with an iterator of its own."""
        for window in self.windows():
            for ga_index in range(window.num_microbatches):
                yield window.microbatch(ga_index, self._rank)

    def windows(self) -> Iterator[Window]:
        """The steps in training order; the last may be short. The same on every rank."""
        start = self._start
        while start < self._stop:
            window = self._latest
            if window is None or window.start != start:
                # Loader, planner and telemetry each iterate; the first to get here orders for all.
                self._latest = window = self._window(start)
            yield window
            start += len(window.samples)

    def _window(self, start: int) -> Window:
        size = self._layout.data_parallel_size
        batch_size = self._batch_size(start)
        if batch_size < 1 or batch_size % size:
            raise ValueError(
                f"batch_size ({batch_size}) at {start} consumed samples must be a multiple of "
                f"data_parallel_size ({size}); try {max(1, round(batch_size / size)) * size}."
            )
        places = range(start, min(start + batch_size, self._stop))
        # Only tail reuse has places behind the last sample: rank r takes sample r again.
        samples = [p if p < self._num_samples else (p - self._start) % size for p in places]
        return order_samples(self._table, samples, start=start, layout=self._layout)


def _stop_of(num_samples: int, consumed_samples: int, size: int, tail: Tail) -> int:
    """Place behind the last one that is used: whole multiples of DP from consumed_samples on."""
    if not 0 <= consumed_samples < num_samples:
        raise ValueError(
            f"consumed_samples ({consumed_samples}) must be in [0, {num_samples}), the samples of "
            "the dataset; build it with more samples, or continue from an earlier checkpoint."
        )
    left = num_samples - consumed_samples
    if tail == "drop":
        return consumed_samples + left // size * size
    if num_samples < size:
        raise ValueError(
            f"the dataset has {num_samples} samples, fewer than data_parallel_size ({size}); each "
            "replica needs one; use more samples or fewer replicas."
        )
    return consumed_samples + -(-left // size) * size


def _as_schedule(batch_size: int | BatchSize) -> BatchSize:
    return constant_batch_size(batch_size) if isinstance(batch_size, int) else batch_size
