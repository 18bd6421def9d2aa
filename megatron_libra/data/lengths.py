"""Sample lengths of a packed sequence from index arrays alone; no token is read.

In: a Megatron dataset (GPTDataset, BlendedDataset, SFTDataset; told by their attributes, Megatron
itself is not imported). Out: a LengthTable, equal to the cu_seqlens that the dataset would return.
"""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from megatron_libra.data.conversations import ConversationLengths
from megatron_libra.data.sidecar import load_sidecar, sidecar_path

__all__ = [
    "BlendedLengths",
    "DocumentLengths",
    "LengthTable",
    "WholeSequenceLengths",
    "length_table",
]


@runtime_checkable
class LengthTable(Protocol):
    """What the sampler and the planner ask of a dataset. A dataset of your own may implement it."""

    def __len__(self) -> int:
        """Packed sequences in the dataset."""

    def lengths(self, sample_index: int) -> tuple[int, ...]:
        """Sample lengths in tokens, in token order, of the packed sequence `dataset[sample_index]`.

        Positive; their sum is at most seq_length, and tokens behind them are padding.
        """


def length_table(dataset: Any, *, sidecar: Path | None = None) -> LengthTable:
    """The length table of a dataset, whatever kind it is.

    Args:
        dataset: GPTDataset (MockGPTDataset too), BlendedDataset of any of these, SFTDataset, or an
            object that is a LengthTable itself.
        sidecar: file of lengths of an SFTDataset's jsonl; default: beside it.

    Raises:
        ValueError: the dataset's kind is unknown, or its sidecar is missing or stale.
    """
    if isinstance(dataset, LengthTable):
        return dataset
    if hasattr(dataset, "dataset_sample_index"):
        return BlendedLengths(dataset)
    if hasattr(dataset, "shuffle_index"):
        return _gpt_lengths(dataset)
    if any(kind.__name__ == "SFTDataset" for kind in type(dataset).__mro__):
        return _sft_lengths(dataset, sidecar)
    raise _unknown(dataset, "has no index arrays to read lengths from")


class DocumentLengths:
    """Documents of a GPTDataset with --dataloader-inter-document-masking."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._seq_length = int(dataset.config.sequence_length)
        self._has_extra_token = bool(getattr(dataset.config, "add_extra_token_to_sequence", True))

    def __len__(self) -> int:
        return len(self._dataset)

    def lengths(self, sample_index: int) -> tuple[int, ...]:
        """As LengthTable. Microseconds: two rows of the sample index and a slice of lengths."""
        _check_index(sample_index, self._shuffle_index.size)
        row = int(self._shuffle_index[sample_index])
        (first, first_offset), (last, last_offset) = self._sample_index[row : row + 2].tolist()
        if first == last:
            parts = [last_offset - first_offset]
        else:
            documents = self._document_index[first : last + 1]
            parts = self._dataset.dataset.sequence_lengths[documents].tolist()
            parts[0] -= first_offset
            parts[-1] = last_offset  # what the next sequence does not start with
        return self._close(parts)

    def _close(self, parts: list[int]) -> tuple[int, ...]:
        """Megatron's end of a sequence: padding joins the last document; no document is empty."""
        if self._has_extra_token and len(parts) > 1 and parts[-1] == 0:
            parts.pop()  # it only lent its first token to the shifted labels
        parts[-1] += max(0, self._seq_length - sum(parts))
        return tuple(part for part in parts if part)

    # With --dataloader-defer-npy-index-mmap the arrays are None until Megatron reads a sample.
    @cached_property
    def _shuffle_index(self) -> NDArray[np.integer]:
        return _index_array(self._dataset, "shuffle_index")

    @cached_property
    def _sample_index(self) -> NDArray[np.integer]:
        return _index_array(self._dataset, "sample_index")

    @cached_property
    def _document_index(self) -> NDArray[np.integer]:
        return _index_array(self._dataset, "document_index")


class WholeSequenceLengths:
    """A GPTDataset whose attention spans all tokens: each packed sequence is one sample."""

    def __init__(self, dataset: Any) -> None:
        self._num_samples = len(dataset)
        self._lengths = (int(dataset.config.sequence_length),)

    def __len__(self) -> int:
        return self._num_samples

    def lengths(self, sample_index: int) -> tuple[int, ...]:
        """As LengthTable: always (seq_length,)."""
        _check_index(sample_index, self._num_samples)
        return self._lengths


class BlendedLengths:
    """A BlendedDataset: each sample's lengths come from the table of its part."""

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._tables = tuple(length_table(part) for part in dataset.datasets)

    def __len__(self) -> int:
        return len(self._dataset)

    def lengths(self, sample_index: int) -> tuple[int, ...]:
        """As LengthTable."""
        _check_index(sample_index, self._dataset_index.size)
        table = self._tables[int(self._dataset_index[sample_index])]
        return table.lengths(int(self._dataset_sample_index[sample_index]))

    @cached_property
    def _dataset_index(self) -> NDArray[np.integer]:
        return _index_array(self._dataset, "dataset_index")

    @cached_property
    def _dataset_sample_index(self) -> NDArray[np.integer]:
        return _index_array(self._dataset, "dataset_sample_index")


def _gpt_lengths(dataset: Any) -> LengthTable:
    """By the class that cuts the dataset's tokens into documents."""
    cut = "_query_document_sample_shuffle_indices"
    owner = next((kind.__name__ for kind in type(dataset).__mro__ if cut in vars(kind)), None)
    if owner not in (None, "GPTDataset", "GPTFIMDataset"):
        raise _unknown(dataset, "cuts documents in its own way")
    masked = getattr(dataset.config, "inter_document_masking", True)
    # Fill-in-the-middle permutes a sequence as a whole and reports it as one document.
    if owner == "GPTFIMDataset" or not masked:
        return WholeSequenceLengths(dataset)
    return DocumentLengths(dataset)


def _unknown(dataset: Any, reason: str) -> ValueError:
    return ValueError(
        f"{type(dataset).__name__} {reason}; use GPTDataset, BlendedDataset or SFTDataset, or give "
        "it a method lengths(sample_index) that returns a tuple of tokens."
    )


def _sft_lengths(dataset: Any, sidecar: Path | None) -> ConversationLengths:
    """Conversations of an SFTDataset; its jsonl must be the one its sidecar was built from."""
    source = Path(dataset.dataset_path)
    rows = load_sidecar(sidecar or sidecar_path(source), source=source)
    if len(rows) != len(dataset.dataset):
        raise ValueError(
            f"{sidecar or sidecar_path(source)} has {len(rows)} lines, the dataset has "
            f"{len(dataset.dataset)}; they must agree; build it again: libra lengths {source}."
        )
    return ConversationLengths(
        rows,
        line_index=dataset.indices,
        num_samples=len(dataset),
        seq_length=dataset.config.sequence_length,
        context_parallel_size=dataset.config.context_parallel_size or 1,
    )


def _index_array(dataset: Any, name: str) -> NDArray[np.integer]:
    array = getattr(dataset, name)
    if array is not None:
        return np.asarray(array)
    path = Path(getattr(dataset, f"path_to_{name}"))
    if not path.is_file():
        raise ValueError(
            f"{path} does not exist; a deferred index must be in the cache before training; run "
            "once without --dataloader-defer-npy-index-mmap."
        )
    return np.asarray(np.load(path, mmap_mode="r"))


def _check_index(sample_index: int, num_samples: int) -> None:
    """NumPy would take a negative index from the end: a wrong sequence without an error."""
    if not 0 <= sample_index < num_samples:
        raise IndexError(f"sample {sample_index} is outside [0, {num_samples}).")
