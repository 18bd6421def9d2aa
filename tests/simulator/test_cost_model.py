"""The cost model by hand, and its calibration file."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.parts import EARLY, FAR, LATE, NEAR
from megatron_libra.plan.pool_plan import plan_pool
from megatron_libra.simulator.calibration import BUILT_IN, built_in, load_cost_model, model_json
from megatron_libra.simulator.call_cost import PassCost
from megatron_libra.simulator.call_table import CallTable
from megatron_libra.simulator.cost_model import CostModel, part_seconds, pass_compute, predict
from megatron_libra.simulator.pool_work import PoolWork
from megatron_libra.simulator.tiling import Tiling

CALLS = replace(
    CallTable.of_calls(
        [
            (np.array([4]), np.array([10])),  # worker 0: 7 + 8 + 9 + 10 = 34 pairs
            (np.array([2]), np.array([2])),  # worker 0, local: 3 pairs
            (np.array([2, 0, 2]), np.array([3, 5, 2])),  # worker 1: 5 + 3 pairs and a filler
            (np.array([1]), np.array([2])),  # worker 1, its second round: 2 pairs
        ],
        query_heads=[2, 4, 2, 2],
        kv_heads=[1, 2, 1, 1],
    ),
    worker=np.array([0, 0, 1, 1]),
    part=np.array([NEAR, LATE, NEAR, NEAR]),
)
NOTHING = np.zeros((2, 2), np.int64)
WORK = PoolWork(
    head_dim=8,
    chunks=2,
    kv_pieces=1,
    load_target=1000.0,
    max_tile=500,
    pairs=np.array([37, 10]),
    calls=CALLS,
    query_bytes=np.array([[[0, 800], [0, 0]], NOTHING]),
    kv_bytes=np.array([[[0, 600], [0, 0]], NOTHING]),
    own_query_bytes=np.array([[400, 200], [0, 0]]),
    own_kv_bytes=np.array([[0, 100], [0, 0]]),
    copied_query_bytes=np.array([300, 0]),
    copied_kv_bytes=np.array([100, 0]),
    resident_kv_bytes=np.array([600, 600]),
    same_node=np.ones((2, 2), bool),
)


def test_kernel_calls_by_hand(model: CostModel) -> None:
    """A pair and head is 1 ms forward and 2 ms backward, a query row and head 0.1 ms."""
    forward = part_seconds(WORK, model, backward=False)
    assert forward[NEAR] == pytest.approx([34 * 2e-3 + 8e-4, 10 * 2e-3 + 10e-4])
    assert forward[LATE] == pytest.approx([3 * 4e-3 + 8e-4, 0])
    assert forward[EARLY].tolist() == forward[FAR].tolist() == [0, 0]
    backward = part_seconds(WORK, model, backward=True)
    assert backward[NEAR] == pytest.approx([34 * 4e-3 + 8e-4, 10 * 4e-3 + 10e-4])


def test_the_host_issues_calls_no_faster(model: CostModel) -> None:
    """50 ms a call: worker 1 has two of them in a chunk, worker 0 one of 68.8 ms."""
    parts = part_seconds(WORK, model, backward=False)
    compute = pass_compute(WORK, parts, model, backward=False)
    assert compute.names == ("near 0", "far 0", "far 1", "near 1")
    assert compute.steps == pytest.approx(
        np.array([[68.8e-3, 0.1], [0, 0], [0, 0], [68.8e-3, 0.1]])
    )
    assert compute.late == pytest.approx([0.05, 0])


def test_forward_by_hand(model: CostModel) -> None:
    """Worker 0 sends 400 + 600 bytes of chunk 0 in 0.1 s, and a message of 10 ms; then 400 bytes.
    Both are done with the exchange then. Worker 1 computes 2 x 0.1 s and returns 400 bytes of O in
    0.05 s.
    """
    time = predict(WORK, model)
    assert time.forward.first_wait == pytest.approx([0.11, 0.11])
    assert time.forward.end[1] == pytest.approx(0.11 + 0.2 + 0.05)
    assert time.forward_s == pytest.approx(0.36)
    assert time.forward.last_wait == pytest.approx([0.25 - 2 * 68.8e-3 - 0.05, 0.05])
    assert time.forward_compute.total == pytest.approx([2 * 68.8e-3 + 0.05, 0.2])


def test_backward_by_hand(model: CostModel) -> None:
    """dO comes in (400 bytes a chunk), dQ goes out and, with the last chunk, all of dK and dV."""
    time = predict(WORK, model)
    assert time.backward.first_wait == pytest.approx([0.05, 0.05])
    assert time.backward.end == pytest.approx([0.05 + 2 * 136.8e-3 + 0.05, 0.05 + 0.2 + 0.11])
    assert time.compute_s == pytest.approx(0.2 + 2 * 136.8e-3 + 0.05)


def test_refetch_sends_q_o_do_and_kv(model: CostModel) -> None:
    """First: 3 * 400 + 600 bytes."""
    time = predict(WORK, model, refetch=True)
    assert time.backward.first_wait[1] == pytest.approx(0.18 + 0.01)
    assert time.forward_s == pytest.approx(0.36)


def test_other_nodes_have_their_own_bandwidth(model: CostModel) -> None:
    apart = replace(WORK, same_node=np.eye(2, dtype=bool))
    assert predict(apart, model).forward.first_wait[1] == pytest.approx(0.21)


def test_kv_travels_with_the_first_chunk_and_its_gradient_with_the_last() -> None:
    """In both parts; steps are near 0, near 1, far 0 .. 3, near 2, near 3."""
    far = {"query_bytes": [[0, 400], [0, 0]], "kv_bytes": [[0, 20], [0, 0]]}
    both = {name: getattr(WORK, name) + [NOTHING, moved] for name, moved in far.items()}
    work = replace(WORK, chunks=4, kv_pieces=2, **both)
    forward, backward = (work.traffic(backward=b) for b in (False, True))
    queries = [200, 200, 100, 100, 100, 100, 200, 200]
    brings, finishes = [300, 0, 10, 0, 10, 0, 300, 0], [0, 300, 0, 10, 0, 10, 0, 300]
    assert forward.dispatch[:, 0, 1].tolist() == np.add(queries, brings).tolist()
    assert forward.return_[:, 1, 0].tolist() == queries
    assert backward.dispatch[:, 0, 1].tolist() == queries
    assert backward.return_[:, 1, 0].tolist() == np.add(queries, finishes).tolist()


def test_rows_are_gathered_at_the_speed_of_memory(model: CostModel) -> None:
    """Worker 0 packs 400 + 600 bytes to send and 200 of Q to keep, reads and writes; it copies its
    300 bytes of local Q and 100 of K and V, and the gathered O has them twice."""
    slow = replace(model, gather_gb_s=1e-6)
    compute = pass_compute(WORK, np.zeros((4, 2)), slow, backward=False)
    assert compute.pack == pytest.approx([2 * 1.2, 2 * (0.1 + 0.1)])
    assert compute.early == pytest.approx([2 * (0.6 + 0.4), 2 * 0.1])
    assert compute.gather == pytest.approx([2 * (0.8 + 0.4 + 2 * 0.3), 2 * 0.2])
    backward = pass_compute(WORK, np.zeros((4, 2)), slow, backward=True)
    home = (0.8 + 0.6) + 0.4 + 2 * 0.3 + 0.1  # returned dQ, dK and dV; kept dQ; copies
    assert backward.gather == pytest.approx([2 * home, 2 * (0.2 + 0.1)])
    copied = [WORK.gathers(backward=True, refetch=r).copied.tolist() for r in (False, True)]
    assert copied == [[2 * 300, 0], [2 * (3 * 300 + 100), 0]]


def test_a_pool_that_exchanges_nothing_waits_for_nothing(model: CostModel) -> None:
    plan = plan_pool(
        [[8], [6]],
        context_parallel_size=1,
        shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
        config=LibraConfig(pool_size=2, block_size=4, placer="home"),
    )
    time = predict(PoolWork.of(plan, 2), replace(model, gather_gb_s=1e-9))
    assert time.forward_s == pytest.approx(36 * 4e-3 + 32e-4)
    assert not time.forward.wait.any()


def test_nearest_head_dimension_is_scaled() -> None:
    model = built_in("h200-fa4")
    assert model.kernel_cost(128) is model.kernels[128]
    half, whole = model.kernel_cost(64).forward, model.kernel_cost(128).forward
    assert half.step_ns == whole.step_ns / 2 and half.call_us == whole.call_us
    assert model.kernel_cost(200).backward.tiling == model.kernels[256].backward.tiling


@pytest.mark.parametrize("name", BUILT_IN)
def test_the_built_in_models_reach_the_measured_rates(name: str) -> None:
    """32K causal tokens, 32 query and 4 kv heads of 128: 682 and 604, 353 and 320 TFLOP/s, which
    vary by some per cent with the clock.
    """
    model = built_in(name)
    calls = CallTable.of_calls([(np.array([32768]), np.array([32768]))], [32], [4])
    flops = 4 * 128 * 32 * 32768 * 32769 / 2
    measured = {"h200-fa4": (682e12, 604e12), "h200-fa2": (353e12, 320e12)}[name]
    for backward, rate in zip((False, True), measured, strict=True):
        seconds = model.pass_cost(128, backward=backward).seconds(calls, model.num_sms)
        assert flops * (2.5 if backward else 1) / seconds[0] == pytest.approx(rate, rel=0.08)


def _file(path: Path, change: Callable[[dict[str, Any]], Any] = lambda value: None) -> str:
    value = model_json(built_in("h200-fa2")) | {"name": "mine"}
    change(value)
    path.write_text(json.dumps(value))
    return str(path)


def test_a_calibration_file_is_read_back(tmp_path: Path) -> None:
    model = load_cost_model(_file(tmp_path / "mine.json", lambda v: v.update(intra_node_gb_s=123)))
    assert model.intra_node_gb_s == 123
    assert replace(model, name="h200-fa2", intra_node_gb_s=270.0) == built_in("h200-fa2")


def _forward(value: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = value["kernels"]["128"]["forward"]
    return found


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda v: v.pop("message_us"), "missing ['message_us'], unknown []; write it with libra"),
        (lambda v: v.update(color=1), "missing [], unknown ['color']"),
        (lambda v: v.update(message_us="x"), "message_us ('x') must be a number of at least 0"),
        (lambda v: v.update(message_us=-1), "message_us (-1) must be a number of at least 0"),
        (lambda v: v.update(message_us=True), "message_us (True)"),
        (lambda v: v.update(message_us=10**400), f"message_us ({'1'.ljust(37, '0')}...) must be a"),
        (lambda v: v.update(intra_node_gb_s=0), "intra_node_gb_s (0.0) must be above 0"),
        (lambda v: v.update(num_sms=0.5), "num_sms (0.5) must be an integer of at least 1"),
        (lambda v: v.update(num_sms=132.0), "at least 1 and at most 2147483647; try 132."),
        (lambda v: v.update(num_sms=2**31), "at most 2147483647; write it with libra calibrate"),
        (lambda v: v.update(num_sms=10**400), f"num_sms ({'1'.ljust(37, '0')}...) must be an"),
        (lambda v: v.update(num_sms=1e300), "num_sms (1e+300) must be an integer of at least 1"),
        (lambda v: v.update(num_sms=[0] * 999), "0, 0, ...) must be an integer of at least 1"),
        (lambda v: v.update(kernels={}), "kernels is empty"),
        (lambda v: v.update(kernels=[1]), "kernels ([1]) must map head dimensions"),
        (lambda v: v.update(kernels="x" * 999), f"kernels ('{'x' * 36}...) must map head"),
        (lambda v: v.update({"x" * 999: 1}), f"unknown ['{'x' * 37}...']; write it with libra"),
        (lambda v: v.update(dict.fromkeys(map(str, range(999)))), "'1', '10', '100', '101'"),
        (lambda v: v.update(kernels={"x": 1}), "kernels['x'] must be a head dimension"),
        (lambda v: v.update(kernels={"9" * 20: 1}), "must be a head dimension, such as 128."),
        (lambda v: v.update(kernels={"9" * 5000: 1}), f"kernels['{'9' * 36}...] must be a head"),
        (lambda v: v.update(kernels={"8": {"forward": 1}}), "missing ['backward']"),
        (lambda v: _forward(v).pop("step_ns"), "kernels['128'].forward must be an object"),
        (lambda v: _forward(v).update(alone=2), "kernels['128'].forward.alone (2.0) must be"),
        (lambda v: _forward(v)["tiling"].update(grid="x"), "forward.tiling.grid ('x') must be one"),
        (lambda v: _forward(v)["tiling"].update(grid="x" * 999), "xxx...) must be one of ("),
        (lambda v: _forward(v)["tiling"].update(step_rows=0), "tiling.step_rows (0) must be"),
        (lambda v: _forward(v)["tiling"].update(step_rows=64.0), "step_rows (64.0) must be an"),
        (lambda v: _forward(v)["tiling"].update(step_rows=10**400), "0...) must be an integer of"),
        (lambda v: _forward(v)["tiling"].update(tile_rows=10**400), "0...) must be an integer of"),
        (lambda v: _forward(v)["tiling"].update(ctas_per_sm=10**400), "0...) must be an integer"),
        (lambda v: _forward(v)["tiling"].update(owns_keys=1), "owns_keys (1) must be true or"),
        (lambda v: _forward(v)["tiling"].update(owns_keys="x" * 999), "xxx...) must be true or"),
    ],
)
def test_bad_calibrations_are_named(
    tmp_path: Path, change: Callable[[dict[str, Any]], Any], message: str
) -> None:
    path = _file(tmp_path / "mine.json", change)
    with pytest.raises(ValueError) as error:
        load_cost_model(path)
    assert message in str(error.value) and str(error.value).startswith(f"{path}: ")
    assert len(str(error.value)) - len(path) < 350


def test_a_file_of_the_older_format_says_what_is_new(tmp_path: Path) -> None:
    old = {"name": "x", "kernels": {}, "forward_token_ns": 1, "full_call_rows": 1}
    (tmp_path / "old.json").write_text(json.dumps(old))
    with pytest.raises(ValueError, match="missing .*'num_sms'.*older format.*libra calibrate"):
        load_cost_model(str(tmp_path / "old.json"))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{", "is not JSON: line 1, column 2: Expecting property name"),
        (b"\xc3 1", "is not UTF-8: byte 0 is 0xc3"),
        (b"", "is empty"),
        (b"[" * 100_000, "nests too deeply"),
        (b'{"name": "a", "name": "b"}', 'key "name" is given twice'),
        (b'{"num_sms": NaN}', "NaN is not a number"),
        (b'{"num_sms": 1e999}', "1e999 is too large for a number"),
    ],
)
def test_a_file_that_is_no_json(tmp_path: Path, content: bytes, reason: str) -> None:
    (tmp_path / "a.json").write_bytes(content)
    with pytest.raises(ValueError, match=f"a.json: {reason}.*; write it with libra calibrate"):
        load_cost_model(str(tmp_path / "a.json"))


def test_a_name_of_no_file() -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_cost_model("h100")


def test_every_key_of_the_file_is_documented() -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text()
    rows = set(re.findall(r"^\| (\w+(?:, \w+)*) \|", text, re.MULTILINE))
    documented = {name for row in rows for name in row.split(", ")}
    keys = {field.name for kind in (CostModel, PassCost, Tiling) for field in fields(kind)}
    assert keys <= documented
