"""Values that Python callers pass: what counts as an integer, and one line for what does not."""

from __future__ import annotations

import numpy as np
import pytest

from megatron_libra import AttentionShape, LibraConfig, order_window, plan_pool

SHAPE = AttentionShape(query_heads=4, kv_heads=2, head_dim=8)
POOL = [[10, 20], [32]]
WINDOW = [[10], [20], [3, 4], [5]]


def plan(sequences=POOL, cp=2, seq_length=None, **fields):
    config = LibraConfig(**{"pool_size": 2, "block_size": 16, "chunks": 1, **fields})
    return plan_pool(
        sequences, context_parallel_size=cp, shape=SHAPE, config=config, seq_length=seq_length
    )


def order(sequences=WINDOW, **sizes):
    return order_window(sequences, **{"pool_size": 2, "data_parallel_size": 2, **sizes})


def refused(call, *words):
    with pytest.raises(ValueError) as error:
        call()
    assert "\n" not in str(error.value)
    for word in words:
        assert word in str(error.value)


FORMS = {
    "tuples": lambda rows: tuple(map(tuple, rows)),
    "arrays": lambda rows: [np.array(row, np.int32) for row in rows],
    "numpy integers": lambda rows: [list(map(np.uint16, row)) for row in rows],
    "generator": lambda rows: (row for row in rows),
    "generators": lambda rows: [(length for length in row) for row in rows],
}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_lengths_may_come_in_any_iterable(form):
    assert plan(form(POOL)) == plan()
    assert order(form(WINDOW)) == order()


def test_numpy_numbers_give_the_plan_of_python_numbers():
    of_numpy = plan(
        cp=np.int64(2), seq_length=np.int32(32), block_size=np.int64(16), load_slack=np.float64(0.1)
    )
    assert of_numpy == plan(seq_length=32, load_slack=0.1)
    shape = AttentionShape(query_heads=np.int64(4), kv_heads=np.int8(2), head_dim=8)
    assert repr(shape) == repr(SHAPE)
    assert order(pool_size=np.int64(2), data_parallel_size=np.int16(2)) == order()


@pytest.mark.parametrize("call", [plan, order])
@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([[True, 20], [32]], ["sequences[0] holds True", "integers"]),
        ([[10], [np.bool_(True), 20]], ["sequences[1] holds", "True", "integers"]),
        ([[10], np.array([True, False])], ["sequences[1] holds", "True", "integers"]),
        ([[10], [20, 1.0]], ["sequences[1] holds 1.0"]),
        ([[10], [[20], 3]], ["sequences[1] holds [20]"]),
        ([[10], [[]]], ["sequences[1] holds []"]),
        ([[10], ["20"]], ["sequences[1] holds '20'"]),
        ([[10], [2**70]], ["sequences[1] holds 1180591620717411303424", "fewer than"]),
        ([[10], [2**63, 1]], ["sequences[1]", "fewer than"]),
        ([10, 32], ["sequences[0] (10)", "list"]),
        ([[10], None], ["sequences[1] (None)", "list"]),
        (None, ["sequences (None)", "list"]),
    ],
)
def test_what_is_no_length_is_named(call, rows, words):
    refused(lambda: call(rows), *words)


@pytest.mark.parametrize("value", [0, -1, 2.0, "2", None, True, [2], 2**70])
def test_sizes_are_integers(value):
    shown = f"({value!r})"
    if value is not None:
        refused(lambda: plan(seq_length=value), "seq_length " + shown)
    refused(lambda: plan(cp=value), "context_parallel_size " + shown)
    refused(lambda: plan(block_size=value), "block_size " + shown)
    for name in ("pool_size", "data_parallel_size", "pipeline_parallel_size"):
        refused(lambda name=name: order(**{name: value}), f"{name} {shown}")


def test_a_sequence_is_shorter_than_two_to_the_31():
    refused(lambda: plan(seq_length=2**40), "seq_length (1099511627776)", "2147483647")
    refused(lambda: plan([[2**31 - 1, 9], [1]]), "seq_length", "2147483647")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("load_slack", value) for value in ("0.1", None, False, [0.1], float("nan"), 1.0)),
        *(("plan_timeout_s", value) for value in ("9", None, True, 0.0, float("nan"))),
        *(("transport", value) for value in ("ring", None, np.array(["nccl", "gloo"]))),
        *(("deterministic", value) for value in ("no", None, 1)),
        *(("layout", value) for value in (None, [], 1)),
    ],
)
def test_a_field_has_its_type(field, value):
    refused(lambda: LibraConfig(**{field: value}), f"{field} ({value!r})", "must be")


def test_a_number_beyond_every_float_is_refused():
    refused(lambda: LibraConfig(plan_timeout_s=10**400), "plan_timeout_s", "try 300")


def test_a_scope_of_another_type_is_refused():
    refused(lambda: order(scope=["step"]), "scope (['step'])", "auto")


def test_a_large_size_is_refused_at_once():
    refused(lambda: order(data_parallel_size=2**31 - 1), "pool_size (2)", "try one of")
