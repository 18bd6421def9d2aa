"""The cost model by hand, its calibration file, and what PoolWork counts of a plan."""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.pool_plan import plan_pool
from megatron_libra.simulator.calibration import BUILT_IN, load_cost_model
from megatron_libra.simulator.cost_model import CostModel, predict
from megatron_libra.simulator.pool_work import PoolWork

WORK = PoolWork(
    head_dim=10,
    chunks=2,
    kv_pieces=1,
    heads_per_shard=4,
    heads_per_call=2,
    load_target=1000.0,
    max_tile=500,
    pairs=np.array([1000, 500]),
    query_rows=np.array([100, 50]),
    rounds=np.array([1, 2]),
    query_bytes=np.array([[0, 800], [0, 0]]),
    kv_bytes=np.array([[0, 600], [0, 0]]),
    resident_kv_bytes=np.array([600, 600]),
    same_node=np.ones((2, 2), bool),
)


def test_forward_by_hand(model: CostModel) -> None:
    """Worker 0: 160 kFLOP = 0.16 s, 400 rows x heads = 0.04 s. Worker 1: half of both, but its
    calls have 50 of 100 rows, so 0.16 + 0.02 s; its 4 calls take 0.2 s. First: 400 + 600 bytes =
    0.1 s and a message of 0.01 s. Last: 400 bytes. Between: 400 bytes each way, 2 messages.
    """
    time = predict(WORK, model)
    assert time.forward_compute == pytest.approx([0.2, 0.2])
    assert time.forward_first == pytest.approx([0.11, 0.11])
    assert time.forward_last == pytest.approx([0.05, 0.05])
    assert time.forward == pytest.approx([0.11 + 0.05 + 0.2 + 0.5 * 0.06] * 2)


def test_backward_by_hand(model: CostModel) -> None:
    """dO comes in (400 bytes first), dQ and all of dK, dV go out (1000 bytes last)."""
    time = predict(WORK, model)
    assert time.backward_compute == pytest.approx([0.24, 0.2])
    assert time.backward == pytest.approx([0.05 + 0.11 + 0.24 + 0.03, 0.05 + 0.11 + 0.2 + 0.03])
    assert time.compute_s == pytest.approx(0.2 + 0.24)
    assert (time.forward_s, time.backward_s) == pytest.approx((0.39, 0.43))


def test_refetch_sends_q_o_do_and_kv(model: CostModel) -> None:
    """First: 3 * 400 + 600 bytes; between: 1200 out, 400 back."""
    time = predict(WORK, model, refetch=True)
    assert time.backward_s == pytest.approx(0.19 + 0.11 + 0.24 + 0.5 * 0.14)
    assert time.forward_s == pytest.approx(0.39)


def test_other_nodes_have_their_own_bandwidth(model: CostModel) -> None:
    apart = replace(WORK, same_node=np.eye(2, dtype=bool))
    assert predict(apart, model).forward_first == pytest.approx([0.21, 0.21])


def test_transfers_that_outlast_the_computation_are_what_counts(model: CostModel) -> None:
    idle = replace(WORK, pairs=np.zeros(2, int), query_rows=np.zeros(2, int),
                   rounds=np.zeros(2, int))  # fmt: skip
    time = predict(idle, model)
    assert time.forward == pytest.approx([0.11 + 0.05 + 0.06] * 2)
    assert time.compute_s == 0


def test_one_chunk_hides_nothing(model: CostModel) -> None:
    time = predict(replace(WORK, chunks=1), model)
    assert time.forward_first[0] == pytest.approx(0.14 + 0.01)
    assert time.forward[0] == pytest.approx(0.15 + 0.08 + 0.01 + time.forward_compute[0])


def test_work_of_a_plan_by_hand() -> None:
    """One sequence of 8 tokens on CP = 2 contiguous, tiles at home: worker 1 fetches 4 tokens of
    K and V, 2 kv heads of 8 elements of 2 bytes; no query moves.
    """
    plan = plan_pool(
        [[8]],
        context_parallel_size=2,
        shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
        config=LibraConfig(pool_size=1, block_size=4, chunks=2, placer="home", layout="contiguous"),
    )
    work = PoolWork.of(plan, workers_per_node=1)
    assert work.pairs.tolist() == [10, 26]
    assert work.query_rows.tolist() == [4, 4]
    assert work.kv_bytes.tolist() == [[0, 4 * 2 * 2 * 8 * 2], [0, 0]]
    assert not work.query_bytes.any()
    assert work.worker_bytes.tolist() == [256 * 1, 256]
    assert work.inter_node_bytes == 256
    assert work.resident_kv_bytes.tolist() == [256, 512]
    assert (work.heads_per_shard, work.heads_per_call, work.kv_pieces) == (4, 2, 2)
    assert work.tile_over_target == pytest.approx(26 / (1.03 * 18))
    assert work.imbalance == pytest.approx(26 / 18 - 1)
    assert PoolWork.of(plan, workers_per_node=2).inter_node_bytes == 0


@pytest.mark.parametrize("placer", ["home_first", "paper", "ulysses"])
def test_bytes_are_those_of_the_plan(placer: str) -> None:
    plan = plan_pool(
        [[500, 12], [100] * 5, [40] * 12, [512]],
        context_parallel_size=2,
        shape=AttentionShape(query_heads=8, kv_heads=2, head_dim=8),
        config=LibraConfig(pool_size=4, block_size=64, head_split=2, chunks=2, placer=placer),
    )
    work = PoolWork.of(plan, workers_per_node=2)
    assert (work.traffic_bytes == plan.traffic_bytes).all()
    assert work.query_rows.sum() == plan.config.head_split * sum(map(sum, plan.sequences))


def test_nearest_head_dimension() -> None:
    model = BUILT_IN["h200-fa4"]
    assert model.kernel(64) == model.kernel(128) != model.kernel(256)
    assert model.kernel(200) == model.kernel(256)


def _file(path: Path, **changes: Any) -> str:
    value = asdict(BUILT_IN["h200-fa2"]) | {"name": "mine"} | changes
    path.write_text(json.dumps({k: v for k, v in value.items() if v is not None}))
    return str(path)


def test_a_calibration_file_is_read_back(tmp_path: Path) -> None:
    model = load_cost_model(_file(tmp_path / "mine.json", intra_node_gb_s=123))
    assert model.intra_node_gb_s == 123
    assert replace(model, name="h200-fa2", intra_node_gb_s=270.0) == BUILT_IN["h200-fa2"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"message_us": None}, "missing ['message_us'], unknown []"),
        ({"color": 1}, "missing [], unknown ['color']"),
        ({"message_us": "x"}, "message_us ('x') must be a number of at least 0"),
        ({"message_us": -1}, "message_us (-1) must be a number of at least 0"),
        ({"message_us": True}, "message_us (True)"),
        ({"intra_node_gb_s": 0}, "intra_node_gb_s (0.0) must be above 0"),
        ({"kernels": {}}, "kernels is empty"),
        ({"kernels": {"x": 1}}, "kernels['x'] must be a head dimension"),
        ({"kernels": {"8": {"forward_tflops": 1}}}, "kernels['8'] must be a head dimension"),
        ({"kernels": {"8": {"forward_tflops": 1, "backward_tflops": 0}}}, "backward_tflops (0)"),
    ],
)
def test_bad_calibrations_are_named(tmp_path: Path, changes: Any, message: str) -> None:
    path = _file(tmp_path / "mine.json", **changes)
    with pytest.raises(ValueError) as error:
        load_cost_model(path)
    assert message in str(error.value) and str(error.value).startswith(path)


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match="a.json: not JSON .*; copy the example"):
        load_cost_model(str(tmp_path / "a.json"))
    (tmp_path / "a.json").write_bytes(b"\xc3 1")
    with pytest.raises(ValueError, match="a.json: not JSON .*; copy the example"):
        load_cost_model(str(tmp_path / "a.json"))
    with pytest.raises(ValueError, match="does not exist"):
        load_cost_model("h100")


def test_the_documented_example_is_the_default(tmp_path: Path) -> None:
    text = (Path(__file__).resolve().parents[2] / "docs" / "simulator.md").read_text()
    example = re.search(r"^    \{\n.*?^    \}$", text, re.MULTILINE | re.DOTALL)
    assert example
    (tmp_path / "example.json").write_text(example[0])
    found = load_cost_model(str(tmp_path / "example.json"))
    assert replace(found, name="h200-fa4") == BUILT_IN["h200-fa4"]
