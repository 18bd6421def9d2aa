"""The pools of every method, and the bounds that the design states for perfect balance."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.corpora import packed_corpus
from megatron_libra.data.rows import LengthRows
from megatron_libra.replay.methods import METHODS, bound_of, methods_of, pools_of
from megatron_libra.simulator.job import PRESET_JOBS, TrainingJob

JOB = TrainingJob(
    seq_length=64,
    context_parallel_size=2,
    data_parallel_size=4,
    global_batch_size=8,
    shape=AttentionShape(query_heads=4, kv_heads=2, head_dim=8),
)
BASE = LibraConfig(pool_size=2, block_size=8, head_split=2)
WINDOW = LengthRows.from_rows([[64], [8] * 8, [8] * 8, [64], *[[4] * 16] * 4])


def pools(name: str, job: TrainingJob = JOB, window: LengthRows = WINDOW):
    (method,) = methods_of([name], job, BASE)
    return pools_of(method, window, job, 7)


@pytest.mark.parametrize("name", METHODS)
def test_every_document_is_in_one_pool(name):
    found = pools(name)
    documents = Counter(length for task in found for row in task.sequences for length in row)
    assert documents == Counter(WINDOW.flat.tolist())
    assert {task.window for task in found} == {7}
    assert sum(len(task.sequences) for task in found) == 8


@pytest.mark.parametrize(
    ("name", "size"), [("ulysses", 1), ("wlb", 1), ("distca", 4), ("tap", 2), ("libra", 2)]
)
def test_pools_have_the_methods_size_and_run_by_microbatch(name, size):
    found = pools(name)
    assert {len(task.sequences) for task in found} == {size}
    count = 4 // size
    expected = [(ga, number) for ga in range(2) for number in range(count)]
    assert [(task.microbatch, task.pool) for task in found] == expected


def test_the_samplers_order_is_kept_without_vrsp_and_balanced_with_it():
    given = [task.sequences for task in pools("tap")]
    assert given == [(tuple(WINDOW.lengths(i)), tuple(WINDOW.lengths(i + 1))) for i in (0, 2, 4, 6)]
    work = [sum(x * x for row in task.sequences for x in row) for task in pools("tap_vrsp")]
    assert sorted(work) == [512 + 256, 512 + 256, 4096 + 256, 4096 + 256]


def test_repacking_spreads_work_and_puts_outliers_into_one_microbatch():
    found = pools("wlb")
    work = np.array([sum(x * x for x in task.sequences[0]) for task in found])
    assert (np.diff(work) <= 0).all()
    assert work[:2].tolist() == [4096, 4096], "no packing divides a document"
    assert work[2:].max() <= 512
    assert all(task.seq_length % 4 == 0 for task in found)
    assert all(sum(task.sequences[0]) <= 80 for task in found)


@pytest.mark.parametrize("name", METHODS)
def test_every_pool_can_be_planned(name):
    for task in pools(name):
        plan = task.plan()
        assert plan.loads.sum() == plan.heads.head_split * sum(
            x * (x + 1) // 2 for row in task.sequences for x in row
        )


def test_libra_may_take_another_scope():
    (libra,) = methods_of(["libra"], JOB, BASE, scope="step")
    (ulysses,) = methods_of(["ulysses"], JOB, BASE, scope="step")
    assert (libra.scope, ulysses.scope) == ("step", "off")


def test_faults():
    with pytest.raises(ValueError, match="'ring' must be one of ulysses, wlb"):
        methods_of(["ring"], JOB, BASE)
    with pytest.raises(ValueError, match=r"scope \('off'\) must be one of microbatch, step"):
        methods_of(["libra"], JOB, BASE, scope="off")
    with pytest.raises(ValueError, match=r"pool_size \(3\) must divide .* try one of \[1, 2, 4\]"):
        methods_of(["libra"], JOB, replace(BASE, pool_size=3))


@pytest.mark.parametrize(
    ("name", "count", "mean", "worst"),
    [("longtail-256k", 1280, 5.67, 6.43), ("longtail-1m", 1280, 3.69, 3.93)],
)
def test_perfect_balance_gives_the_stated_bounds(name, count, mean, worst):
    """Of each window, then the mean over windows; three seeds."""
    job = PRESET_JOBS[name]
    (libra,) = methods_of(["libra"], job, replace(BASE, pool_size=8))
    size = job.global_batch_size
    bounds = []
    for seed in range(3):
        rows = packed_corpus(name, num_sequences=count, seed=seed)
        bounds += [
            bound_of(rows.take(np.arange(at, at + size)), job, libra)
            for at in range(0, count, size)
        ]
    assert np.mean(bounds, axis=0).tolist() == pytest.approx([mean, worst], rel=0.025)
