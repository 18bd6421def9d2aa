"""How uneven attention is, before any training. In: document lengths. Out: Skew.

Documents are shuffled, concatenated and cut every seq_length tokens, as Megatron's GPTDataset does
(its shuffle has another seed, so this is a sample of what the run will see, not the run itself).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from settings import CONTEXT_PARALLEL, DATA_PARALLEL, GLOBAL_BATCH, LIBRA, SEQ_LENGTH, SHAPE

from megatron_libra import plan_pool
from megatron_libra.data.packing import pack_cut
from megatron_libra.plan.vrsp import attention_work, order_window

__all__ = ["BIN_EDGES", "Skew", "measure_skew"]

BIN_EDGES = np.array([1, 64, 128, 256, 512, 1024, 2048, 4096, 2**30])
"""Token counts where the bars of the histogram begin."""
WINDOWS = 40
"""Optimizer steps that are looked at."""


@dataclass(frozen=True, slots=True)
class Skew:
    """What the tables and plots show."""

    documents: np.ndarray
    """(documents,) tokens of each document."""
    samples: np.ndarray
    """(samples,) tokens of each sample, a document or a part of one that a cut left."""
    sequence_work: np.ndarray
    """(sequences,) causal pairs of each packed sequence over their mean."""
    before: np.ndarray
    """(windows, GA, W) pairs of each worker, every sequence on its own replica, over the mean."""
    after: np.ndarray
    """(windows, GA, W) the same with sequence pools and tiles placed by the default placer."""


def measure_skew(documents: np.ndarray) -> Skew:
    """Pack the documents and plan the first steps of a run."""
    rng = np.random.default_rng(0)
    rows = pack_cut(rng.permutation(documents), SEQ_LENGTH).rows
    sequences = [rows.lengths(index) for index in range(len(rows) - 1)]
    work = np.array([attention_work(lengths) + sum(lengths) for lengths in sequences]) / 2
    chosen = rng.permutation(len(sequences))[: WINDOWS * GLOBAL_BATCH].reshape(-1, GLOBAL_BATCH)
    windows = [[sequences[index] for index in window] for window in chosen]
    before = np.array([_shared_by_replicas(work[window]) for window in chosen])
    after = np.array([_planned_loads(window) for window in windows])
    scale = before.mean(axis=(1, 2), keepdims=True)
    return Skew(
        documents=documents,
        samples=np.concatenate([np.array(lengths) for lengths in sequences]),
        sequence_work=work / work.mean(),
        before=before / scale,
        after=after / scale,
    )


def _shared_by_replicas(work: np.ndarray) -> np.ndarray:
    """(GA, W) pairs when the CP ranks of a replica share its own sequence evenly."""
    of_replica = work.reshape(-1, DATA_PARALLEL) / CONTEXT_PARALLEL
    return np.repeat(of_replica, CONTEXT_PARALLEL, axis=1)


def _planned_loads(window: list[tuple[int, ...]]) -> np.ndarray:
    """(GA, W) pairs of each worker when the window is ordered and its pools are planned."""
    order = order_window(window, pool_size=LIBRA.pool_size, data_parallel_size=DATA_PARALLEL)
    loads = [
        plan_pool(
            [window[index] for index in pool],
            context_parallel_size=CONTEXT_PARALLEL,
            shape=SHAPE,
            config=LIBRA,
            seq_length=SEQ_LENGTH,
        ).loads
        for pool in order.pools
    ]
    return np.array(loads).reshape(-1, DATA_PARALLEL * CONTEXT_PARALLEL) / LIBRA.head_split
