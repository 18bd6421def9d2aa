"""How large a plan may be, beyond the limits of POOL.json. In: sizes of a pool. Out: blocks."""

from __future__ import annotations

__all__ = ["MAX_CELLS", "blocks_of", "pieces_of"]

MAX_CELLS = 2**28
"""Blocks or samples x workers of a plan, above the limit of POOL.json: DistCA's scope at DP 128 and
256K has half as many, and its plan takes 1.3 GB."""


def blocks_of(pool_size: int, seq_length: int, block_size: int, context_parallel_size: int) -> int:
    """About how many blocks a pool has: those of its sequences, and the cuts at CP's pieces."""
    return pool_size * (seq_length // block_size + 2 * context_parallel_size)


def pieces_of(num_blocks: int, pool_size: int, context_parallel_size: int) -> int:
    """The other way round: seq_length // block_size at which a pool has so many blocks."""
    return num_blocks // pool_size - 2 * context_parallel_size
