"""WLB-LLM's packing without deferral, re-implemented from its published rule.

In: pool. Out: Outcome.

Workload-aware variable-token packing: documents, longest first, go to the sequence with the least
attention work (Eq. 2) if it keeps the token limit, else to the one with the fewest tokens. What
fits nowhere would be deferred to a later step; here it joins the sequence with the fewest tokens,
so that the samples of the step stay. Inside its CP group a sequence is computed by Ulysses.
"""

from __future__ import annotations

import numpy as np

from megatron_libra.bench.outcome import Outcome
from megatron_libra.bench.planners.libra import plan_tiles
from megatron_libra.bench.pools import BenchPool
from megatron_libra.plan.layout import round_up

__all__ = ["plan", "repack"]

TOKEN_LIMIT = 1.25
"""Most tokens of a repacked sequence over seq_length; what memory would allow."""


def plan(pool: BenchPool) -> Outcome:
    """Repack the pool's samples and run Ulysses on them."""
    documents = [length for sequence in pool.sequences for length in sequence]
    sequences = repack(documents, len(pool.sequences), int(TOKEN_LIMIT * pool.seq_length))
    longest = max(map(sum, sequences))
    length = round_up(max(longest, pool.seq_length), 2 * pool.context_parallel_size)
    repacked = BenchPool(
        tuple(map(tuple, sequences)), length, pool.context_parallel_size, pool.shape
    )
    found = plan_tiles(repacked, placer="ulysses", block_size=length)
    fullest = longest / pool.seq_length
    return Outcome(found.loads, found.query_bytes, found.kv_bytes, fullest)


def repack(documents: list[int], num_sequences: int, token_limit: int) -> list[list[int]]:
    """Sequences of about equal work; ties go to the first sequence."""
    sequences: list[list[int]] = [[] for _ in range(num_sequences)]
    work = np.zeros(num_sequences, np.int64)
    tokens = np.zeros(num_sequences, np.int64)
    for length in sorted(documents, reverse=True):
        chosen = int(work.argmin())
        if tokens[chosen] + length > token_limit:
            chosen = int(tokens.argmin())
        sequences[chosen].append(length)
        work[chosen] += length * length
        tokens[chosen] += length
    return sequences
