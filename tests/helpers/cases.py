"""Named pools, small enough for the CPU. Out: POOL.json mappings by name, and their plans.

The first group are inputs that users reported against other systems (the public issue beside each);
the second are corners of this design; `random_pools` makes any number more from a seed.
"""

from __future__ import annotations

import random
from typing import Any

from megatron_libra.config import CHOICES, AttentionShape, LibraConfig
from megatron_libra.plan.pool_plan import PoolPlan, plan_pool

__all__ = ["CASES", "plan_of", "random_pools"]

Pool = dict[str, Any]


def pool(
    sequences: list[list[int]],
    seq_length: int,
    context_parallel_size: int,
    heads: tuple[int, int, int],
    **libra: Any,
) -> Pool:
    """A POOL.json mapping; heads are query heads, kv heads, head dim."""
    names = ("query_heads", "kv_heads", "head_dim")
    return {
        "sequences": sequences,
        "seq_length": seq_length,
        "context_parallel_size": context_parallel_size,
        "attention": {**dict(zip(names, heads, strict=True)), "bytes_per_element": 2},
        "libra": {"pool_size": len(sequences), **libra},
    }


def plan_of(case: Pool, **libra: Any) -> PoolPlan:
    """The plan of a case, some of its LibraConfig fields replaced."""
    return plan_pool(
        case["sequences"],
        context_parallel_size=case["context_parallel_size"],
        shape=AttentionShape(**case["attention"]),
        config=LibraConfig(**{**case["libra"], **libra}),
        seq_length=case["seq_length"],
    )


REPORTED: dict[str, Pool] = {
    # NVIDIA/TransformerEngine#3331: packed + CP with tail padding silently wrong
    "tail_padding": pool(
        [[320, 250, 128]], 704, 4, (8, 1, 16), block_size=64, head_split=2, chunks=2
    ),
    # NVIDIA/TransformerEngine#1930: last token of a packed sequence lost
    "odd_documents": pool([[4, 3], [5, 2]], 8, 2, (4, 2, 8), block_size=2, chunks=1),
    # pytorch/torchtitan#2543: lengths that 2 * CP does not divide are refused
    "lengths_137_2041_89": pool(
        [[137, 2041, 89, 5], [2272]], 2272, 4, (8, 2, 16), block_size=128, head_split=2, chunks=2
    ),
    # fla-org/flash-linear-attention#892, NVIDIA/Megatron-LM#1764: a rank without tokens gives NaN
    "empty_slot": pool([[], [64]], 64, 2, (4, 4, 8), block_size=16, head_split=2, chunks=1),
    # Dao-AILab/flash-attention#1537: zero and one token entries
    "one_token_documents": pool(
        [[1, 1, 1, 1, 60], [64]], 64, 2, (4, 1, 8), block_size=8, head_split=4, chunks=1
    ),
    # pytorch/pytorch#146468: all_to_all with zero-size parts hangs
    "zero_size_exchange": pool([[16], [16]], 16, 1, (2, 2, 8), block_size=16, chunks=1),
    # hao-ai-lab/DistCA#83: too many bytes for four full-length documents (131072, scaled down)
    "four_full_documents": pool(
        [[1024]] * 4, 1024, 4, (32, 8, 16), block_size=64, head_split=2, chunks=4
    ),
    # NVIDIA/Megatron-LM#2282: one long document against many short ones stalls data parallelism
    "one_against_many": pool(
        [[1024], [64] * 16], 1024, 2, (8, 2, 16), block_size=64, head_split=2, chunks=2
    ),
}

DESIGNED: dict[str, Pool] = {
    "one_worker": pool([[40, 7, 17]], 64, 1, (4, 2, 8), block_size=16, head_split=2, chunks=2),
    "one_outlier": pool(
        [[240], [20, 30], [40], [9, 9, 9]], 256, 1, (4, 2, 8), block_size=32, chunks=4
    ),
    "block_across_samples": pool(
        [[13, 19, 5, 27], [64]], 64, 2, (4, 2, 8), block_size=16, chunks=2, placer="paper"
    ),
    "short_last_block": pool([[61], [64]], 64, 2, (4, 4, 8), block_size=24, chunks=4),
    "one_token": pool([[1], []], 4, 2, (4, 2, 8), block_size=4, chunks=2),
    "nothing_at_all": pool([[], []], 8, 2, (4, 2, 8), block_size=4, chunks=2),
    "shards_share_kv_heads": pool(
        [[96], [30, 30]], 96, 2, (8, 2, 8), block_size=16, head_split=4, chunks=2, placer="paper"
    ),
    "chunks_share_kv_heads": pool([[96], [30, 30]], 96, 2, (8, 2, 8), block_size=16, chunks=4),
    "multi_query": pool(
        [[80], [11, 50]], 96, 2, (8, 1, 8), block_size=16, head_split=2, chunks=4, placer="paper"
    ),
    "multi_head": pool([[80], [11, 50]], 96, 2, (4, 4, 8), block_size=16, head_split=2, chunks=2),
    "many_rounds": pool(
        [[256], []], 256, 2, (4, 1, 8), block_size=8, head_split=4, chunks=1, placer="paper"
    ),
    "whole_groups_contiguous": pool(
        [[100, 20], [64, 64]], 128, 2, (4, 2, 8), block_size=16, chunks=2, placer="paper",
        kv_fetch="group", layout="contiguous",
    ),
    "ulysses": pool([[100, 20], [64]], 128, 2, (8, 2, 8), block_size=16, placer="ulysses"),
    "home": pool([[100, 20], [64]], 128, 2, (8, 2, 8), block_size=16, chunks=2, placer="home"),
}  # fmt: skip

CASES: dict[str, Pool] = {**REPORTED, **DESIGNED}


def random_pools(seed: int, count: int, *, num_workers: int) -> list[PoolPlan]:
    """Plans of random pools with W = P * CP workers: any lengths, heads, H, M, layout, placer."""
    rng = random.Random(seed)
    plans: list[PoolPlan] = []
    while len(plans) < count:
        size = rng.choice([d for d in range(1, num_workers + 1) if num_workers % d == 0])
        kv_heads, group = rng.choice([1, 2, 3, 4]), rng.choice([1, 2, 4])
        case = pool(
            [],
            2 * size * rng.randint(1, 100 // size),
            size,
            (kv_heads * group, kv_heads, 8),
            block_size=rng.choice([3, 8, 16, 64]),
            head_split=rng.choice([1, 2, 4]),
            chunks=rng.choice([1, 2, 4]),
            placer=CHOICES["placer"][len(plans) % len(CHOICES["placer"])],
            kv_fetch=rng.choice(["prefix", "group"]),
            layout=rng.choice(["zigzag", "contiguous"]),
        )
        count_slots = num_workers // size
        case["sequences"] = [_random_lengths(rng, case["seq_length"]) for _ in range(count_slots)]
        case["libra"]["pool_size"] = count_slots
        try:
            plans.append(plan_of(case))
        except ValueError:  # H or M does not cut these heads: draw again
            continue
    return plans


def _random_lengths(rng: random.Random, seq_length: int) -> list[int]:
    lengths, left = [], rng.choice([seq_length, rng.randint(0, seq_length)])
    while left:
        lengths.append(rng.choice([left, rng.randint(1, left), 1]))
        left -= lengths[-1]
    return lengths
