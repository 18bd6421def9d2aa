"""Small pools for tests of planners."""

from __future__ import annotations

import numpy as np

from megatron_libra.bench.pools import BenchPool
from megatron_libra.config import AttentionShape

ONE_HEAD = AttentionShape(query_heads=1, kv_heads=1, head_dim=1, bytes_per_element=1)
GROUPED = AttentionShape(query_heads=8, kv_heads=2, head_dim=4)


def random_pool(seed: int, *, num_sequences: int = 4, length: int = 4096) -> BenchPool:
    """Sequences of random samples; the first one is a single sample."""
    rng = np.random.default_rng(seed)
    rows = [(length,)]
    for _ in range(num_sequences - 1):
        cuts = np.unique(rng.integers(1, length, rng.integers(1, 20)))
        rows.append(tuple(np.diff(cuts, prepend=0).tolist()))
    return BenchPool(tuple(rows), length, 4, GROUPED)
