"""Cut the heads into shards and chunks (section 4.3.1 and 4.4).

In: h_q, h_kv, H, M. Out: widths and maps.

Query heads are cut into H shards of M chunks. A query chunk computes with one *piece* of a kv
shard: K = min(H, h_kv) kv shards of U pieces each. Example, h_q = 8, h_kv = 2, H = 1, M = 4:

    query heads   0 1 | 2 3 | 4 5 | 6 7      four chunks of two heads
    kv piece        0 |  0  |  1  |  1       U = 2: chunks 0 and 2 bring a kv head, 1 and 3 reuse it
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.config import AttentionShape, LibraConfig

__all__ = ["HeadPartition", "fit_chunks", "fits"]


@dataclass(frozen=True, slots=True)
class HeadPartition:
    """How one layer's heads are cut; built by `of`, whose arguments LibraConfig.check_shape
    accepted.
    """

    query_heads: int
    kv_heads: int
    head_split: int
    chunks: int

    @classmethod
    def of(cls, shape: AttentionShape, head_split: int, chunks: int) -> HeadPartition:
        """Partition of a shape into head_split shards of chunks chunks."""
        return cls(shape.query_heads, shape.kv_heads, head_split, chunks)

    @property
    def whole(self) -> HeadPartition:
        """The same heads uncut, as the local part computes them."""
        return HeadPartition(self.query_heads, self.kv_heads, 1, 1)

    @property
    def query_heads_per_shard(self) -> int:
        """h_q / H, query heads of an SH-Tile."""
        return self.query_heads // self.head_split

    @property
    def query_heads_per_chunk(self) -> int:
        """h_q / (H M), query heads of one kernel call."""
        return self.query_heads_per_shard // self.chunks

    @property
    def kv_shards(self) -> int:
        """K, distinct kv head ranges; smaller than H when shards share a kv head."""
        return min(self.head_split, self.kv_heads)

    @property
    def kv_heads_per_shard(self) -> int:
        """Kv heads of a KV group."""
        return self.kv_heads // self.kv_shards

    @property
    def kv_pieces(self) -> int:
        """U, transfers that bring one kv shard; smaller than M when chunks share a kv head."""
        return min(self.chunks, self.kv_heads_per_shard)

    @property
    def kv_heads_per_chunk(self) -> int:
        """Kv heads of one kernel call."""
        return self.kv_heads_per_shard // self.kv_pieces

    def kv_shard_of[Shard: (int, NDArray[np.int64])](self, head_shard: Shard) -> Shard:
        """The kv shard that a head shard, or each of an array of them, attends to."""
        return head_shard * self.kv_shards // self.head_split

    def kv_piece_of(self, chunk: int) -> int:
        """The piece of the kv shard that a chunk attends to."""
        return chunk * self.kv_pieces // self.chunks


def fits(shape: AttentionShape, head_split: int, chunks: int) -> bool:
    """Whether H and M cut this shape's heads evenly."""
    try:
        LibraConfig(head_split=head_split, chunks=chunks).check_shape(shape)
    except ValueError:
        return False
    return True


def fit_chunks(shape: AttentionShape, head_split: int, chunks: int) -> int:
    """The most chunks up to M that cut a shard's heads evenly; 1 if H itself does not."""
    return next(m for m in range(chunks, 0, -1) if m == 1 or fits(shape, head_split, m))
