"""Traces of a layer: what a viewer reads, from predictions and from events."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from megatron_libra.replay.trace import layer_spans, spans_of_events, trace_object, write_trace
from megatron_libra.simulator.timeline import (
    Links,
    PassCompute,
    PassTraffic,
    Span,
    Timeline,
    simulate_pass,
)


def _timeline() -> Timeline:
    """Worker 0 sends a chunk to worker 1 in 1 s, which computes it in 2 s and sends it back."""
    zero, moved = np.zeros(2), np.array([[[0.0, 1e9], [0.0, 0.0]]])
    compute = PassCompute(
        early=zero,
        steps=np.array([[0.0, 2.0]]),
        names=("far 0",),
        late=zero,
        pack=zero,
        gather=zero,
    )
    links = Links(intra_node_gb_s=1, inter_node_gb_s=1, message_us=0, overlap_loss=0)
    traffic = PassTraffic(moved, moved.transpose(0, 2, 1))
    return simulate_pass(compute, traffic, links, np.ones((2, 2), bool))


def test_backward_begins_when_the_slowest_worker_is_done() -> None:
    spans = layer_spans(_timeline(), _timeline())
    chunks = [(s.name, s.start_s, s.stop_s) for s in spans if s.stream == "compute"]
    assert chunks == [("forward far 0", 1, 3), ("backward far 0", 5, 7)]
    streams = {(s.stream, s.name) for s in layer_spans(_timeline())}
    assert streams == {(x, "forward far 0") for x in ("compute", "far dispatch", "far return")}


def test_a_row_for_each_track_and_worker_and_a_thread_for_each_stream(tmp_path: Path) -> None:
    spans = layer_spans(_timeline())
    write_trace(tmp_path / "a.json", {"predicted": spans, "measured": spans[:1]}, note="a pool")
    value = json.loads((tmp_path / "a.json").read_text())
    assert value["otherData"] == {"note": "a pool"}
    names = {
        event["pid"]: event["args"]["name"]
        for event in value["traceEvents"]
        if event["name"] == "process_name"
    }
    assert sorted(names.values()) == [
        "measured, worker 0", "predicted, worker 0", "predicted, worker 1",
    ]  # fmt: skip
    bars = [event for event in value["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == len(spans) + 1
    chunk = next(bar for bar in bars if bar["cat"] == "compute")
    assert names[chunk["pid"]] == "predicted, worker 1"
    assert (chunk["tid"], chunk["ts"], chunk["dur"]) == (0, 1e6, 2e6)
    threads = {
        event["args"]["name"]: event["tid"]
        for event in value["traceEvents"]
        if event["name"] == "thread_name"
    }
    names = ("compute", "dispatch", "return", "far dispatch", "far return")
    assert threads == {name: number for number, name in enumerate(names)}


@dataclass
class FakeEvent:
    """A CUDA event at a time in milliseconds."""

    at: float

    def elapsed_time(self, other: FakeEvent) -> float:
        return other.at - self.at


def test_spans_between_events() -> None:
    bars = [(3, "compute", "chunk 0", FakeEvent(12), FakeEvent(15))]
    assert spans_of_events(FakeEvent(10), bars) == (
        Span(3, "compute", "chunk 0", pytest.approx(0.002), pytest.approx(0.005)),
    )


def test_an_unknown_stream_is_named() -> None:
    with pytest.raises(ValueError, match=r"stream \('copy'\) must be one of compute, dispatch"):
        trace_object({"x": [Span(0, "copy", "a", 0, 1)]})
