"""Corpora from files and presets, and the candidates of a job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.data.sidecar import build_sidecar
from megatron_libra.plan.heads import fit_chunks
from megatron_libra.simulator.candidates import Candidate, Grid, references
from megatron_libra.simulator.corpus import Corpus, CorpusRequest, LengthHistogram, load_corpus
from megatron_libra.simulator.job import PRESET_JOBS, TrainingJob
from megatron_libra.simulator.processes import TaskPool


def load(source: object, *, seq_length: int = 8, **changes: object) -> Corpus:
    request = CorpusRequest(source=str(source), **changes)  # type: ignore[arg-type]
    return load_corpus(request, seq_length=seq_length, global_batch_size=2, context_parallel_size=2)


def write(path: Path, value: object) -> Path:
    path.write_text(json.dumps(value))
    return path


@pytest.mark.parametrize(
    ("pack", "rows"),
    [
        ("cut", [(5, 3), (1, 3, 2)]),
        ("greedy", [(5,), (4, 3), (2,)]),
        ("best_fit", [(5, 3), (4, 2)]),
    ],
)
def test_documents_are_packed_as_asked(tmp_path: Path, pack: str, rows: object) -> None:
    path = write(tmp_path / "documents.json", [5, 4, 3, 2])
    corpus = load(path, pack=pack, shuffle=False)
    assert list(corpus.rows) == rows
    assert corpus.packing == f"documents packed by {pack}, in the file's order"


def test_a_shuffle_keeps_every_document(tmp_path: Path) -> None:
    path = tmp_path / "documents.npy"
    np.save(path, np.arange(1, 8))
    one, other = load(path, pack="greedy", seed=1), load(path, pack="greedy", seed=2)
    assert sorted(one.rows.flat) == sorted(other.rows.flat) == list(range(1, 8))
    assert list(one.rows) != list(other.rows)
    assert list(one.rows) == list(load(path, pack="greedy", seed=1).rows)


def test_packed_sequences_keep_their_order(tmp_path: Path) -> None:
    rows = [[3, 5], [8], [1, 1]]
    path = write(tmp_path / "packs.json", rows)
    corpus = load(path)
    assert list(corpus.rows) == [tuple(row) for row in rows]
    assert corpus.num_windows(2) == 1
    assert list(corpus.window(0, 2)) == [(3, 5), (8,)]
    # A packer that is asked for packs the samples anew; none takes single lengths as sequences.
    assert list(load(path, pack="best_fit", shuffle=False).rows) == [(8,), (3, 5), (1, 1)]
    singles = load(write(tmp_path / "singles.json", [3, 8]), pack="none")
    assert list(singles.rows) == [(3,), (8,)]


def test_chat_lines_are_folded_for_cp(tmp_path: Path) -> None:
    """CP 2 pads conversations to a multiple of 4; the last one takes what is left of 16."""
    path = tmp_path / "chat.jsonl"
    lines = [{"messages": [{"role": "user", "content": "abc"}]}, {"messages": []}]
    path.write_text("\n".join(map(json.dumps, lines)))
    counted = tmp_path / "count.py"
    counted.write_text("def tokens(line): return [1] * 5")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(tmp_path))
        build_sidecar(path, tokenizer="count:tokens")
    assert all(sum(row) == 16 for row in load(path, seq_length=16).rows)


@pytest.mark.parametrize(
    ("value", "pack", "message"),
    [
        ([[9, 0]], "auto", "the longest packed sequence has 9 tokens, seq_length is 8"),
        ([0, 0], "auto", "holds no sample with tokens"),
        ([1, 9], "best_fit", "bad.json: document 1 has 9 tokens, more than seq_length (8)"),
        ({"a": 1}, "auto", "must be a list"),
    ],
)
def test_bad_files_are_named(tmp_path: Path, value: object, pack: str, message: str) -> None:
    path = write(tmp_path / "bad.json", value)
    with pytest.raises(ValueError) as error:
        load(path, pack=pack)
    assert message in str(error.value)


def test_unknown_sources_and_packers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="neither a file nor a preset"):
        load("longtail-2m")
    with pytest.raises(ValueError, match=r"pack \('first'\) must be one of auto, none, cut"):
        load(write(tmp_path / "a.json", [1, 2]), pack="first")
    with pytest.raises(ValueError, match="must be 262144 for longtail-256k"):
        load("longtail-256k")
    with pytest.raises(ValueError, match="longtail-1m is packed by best-fit"):
        load("longtail-1m", pack="cut")


def test_processes_pack_the_same(tmp_path: Path) -> None:
    path = tmp_path / "many.npy"
    np.save(path, np.random.default_rng(0).integers(1, 60, 45_000))
    request = CorpusRequest(source=str(path), pack="best_fit")
    sizes = {"seq_length": 64, "global_batch_size": 2, "context_parallel_size": 1}
    here = load_corpus(request, **sizes)
    with TaskPool(2) as tasks:
        there = load_corpus(request, **sizes, map_parts=tasks.run)
    assert (here.rows.flat == there.rows.flat).all()
    assert (here.rows.offsets == there.rows.offsets).all()


def test_a_corpus_shorter_than_a_step_is_refused(corpus: Corpus) -> None:
    assert corpus.num_windows(8) == 3
    with pytest.raises(ValueError, match="24 packed sequences, fewer than global_batch_size"):
        corpus.num_windows(25)


def test_histogram_by_hand() -> None:
    histogram = LengthHistogram.of(np.array([1, 1, 0, 16]), 16)
    assert histogram.samples.sum() == 3 and histogram.samples[0] == 2
    assert (histogram.tokens.sum(), histogram.work.sum()) == (18, 258)
    assert histogram.samples[-1] == 1 and histogram.edges[-1] == 17


def test_default_grid_of_a_preset() -> None:
    job = PRESET_JOBS["longtail-256k"]
    found = Grid().candidates(job, LibraConfig())
    assert {c.pool_size for c in found} == {1, 2, 4, 8, 16, 32}
    assert {c.block_size for c in found} == {2048, 4096, 8192}
    assert {c.head_split for c in found} == {1, 2, 4, 8}
    assert {c.scope for c in found} == {"microbatch", "step"}
    assert len(found) == len(set(found)) == 6 * 3 * 4 * 2


@pytest.mark.parametrize(
    ("changes", "scopes"),
    [
        ({}, {"microbatch", "step"}),
        ({"pipeline_parallel_size": 2}, {"microbatch", "pipeline"}),
        ({"lockstep": True}, {"microbatch"}),
        ({"data_parallel_size": 8}, {"microbatch"}),
    ],
)
def test_scopes_that_a_job_can_use(
    job: TrainingJob, changes: dict[str, int], scopes: set[str]
) -> None:
    found = Grid(pool_sizes=(2,)).candidates(replace(job, **changes), LibraConfig())
    assert {candidate.scope for candidate in found} == scopes


def test_chunks_fit_each_head_split(job: TrainingJob) -> None:
    """4 query heads: H = 1 takes M = 4, H = 2 takes 2, H = 4 takes 1."""
    found = Grid(pool_sizes=(2,), block_sizes=(8,)).candidates(job, LibraConfig(chunks=4))
    assert {(c.head_split, c.chunks) for c in found} == {(1, 4), (2, 2), (4, 1)}
    odd = AttentionShape(query_heads=12, kv_heads=4, head_dim=8)
    assert [fit_chunks(odd, 2, m) for m in (1, 2, 3, 5, 6)] == [1, 2, 2, 2, 6]


def test_references(job: TrainingJob) -> None:
    found = references(job, LibraConfig())
    assert list(found) == ["ulysses", "home"]
    assert found["ulysses"] == Candidate(1, 16, 2, 2, "off", "ulysses")
    three = replace(job, context_parallel_size=3, seq_length=66)
    assert list(references(three, LibraConfig())) == ["home"]


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (Grid(pool_sizes=(3,)), "pool_size (3) must divide data_parallel_size (4)"),
        (Grid(block_sizes=(0,)), "block_size (0) must be at least 1"),
        (Grid(head_splits=(3,)), "head_split (3) must divide query_heads (4)"),
        (Grid(scopes=("week",)), "scope ('week') must be one of off, microbatch, step, pipeline"),
        (Grid(scopes=("off",)), "scope off keeps the sampler's order"),
        (Grid(placers=("best",)), "placer ('best') must be one of"),
    ],
)
def test_bad_grids_are_named(job: TrainingJob, grid: Grid, message: str) -> None:
    with pytest.raises(ValueError) as error:
        grid.candidates(job, LibraConfig())
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data_parallel_size": 3}, "must divide global_batch_size (8)"),
        ({"seq_length": 66}, "must be a multiple of 2 * context_parallel_size (4)"),
        ({"num_layers": 0}, "num_layers (0) must be at least 1"),
        ({"other_ms": -1.0}, "other_ms (-1.0) must be at least 0"),
        ({"other_ms": float("nan")}, "other_ms (nan) must be at least 0"),
    ],
)
def test_bad_jobs_are_named(job: TrainingJob, changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(job, **changes)
    assert message in str(error.value)
