"""How large a pool that is planned may be. In: its sizes, in the command line's words. Out: a
refusal, or nothing; and about how many blocks it has.

Above these limits a plan takes minutes and gigabytes; real pools have some thousand tiles.
"""

from __future__ import annotations

from megatron_libra.config import MAX_INTEGER

__all__ = [
    "MAX_CELLS",
    "MAX_TILES",
    "MAX_WORKERS",
    "blocks_of",
    "check_tiles",
    "check_tokens",
    "check_workers",
    "pieces_of",
]

MAX_WORKERS = 4096
MAX_TILES = 500_000
MAX_CELLS = 2**28
"""Blocks or samples x workers of a plan, above the limit of POOL.json: DistCA's scope at DP 128 and
256K has half as many, and its plan takes 1.3 GB."""


def check_workers(workers: int, subject: str, way_out: str, pool: str = "a pool") -> None:
    """Refuse more workers of a pool than are planned.

    Args:
        workers: of the pool.
        subject: what makes so many, with its values.
        way_out: what to do instead.
        pool: which pool it is.

    Raises:
        ValueError: workers are above MAX_WORKERS.
    """
    if workers > MAX_WORKERS:
        raise ValueError(
            f"{subject} are {workers} workers of {pool}; at most {MAX_WORKERS} are planned; "
            f"{way_out}."
        )


def check_tokens(tokens: int, subject: str, way_out: str, pool: str = "a pool") -> None:
    """The same for tokens, which a plan numbers as int32."""
    if tokens > MAX_INTEGER:
        raise ValueError(
            f"{subject} are {tokens} tokens of {pool}; it holds at most {MAX_INTEGER}; {way_out}."
        )


def check_tiles(tiles: int, subject: str, way_out: str, pool: str = "a pool") -> None:
    """The same for tiles, which are estimated."""
    if tiles > MAX_TILES:
        raise ValueError(
            f"{subject} makes about {tiles} tiles of {pool}; at most {MAX_TILES} are planned; "
            f"{way_out}."
        )


def blocks_of(pool_size: int, seq_length: int, block_size: int, context_parallel_size: int) -> int:
    """About how many blocks a pool has: those of its sequences, and the cuts at CP's pieces."""
    return pool_size * (seq_length // block_size + 2 * context_parallel_size)


def pieces_of(num_blocks: int, pool_size: int, context_parallel_size: int) -> int:
    """The other way round: seq_length // block_size at which a pool has so many blocks."""
    return num_blocks // pool_size - 2 * context_parallel_size
