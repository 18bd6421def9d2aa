"""What a replay says. In: Replay, PoolTimes. Out: Summary of each series, answers for JSON.

A microbatch is as slow as its slowest pool, the straggler; a window has a mean and a worst
straggler (section 6.1). Speedups are those of Ulysses in the same job on the same window over this,
the mean over windows. A step without pipeline stages is as slow as the worker group whose pools
take longest together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megatron_libra.replay.replay import Replay, Series
from megatron_libra.replay.sampling import ModelError
from megatron_libra.replay.times import LOSSES, PoolTimes
from megatron_libra.simulator.pool_work import PoolWork

__all__ = [
    "Summary",
    "replay_answer",
    "source_notes",
    "source_of",
    "speed_notes",
    "summaries",
]

BEYOND = 1.02
"""Times a bound: above, a speedup says something of the times, not of the balance."""

Bool = NDArray[np.bool_]
Float = NDArray[np.float64]
Int64 = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One series; milliseconds of one attention layer, forward and backward."""

    name: str
    title: str
    times: str
    """See source_of."""
    workers_run: int
    """Whose kernel calls were run, of different pools."""
    mean_ms: float
    """The straggler, on average."""
    worst_ms: float
    """The slowest microbatch of a window, the mean over windows."""
    step_ms: float
    """All microbatches of the slowest worker group."""
    speedup_mean: float
    speedup_worst: float
    bound_mean: float
    """Mean speedup of perfect balance inside pools and a free exchange."""
    bound_worst: float
    forward_ms: float
    """Of the stragglers, as all that follows."""
    compute_ms: float
    """Of the worker that computes longest; what is left of mean_ms is communication."""
    perfect_ms: float
    """Computation if all pools of a microbatch and all workers were alike."""
    between_ms: float
    """More computation in the straggler than in the mean pool."""
    losses_ms: dict[str, float]
    """By LOSSES; with perfect_ms and between_ms they make up mean_ms."""
    imbalance: float
    """max / mean - 1 of the pairs inside a pool, on average over all pools."""
    pool_gb: float
    """GB (1e9 bytes) of one forward between all workers of a pool, on average."""
    worker_gb: float
    """Of the most loaded worker, the larger of sent and received."""
    worker_inter_gb: float
    """The same of what leaves or enters its node."""


def summaries(
    replay: Replay, times: PoolTimes, was_run: Sequence[Bool] | None = None
) -> tuple[Summary, ...]:
    """One for each series.

    Args:
        was_run: by work (W,), workers whose kernel calls were run; None: none.
    """
    counts = np.array([run.sum() for run in was_run] if was_run else [0] * len(replay.works))
    references = {
        _layout(each): replay.of_series(each.name)
        for each in replay.series
        if each.method.name == "ulysses"
    }
    return tuple(
        _summary(replay, times, number, references.get(_layout(each)), counts)
        for number, each in enumerate(replay.series)
    )


def _layout(series: Series) -> tuple[int, int]:
    return series.job.data_parallel_size, series.job.context_parallel_size


def _source(counts: Int64, stragglers: Int64) -> str:
    """See source_of, given the workers run of all works and the works of the stragglers."""
    if not counts.any():
        return "predicted"
    return "measured" if counts[stragglers].all() else "scaled"


def _summary(
    replay: Replay, times: PoolTimes, number: int, reference: Int64 | None, counts: Int64
) -> Summary:
    series = replay.series[number]
    rows = replay.of_series(series.name)
    shape = replay.corpus.num_windows, series.job.num_microbatches, -1
    layer = times.layer[rows].reshape(shape)
    stragglers = rows.reshape(shape)[*np.indices(layer.shape[:2]), layer.argmax(axis=2)].ravel()
    slowest = layer.max(axis=2)
    base = slowest
    if reference is not None:
        base = times.layer[reference].reshape(*slowest.shape, -1).max(axis=2)
    mean_compute = times.mean_compute[rows].sum(axis=1)
    own_compute = float(times.mean_compute[stragglers].sum(axis=1).mean())
    losses = times.losses[stragglers].sum(axis=1).mean(axis=0)
    works = [replay.works[index] for index in replay.rows[rows, 4]]
    return Summary(
        name=series.name,
        title=series.method.title,
        times=_source(counts, replay.rows[stragglers, 4]),
        workers_run=int(counts[np.unique(replay.rows[rows, 4])].sum()),
        mean_ms=float(slowest.mean()) * 1e3,
        worst_ms=float(slowest.max(axis=1).mean()) * 1e3,
        step_ms=float(layer.sum(axis=1).max(axis=1).mean()) * 1e3,
        speedup_mean=float((base.mean(axis=1) / slowest.mean(axis=1)).mean()),
        speedup_worst=float((base.max(axis=1) / slowest.max(axis=1)).mean()),
        bound_mean=replay.bounds[number][0],
        bound_worst=replay.bounds[number][1],
        forward_ms=float(times.seconds[stragglers, 0].mean()) * 1e3,
        compute_ms=float(times.max_compute[stragglers].sum(axis=1).mean()) * 1e3,
        perfect_ms=float(mean_compute.mean()) * 1e3,
        between_ms=(own_compute - float(mean_compute.mean())) * 1e3,
        losses_ms=dict(zip(LOSSES, (losses * 1e3).tolist(), strict=True)),
        **_bytes(works),
    )


def _bytes(works: list[PoolWork]) -> dict[str, float]:
    inter = [_most(np.where(work.same_node, 0, work.traffic_bytes)) for work in works]
    return {
        "imbalance": float(np.mean([work.imbalance for work in works])),
        "pool_gb": float(np.mean([work.traffic_bytes.sum() for work in works])) / 1e9,
        "worker_gb": float(np.mean([_most(work.traffic_bytes) for work in works])) / 1e9,
        "worker_inter_gb": float(np.mean(inter)) / 1e9,
    }


def _most(moved: Int64) -> int:
    """Bytes of the worker that sends, or receives, most."""
    return int(max(moved.sum(axis=0).max(), moved.sum(axis=1).max()))


def source_of(found: Sequence[Summary]) -> str:
    """Where the times of some series are from: predicted, if no worker was run at all; measured, if
    a worker of every straggler was run; scaled, if they are predictions times measured over
    predicted; partly measured, if some series are measured and some scaled.
    """
    sources = {each.times for each in found}
    return sources.pop() if len(sources) == 1 else "partly measured"


def source_notes(found: Sequence[Summary], errors: dict[str, ModelError | None]) -> tuple[str, ...]:
    """One line for each kind of scaled series: what its speedups compare."""
    total = errors.get("all")
    ratio = f"{total.ratio:.3f}" if total is not None else "1"
    scaled = [each for each in found if each.times == "scaled"]
    unknown = ", ".join(each.name for each in scaled if not each.workers_run)
    some = ", ".join(each.name for each in scaled if each.workers_run)
    notes = []
    if unknown:
        notes.append(
            f"{unknown}: no worker was run. The times are predictions x {ratio}, measured over "
            "predicted of all methods together: speedups compare a prediction with a measurement."
        )
    if some:
        notes.append(
            f"{some}: not every straggler had a worker run. The rest is predictions x measured "
            f"over predicted of the same method, or x {ratio}, that of all methods, if it shares "
            "all its measured pools with another one."
        )
    return tuple(notes)


def speed_notes(found: Sequence[Summary]) -> tuple[str, ...]:
    """What a reader of the speedups must know: who is slower than Ulysses, who beats its bound."""
    slow = [each.name for each in found if each.name == "libra" and each.speedup_mean < 1]
    fast = [
        each.name
        for each in found
        if each.bound_mean > 1 and each.speedup_mean > BEYOND * each.bound_mean
    ]
    notes = []
    if slow:
        notes.append(
            "libra is slower than Ulysses on this job: its sequences are too short, or too much "
            "alike, for what the exchange costs. Train without it."
        )
    if fast:
        notes.append(
            f"{', '.join(fast)}: faster than perfect balance would be, so a pair took longer under "
            "Ulysses: the machine was busy, or long calls find a lower clock. Trust the bound."
        )
    return tuple(notes)


def replay_answer(
    replay: Replay,
    found: tuple[Summary, ...],
    model: dict[str, Any],
    errors: dict[str, ModelError | None],
    measured: dict[str, Any] | None,
) -> dict[str, Any]:
    """For JSON.

    Args:
        found: of the series, in order.
        model: name and links of the cost model.
        errors: of the model by series, where workers were measured.
        measured: device, counts and seconds; None if nothing was run.
    """
    return {
        "figure": replay.figure,
        "times": source_of(found),
        "notes": (*source_notes(found, errors), *speed_notes(found)),
        "corpus": asdict(replay.corpus),
        "model": model,
        "measured": measured,
        "series": [
            {
                **asdict(summary),
                "layout": _layout_answer(series),
                "config": asdict(series.method.config),
                "scope": series.method.scope,
                "is_overlapped": series.method.is_overlapped,
                "model_error": None
                if errors.get(series.name) is None
                else asdict(errors[series.name]),  # type: ignore[arg-type]
            }
            for series, summary in zip(replay.series, found, strict=True)
        ],
    }


def _layout_answer(series: Series) -> dict[str, int]:
    job = series.job
    names = ("seq_length", "context_parallel_size", "data_parallel_size", "global_batch_size")
    return {**{name: getattr(job, name) for name in names}, **asdict(job.shape)}
