"""Megatron's own datasets, samplers and calculator as the oracle.

Lengths equal the cu_seqlens of every sample of real .bin/.idx corpora; the order without VRSP
equals Megatron's, and with it every step keeps Megatron's samples.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("megatron.training")

import torch
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.utils import Split
from megatron.core.num_microbatches_calculator import StepBatchsizeNumMicroBatchesCalculator
from megatron.training.datasets.data_samplers import (
    MegatronFullValidationSampler,
    MegatronPretrainingSampler,
)
from megatron.training.datasets.fim_dataset import GPTFIMDataset, GPTFIMDatasetConfig
from megatron.training.datasets.sft_dataset import SFTDataset
from megatron.training.training import cyclic_iter

from megatron_libra.data.files import read_lengths
from megatron_libra.data.lengths import length_table
from megatron_libra.data.rows import LengthRows
from megatron_libra.data.sampler import LibraSampler, ReplicaLayout
from megatron_libra.data.schedule import parse_step_batch_size
from megatron_libra.data.sidecar import build_sidecar

pytestmark = pytest.mark.filterwarnings(
    "ignore:__array__ implementation:DeprecationWarning", "ignore:Could not determine rank"
)
SEQ_LENGTH = 256


class Tokenizer:
    """What a dataset asks of a tokenizer; a conversation has a token for each letter."""

    vocab_size = 1000
    eod = 0
    pad = 1
    unique_identifiers = {"class": "test"}
    _tokenizer = SimpleNamespace(tokens_to_ids=lambda tokens: [999] * len(tokens))

    def tokenize_conversation(
        self, conversation: list[dict[str, str]], *, return_target: bool, **_: Any
    ) -> tuple[Any, Any]:
        assert return_target
        tokens = torch.tensor([ord(c) for message in conversation for c in message["content"]])
        return tokens, tokens


def write_corpus(prefix: Path, lengths: list[int]) -> str:
    builder = IndexedDatasetBuilder(f"{prefix}.bin", dtype=np.uint16)
    for length in lengths:
        builder.add_document(torch.arange(length) % 900 + 2, [length])
    builder.finalize(f"{prefix}.idx")
    return str(prefix)


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[str, list[int]]]:
    """A long tail, documents that meet the ends of sequences, tiny ones, and single tokens."""
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(0)
    lengths = {
        "tail": np.minimum(rng.lognormal(4, 1.3, 600).astype(int) + 1, 2000).tolist(),
        "even": [SEQ_LENGTH, SEQ_LENGTH // 2, SEQ_LENGTH // 2, SEQ_LENGTH + 1, 1] * 30,
        "tiny": rng.integers(1, 4, 6000).tolist(),
        "ones": [1] * 1000,
    }
    prefixes = {name: write_corpus(folder / name, lengths[name]) for name in lengths}
    return lambda name: (prefixes[name], lengths[name])


def config_of(
    cache: Path, blend: Any, kind: Any = GPTDatasetConfig, **options: Any
) -> GPTDatasetConfig:
    defaults = {
        "random_seed": 1,
        "sequence_length": SEQ_LENGTH,
        "blend": blend,
        "split": "80,20,0",
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
        "tokenizer": Tokenizer(),
        "path_to_cache": str(cache),
        "inter_document_masking": True,
    }
    return kind(**{**defaults, **options})


def build(cache: Path, blend: Any, sizes: list[int | None], **options: Any) -> list[Any]:
    """Train and validation datasets."""
    config = config_of(cache, blend, **options)
    kind = MockGPTDataset if blend is None else GPTDataset
    return BlendedMegatronDatasetBuilder(kind, sizes, lambda: True, config).build()[:2]


def cu_lengths(sample: dict[str, Any]) -> tuple[int, ...]:
    """Differences of cu_seqlens without its fillers."""
    return tuple(n for n in np.diff(sample["cu_seqlens"].numpy()).tolist() if n)


def assert_equal_lengths(dataset: Any, limit: int | None = None) -> None:
    table = length_table(dataset)
    assert len(table) == len(dataset) > 0
    for index in range(len(dataset))[:limit]:
        assert table.lengths(index) == cu_lengths(dataset[index]), index


@pytest.mark.parametrize("name", ["tail", "even", "tiny"])
@pytest.mark.parametrize("options", [{}, {"add_extra_token_to_sequence": False}])
def test_documents(corpora: Any, tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    """More than one epoch of training samples, and the validation split."""
    prefix, lengths = corpora(name)
    epoch = sum(lengths) // SEQ_LENGTH
    for dataset in build(tmp_path, ([prefix], None), [2 * epoch, 10, 0], **options):
        assert type(dataset) is GPTDataset
        assert_equal_lengths(dataset)


@pytest.mark.parametrize("name", ["tail", "ones"])
def test_a_padded_last_validation_sequence(corpora: Any, tmp_path: Path, name: str) -> None:
    prefix, _ = corpora(name)
    options = {"drop_last_partial_validation_sequence": False}
    _, dataset = build(tmp_path, ([prefix], None), [3, None, 0], **options)
    assert_equal_lengths(dataset)
    padded = [i for i in range(len(dataset)) if (dataset[i]["loss_mask"] == 0).any()]
    assert padded, "the case is about a sequence with padding"


def test_blend(corpora: Any, tmp_path: Path) -> None:
    prefixes = [corpora(name)[0] for name in ("tail", "even", "tiny")]
    for dataset in build(tmp_path, (prefixes, [0.5, 0.2, 0.3]), [150, 20, 0]):
        assert len(dataset.datasets) == 3
        assert_equal_lengths(dataset)


def test_deferred_indices(corpora: Any, tmp_path: Path) -> None:
    prefixes = [corpora(name)[0] for name in ("tail", "even")]
    blend = (prefixes, [0.5, 0.5])
    expected, _ = build(tmp_path, blend, [100, 10, 0])
    dataset, _ = build(tmp_path, blend, [100, 10, 0], defer_npy_index_mmap=True)
    assert dataset.dataset_index is None
    table, reference = length_table(dataset), length_table(expected)
    assert len(table) == len(reference) == 100
    assert [table.lengths(i) for i in range(100)] == [reference.lengths(i) for i in range(100)]


def test_mock_data(tmp_path: Path) -> None:
    dataset, _ = build(tmp_path, None, [20, 4, 0], sequence_length=8192)
    assert type(dataset) is MockGPTDataset
    assert_equal_lengths(dataset, limit=20)


def test_fill_in_the_middle(corpora: Any, tmp_path: Path) -> None:
    names = ("rate", "spm_rate", "fragment_rate", "split_sample", "no_prefix")
    tokens = dict.fromkeys(("prefix", "middle", "suffix", "pad", "eod"), "x")
    config = config_of(
        tmp_path,
        ([corpora("tail")[0]], None),
        GPTFIMDatasetConfig,
        **dict.fromkeys((f"fim_{name}" for name in names), 0),
        fim_extra_tokens=tokens,
    )
    builder = BlendedMegatronDatasetBuilder(GPTFIMDataset, [30, 4, 0], lambda: True, config)
    assert_equal_lengths(builder.build()[0])


def test_idx_files_are_read_without_megatron(corpora: Any) -> None:
    prefix, lengths = corpora("tail")
    assert read_lengths(Path(f"{prefix}.idx")).flat.tolist() == lengths


@pytest.mark.parametrize("context_parallel_size", [1, 2])
def test_sft(tmp_path: Path, context_parallel_size: int) -> None:
    rng = np.random.default_rng(0)
    lines = []
    for _ in range(40):
        sizes = rng.integers(1, 40, rng.integers(1, 6)).tolist()
        roles = ["system", *rng.choice(["system", "user", "assistant"], len(sizes))]
        lines.append([{"role": r, "content": "x" * n} for r, n in zip(roles, sizes, strict=False)])
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps({"messages": line}) + "\n" for line in lines))
    build_sidecar(path, tokenizer="byte")
    config = config_of(
        tmp_path, None, sequence_length=96, context_parallel_size=context_parallel_size
    )
    indices = rng.permutation(40)[:30]
    dataset = SFTDataset(lines, str(path), indices, 70, Split.train, config)  # type: ignore[arg-type]
    assert_equal_lengths(dataset)


def table_of(num_samples: int) -> LengthRows:
    return LengthRows.from_flat(np.random.default_rng(0).integers(1, 500, num_samples))


@pytest.mark.parametrize(("num_samples", "consumed", "size"), [(37, 0, 4), (64, 20, 4), (50, 7, 2)])
@pytest.mark.parametrize("scope", ["off", "microbatch", "step"])
def test_pretraining_order(num_samples: int, consumed: int, size: int, scope: Any) -> None:
    """Without VRSP batch for batch; with it step for step, as multisets."""
    layout = ReplicaLayout(data_parallel_size=size, pool_size=2, scope=scope)
    ours, theirs = (
        [
            list(
                LibraSampler(
                    table_of(num_samples),
                    layout,
                    data_parallel_rank=rank,
                    batch_size=4 * size,
                    consumed_samples=consumed,
                )
                if is_ours
                else MegatronPretrainingSampler(num_samples, consumed, 1, rank, size)
            )
            for rank in range(size)
        ]
        for is_ours in (True, False)
    )
    if scope == "off":
        assert ours == theirs
    else:
        assert ours != theirs
        assert steps_of(ours, 4) == steps_of(theirs, 4)


def steps_of(ranks: list[list[list[int]]], num_microbatches: int) -> list[list[int]]:
    """Sorted samples of each step."""
    passes = [sum(batches, []) for batches in zip(*ranks, strict=True)]
    return [
        sorted(sum(passes[at : at + num_microbatches], []))
        for at in range(0, len(passes), num_microbatches)
    ]


@pytest.mark.parametrize("num_samples", [4, 6, 11, 12])
def test_full_validation_order(num_samples: int) -> None:
    """Megatron cycles each rank until all have done as many batches as the longest."""
    layout = ReplicaLayout(data_parallel_size=4, pool_size=2, scope="off")
    theirs = [MegatronFullValidationSampler(num_samples, rank, 4) for rank in range(4)]
    iterations = max(map(len, theirs))
    for rank, sampler in enumerate(theirs):
        ours = LibraSampler(
            table_of(num_samples), layout, data_parallel_rank=rank, batch_size=4, tail="reuse"
        )
        cycled: Iterator[list[int]] = cyclic_iter(sampler)
        assert list(ours) == list(islice(cycled, iterations))


@pytest.mark.parametrize("seq_length", [None, 4096])
def test_batch_size_schedule(seq_length: int | None) -> None:
    text = "0:8 1.5M:16, 2M:24"
    theirs = StepBatchsizeNumMicroBatchesCalculator(1, 4, False, 1, text, seq_length)
    ours = parse_step_batch_size(text, seq_length=seq_length)
    unit = 4096 // (seq_length or 1)
    for consumed in [*range(0, 3000, 7), 366, 367, 488, 489]:
        theirs.update(consumed * unit, consistency_check=True)
        assert ours(consumed * unit) == theirs.get_current_global_batch_size()


def test_a_torch_loader_takes_the_sampler(corpora: Any, tmp_path: Path) -> None:
    """As Megatron builds its loader: batch_sampler of one replica, default collate."""
    dataset, _ = build(tmp_path, ([corpora("tail")[0]], None), [32, 4, 0])
    layout = ReplicaLayout(data_parallel_size=2, pool_size=2)
    sampler = LibraSampler(length_table(dataset), layout, data_parallel_rank=1, batch_size=8)
    loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler, num_workers=0)
    for batch, microbatch in zip(loader, sampler.microbatches(), strict=True):
        one = {name: value[0] for name, value in batch.items()}
        assert cu_lengths(one) == microbatch.sequences[microbatch.pool.index(microbatch.sample)]
