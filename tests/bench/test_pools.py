"""Pools of presets and of files: packing, seeds, DistCA's preset, faults."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from megatron_libra.bench.pools import FILE_JOB, file_set, load_pools, preset_set, upsample
from megatron_libra.plan.vrsp import attention_work

SMALL = replace(
    FILE_JOB, seq_length=64, context_parallel_size=2, data_parallel_size=2, global_batch_size=2
)


def small_set(tmp_path, lengths):
    path = tmp_path / "documents.json"
    path.write_text(json.dumps(lengths))
    return replace(file_set(path, job=SMALL), seeds=(0, 1))


def test_documents_are_shuffled_joined_and_cut(tmp_path):
    lengths = list(range(1, 40))
    pools = load_pools(small_set(tmp_path, lengths))
    assert [len(pool.sequences) for pool in pools] == [2, 2]
    shuffled = np.random.default_rng(1).permutation(lengths).tolist()
    joined = [length for row in pools[1].sequences for length in row]
    first = pools[1].sequences[0]
    assert list(first[:-1]) == shuffled[: len(first) - 1]
    assert all(sum(row) == 64 for row in pools[1].sequences)
    assert sum(joined) == 128


def test_packed_sequences_stay_as_they_are(tmp_path):
    rows = [[30, 2], [64], [5, 5, 5]]
    pools = load_pools(small_set(tmp_path, rows))
    assert all(list(row) in rows for pool in pools for row in pool.sequences)


def test_the_distca_preset():
    lengths = np.array([100] * 1000 + [70_001] * 3)
    found = upsample(lengths, np.random.default_rng(0))
    assert (found == 280_000).sum() == 6, "long documents twice, 4 times as long, by 16"
    assert 850 < (found == 400).sum() < 950, "a tenth of the others is dropped"
    assert set(found.tolist()) == {400, 280_000}


def test_presets_give_whole_steps():
    bench_set = replace(preset_set("longtail-1m"), seeds=(3,))
    pools = load_pools(bench_set)
    assert len(pools) == 4 and {pool.num_workers for pool in pools} == {128}
    work = [sum(map(attention_work, pool.sequences)) for pool in pools]
    assert max(work) * 4 / sum(work) < 1.05, "pools after Algorithm 1"


def test_faults(tmp_path):
    with pytest.raises(ValueError, match="corpus 'x' must be one of longtail-256k, longtail-1m"):
        preset_set("x")
    with pytest.raises(ValueError, match="gives 1 sequences of 64 tokens; a pool needs 2"):
        load_pools(small_set(tmp_path, [10, 20]))
    with pytest.raises(ValueError, match="longest packed sequence has 70 tokens"):
        load_pools(small_set(tmp_path, [[70], [3, 4]]))
