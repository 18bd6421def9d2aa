"""A layer as a trace for Perfetto or chrome://tracing. In: spans. Out: a JSON file.

A track is one source of spans, such as predicted or measured. Each of its workers is a process with
one thread for each stream. Spans come from a timeline, whose computation may be predicted or
measured, or from CUDA events.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron_libra.simulator.timeline import Span, Timeline

__all__ = ["STREAMS", "layer_spans", "spans_of_events", "trace_object", "write_trace"]

STREAMS = ("compute", "dispatch", "return", "far dispatch", "far return")
"""Threads of a worker, from top to bottom."""
EventSpan = tuple[int, str, str, Any, Any]
"""(worker, stream, name, start, stop); start and stop are CUDA events that were recorded."""


def layer_spans(forward: Timeline, backward: Timeline | None = None) -> tuple[Span, ...]:
    """Spans of a layer's forward and then backward, which begins when every worker is done."""
    spans = tuple(replace(span, name=f"forward {span.name}") for span in forward.spans())
    if backward is None:
        return spans
    later = forward.seconds
    return spans + tuple(
        replace(
            span,
            name=f"backward {span.name}",
            start_s=span.start_s + later,
            stop_s=span.stop_s + later,
        )
        for span in backward.spans()
    )


def spans_of_events(origin: Any, events: Iterable[EventSpan]) -> tuple[Span, ...]:
    """Spans between CUDA events with timing of one device, which it has reached.

    Args:
        origin: the event at time 0.
        events: any number of bars.
    """
    return tuple(
        Span(
            worker,
            stream,
            name,
            origin.elapsed_time(start) / 1e3,
            origin.elapsed_time(stop) / 1e3,
        )
        for worker, stream, name, start, stop in events
    )


def trace_object(tracks: Mapping[str, Iterable[Span]], *, note: str = "") -> dict[str, Any]:
    """The trace as an object of JSON; times are microseconds.

    Args:
        tracks: spans by the name of their source.
        note: what the trace is of.

    Raises:
        ValueError: a span of an unknown stream.
    """
    events: list[dict[str, Any]] = []
    for number, (track, spans) in enumerate(tracks.items()):
        rows = sorted(spans, key=lambda span: (span.worker, span.start_s, span.stream))
        workers = sorted({span.worker for span in rows})
        pids = {worker: number * 100_000 + worker + 1 for worker in workers}
        for worker in workers:
            events += _names(pids[worker], f"{track}, worker {worker}")
        events += [_bar(span, pids[span.worker]) for span in rows]
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"note": note}}


def _names(pid: int, title: str) -> list[dict[str, Any]]:
    threads = [
        {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": stream}}
        for tid, stream in enumerate(STREAMS)
    ]
    process = {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": title}}
    order = {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    return [process, order, *threads]


def _bar(span: Span, pid: int) -> dict[str, Any]:
    if span.stream not in STREAMS:
        raise ValueError(f"stream ({span.stream!r}) must be one of {', '.join(STREAMS)}.")
    return {
        "ph": "X",
        "name": span.name,
        "cat": span.stream,
        "pid": pid,
        "tid": STREAMS.index(span.stream),
        "ts": span.start_s * 1e6,
        "dur": (span.stop_s - span.start_s) * 1e6,
    }


def write_trace(path: Path, tracks: Mapping[str, Iterable[Span]], *, note: str = "") -> None:
    """Write a trace; open it in ui.perfetto.dev."""
    path.write_text(json.dumps(trace_object(tracks, note=note)), encoding="utf-8")
