"""Length tables on stand-ins of Megatron's datasets, by hand. The real ones: test_megatron."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from megatron_libra.data.lengths import LengthTable, length_table
from megatron_libra.data.rows import LengthRows
from megatron_libra.data.sidecar import build_sidecar, sidecar_path


class Documents:
    """A GPTDataset: documents of 5, 3, 9 and 2 tokens, in the order 2 0 1 3, cut every 6."""

    def __init__(self, sample_index: list[list[int]], **config: Any) -> None:
        self.config = SimpleNamespace(
            **{"sequence_length": 6, "inter_document_masking": True, **config}
        )
        self.dataset = SimpleNamespace(sequence_lengths=np.array([5, 3, 9, 2], np.int32))
        self.document_index: Any = np.array([2, 0, 1, 3], np.int32)
        self.sample_index: Any = np.array(sample_index, np.int32)
        self.shuffle_index: Any = np.arange(len(sample_index) - 1, dtype=np.uint32)

    def __len__(self) -> int:
        return len(self.shuffle_index)


# 9 5 3 2 in sequences of 6: 6 | 3 3 | 2 3 1, then 1 is left for the labels.
STARTS = [[0, 0], [0, 6], [1, 3], [3, 1]]


def all_lengths(table: LengthTable) -> list[tuple[int, ...]]:
    return [table.lengths(i) for i in range(len(table))]


def test_documents_by_hand() -> None:
    table = length_table(Documents(STARTS))
    assert isinstance(table, LengthTable)
    assert all_lengths(table) == [(6,), (3, 3), (2, 3, 1)]
    assert all(type(length) is int for length in table.lengths(2))


def test_the_shuffle_index_chooses_the_sequence() -> None:
    dataset = Documents(STARTS)
    dataset.shuffle_index = np.array([2, 0, 1], np.uint32)
    assert all_lengths(length_table(dataset)) == [(2, 3, 1), (6,), (3, 3)]


def test_a_document_that_only_lends_a_label_is_none() -> None:
    table = length_table(Documents([[0, 3], [1, 0], [2, 1]]))
    assert all_lengths(table) == [(6,), (5, 1)]


def test_padding_joins_the_last_document() -> None:
    table = length_table(Documents([[2, 0], [3, 1]]))
    assert all_lengths(table) == [(3, 3)]
    lent = length_table(Documents([[2, 0], [3, 0]]))
    assert all_lengths(lent) == [(6,)], "the document of the last label is none to pad"


def test_without_the_extra_token_a_sequence_may_end_with_a_document() -> None:
    dataset = Documents([[0, 3], [0, 9], [2, 1]], add_extra_token_to_sequence=False)
    assert all_lengths(length_table(dataset)) == [(6,), (5, 1)]


def test_an_empty_document_is_no_sample() -> None:
    dataset = Documents([[0, 3], [2, 0]])
    dataset.dataset.sequence_lengths = np.array([0, 3, 9, 2], np.int32)
    assert all_lengths(length_table(dataset)) == [(6,)]


def test_without_document_masking_attention_spans_the_sequence() -> None:
    table = length_table(Documents(STARTS, inter_document_masking=False))
    assert all_lengths(table) == [(6,), (6,), (6,)]
    with pytest.raises(IndexError):
        table.lengths(3)


@pytest.mark.parametrize("index", [-1, 3])
def test_a_sample_outside_is_an_error_and_does_not_wrap(index: int) -> None:
    with pytest.raises(IndexError, match=rf"sample {index} is outside \[0, 3\)"):
        length_table(Documents(STARTS)).lengths(index)


def test_deferred_indices_are_read_from_the_cache(tmp_path: Path) -> None:
    dataset = Documents(STARTS)
    for name in ("document_index", "sample_index", "shuffle_index"):
        np.save(tmp_path / f"{name}.npy", getattr(dataset, name))
        setattr(dataset, name, None)
        setattr(dataset, f"path_to_{name}", str(tmp_path / f"{name}.npy"))
    table = length_table(dataset)
    assert [table.lengths(i) for i in range(3)] == [(6,), (3, 3), (2, 3, 1)]
    assert dataset.shuffle_index is None, "the dataset itself is left alone"


def test_a_deferred_index_that_is_missing_is_named(tmp_path: Path) -> None:
    dataset = Documents(STARTS)
    dataset.shuffle_index = None
    dataset.path_to_shuffle_index = str(tmp_path / "none.npy")  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match="none.npy does not exist.*--dataloader-defer-npy-index-mmap"
    ):
        length_table(dataset).lengths(0)


class Blend:
    """A BlendedDataset of parts."""

    def __init__(self, parts: list[Any], choice: list[tuple[int, int]]) -> None:
        self.datasets = parts
        self.dataset_index: Any = np.array([part for part, _ in choice], np.int16)
        self.dataset_sample_index: Any = np.array([sample for _, sample in choice], np.int64)

    def __len__(self) -> int:
        return len(self.dataset_index)


def test_blends_may_be_nested() -> None:
    inner = Blend([Documents(STARTS), Documents([[2, 0], [3, 1]])], [(0, 2), (1, 0), (0, 0)])
    outer = Blend([inner, Documents(STARTS)], [(1, 1), (0, 0), (0, 1)])
    assert all_lengths(length_table(outer)) == [(3, 3), (2, 3, 1), (3, 3)]
    with pytest.raises(IndexError):
        length_table(outer).lengths(-1)


def test_a_deferred_blend(tmp_path: Path) -> None:
    blend = Blend([Documents(STARTS)], [(0, 2), (0, 0)])
    for name in ("dataset_index", "dataset_sample_index"):
        np.save(tmp_path / f"{name}.npy", getattr(blend, name))
        setattr(blend, name, None)
        setattr(blend, f"path_to_{name}", str(tmp_path / f"{name}.npy"))
    table = length_table(blend)
    assert [table.lengths(i) for i in range(2)] == [(2, 3, 1), (6,)]


class SFTDataset:
    """Named as Megatron's, with the lines of a jsonl."""

    def __init__(self, path: Path, num_lines: int, indices: list[int], num_samples: int) -> None:
        self.dataset_path = str(path)
        self.dataset = range(num_lines)
        self.indices = np.array(indices)
        self.num_samples = num_samples
        self.config = SimpleNamespace(sequence_length=8, context_parallel_size=None)

    def __len__(self) -> int:
        return self.num_samples


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    path = tmp_path / "chat.jsonl"
    path.write_text('{"text": "abc"}\n{"messages": [{"role": "system", "content": "abcd"}, '
                    '{"role": "system", "content": "ef"}]}\n')  # fmt: skip
    build_sidecar(path, tokenizer="byte")
    return path


def test_sft_lines_come_from_the_sidecar(chat: Path) -> None:
    table = length_table(SFTDataset(chat, 2, [1, 0], 3))
    assert all_lengths(table) == [(4, 4), (8,), (4, 4)]
    elsewhere = chat.parent / "moved.npz"
    sidecar_path(chat).rename(elsewhere)
    table = length_table(SFTDataset(chat, 2, [1, 0], 3), sidecar=elsewhere)
    assert table.lengths(0) == (4, 4)


def test_sft_padding_follows_the_context_parallel_size(chat: Path) -> None:
    dataset = SFTDataset(chat, 2, [0, 1], 2)
    dataset.config.context_parallel_size = 3
    assert length_table(dataset).lengths(1) == (6, 2)


def test_a_sidecar_of_other_lines_is_refused(chat: Path) -> None:
    with pytest.raises(ValueError, match="has 2 lines, the dataset has 3; they must agree"):
        length_table(SFTDataset(chat, 3, [0, 1, 2], 3))
    sidecar_path(chat).unlink()
    with pytest.raises(ValueError, match="does not exist.*libra lengths"):
        length_table(SFTDataset(chat, 2, [0, 1], 2))


def test_a_dataset_that_cuts_documents_in_its_own_way_is_refused() -> None:
    class Mine(Documents):
        def _query_document_sample_shuffle_indices(self, index: int) -> None:
            """Whatever this does, the index arrays do not tell."""

    with pytest.raises(ValueError, match="Mine cuts documents in its own way.*a method lengths"):
        length_table(Mine(STARTS))


def test_a_table_is_its_own_table() -> None:
    rows = LengthRows.from_rows([[1]])
    assert length_table(rows) is rows


def test_an_unknown_dataset_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match="list has no index arrays.*a method lengths"):
        length_table([1, 2])
