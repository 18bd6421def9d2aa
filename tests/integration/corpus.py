"""A small Megatron corpus. In: a directory. Out: the prefix of its .bin and .idx files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

VOCABULARY = 64
EOD = VOCABULARY - 1
LONGEST = 300


def build_corpus(
    directory: Path, *, num_documents: int = 1500, seed: int = 7, empty_every: int | None = None
) -> str:
    """Documents with a long tail, odd lengths and a few of one token, some longer than a sequence.

    Tokens depend on their predecessor, so that a model has something to learn and a wrong attention
    or position shows in the loss. Of each empty_every documents one has no tokens.
    """
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    rng = np.random.default_rng(seed)
    prefix = str(directory / "corpus")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.int32)
    for number in range(num_documents):
        length = int(np.clip(rng.lognormal(3.2, 1.1), 1, LONGEST))
        step, start = rng.integers(1, 5), rng.integers(0, EOD)
        tokens = (start + step * np.arange(length) + (rng.random(length) < 0.1)) % EOD
        tokens[-1] = EOD
        if empty_every is not None and number % empty_every == 0:
            tokens = tokens[:0]
        builder.add_document(torch.from_numpy(tokens.astype(np.int32)), [len(tokens)])
    builder.finalize(prefix + ".idx")
    return prefix
