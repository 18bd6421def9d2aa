"""Layer 1: shards, chunks and the kv heads that they need."""

import pytest

from megatron_libra.config import AttentionShape, LibraConfig
from megatron_libra.plan.heads import HeadPartition


def valid_partitions():
    for kv_heads in (1, 2, 3, 4, 8):
        for ratio in (1, 2, 4):
            query_heads = kv_heads * ratio
            for split in range(1, query_heads + 1):
                for chunks in range(1, query_heads + 1):
                    shape = AttentionShape(query_heads=query_heads, kv_heads=kv_heads, head_dim=8)
                    try:
                        LibraConfig(head_split=split, chunks=chunks).check_shape(shape)
                    except ValueError:
                        continue
                    yield HeadPartition.of(shape, split, chunks)


def test_every_query_head_meets_its_own_kv_head():
    count = 0
    for heads in valid_partitions():
        group = heads.query_heads // heads.kv_heads
        for shard in range(heads.head_split):
            for chunk in range(heads.chunks):
                first_query = (shard * heads.chunks + chunk) * heads.query_heads_per_chunk
                kv_part = heads.kv_shard_of(shard) * heads.kv_pieces + heads.kv_piece_of(chunk)
                first_kv = kv_part * heads.kv_heads_per_chunk
                per_kv = heads.query_heads_per_chunk // heads.kv_heads_per_chunk
                for i in range(heads.query_heads_per_chunk):
                    assert (first_query + i) // group == first_kv + i // per_kv
                count += 1
    assert count > 300


def test_pieces_of_all_shards_are_the_kv_heads():
    for heads in valid_partitions():
        assert heads.kv_shards * heads.kv_pieces * heads.kv_heads_per_chunk == heads.kv_heads
        assert heads.head_split * heads.chunks * heads.query_heads_per_chunk == heads.query_heads


@pytest.mark.parametrize(
    ("fields", "line"),
    [
        ({"head_split": 3}, r"head_split \(3\) must divide query_heads \(8\)"),
        (
            {"head_split": 4, "chunks": 4},
            r"chunks \(4\) must divide query_heads / head_split \(2\)",
        ),
    ],
)
def test_uneven_cuts_are_refused(fields, line):
    shape = AttentionShape(query_heads=8, kv_heads=2, head_dim=8)
    with pytest.raises(ValueError, match=line):
        LibraConfig(**fields).check_shape(shape)


def test_parts_that_straddle_a_kv_head_are_refused():
    shape = AttentionShape(query_heads=12, kv_heads=3, head_dim=8)
    with pytest.raises(ValueError, match=r"head_split \(2\).*kv_heads \(3\).*try one of \[1, 3"):
        LibraConfig(head_split=2, chunks=1).check_shape(shape)
