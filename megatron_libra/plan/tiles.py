"""Cut packed sequences into SH-Tiles (section 4.3.1, Eq. 5 and 6).

In: samples, layout, B, H. Out: blocks and, once they are placed, tiles.

Blocks of at most B tokens are cut inside the home pieces, so every tile has one home; the padding
tail is in no block. Tile = block x head shard; tile id = block * H + shard (sequence-major, token
order, shard). A fragment is the part of a block inside one sample. Beyond the paper, blocks may be
cut before and behind long samples too: whoever computes queries of a long sample together with
some of others needs keys of both, and a long sample whose first queries are computed elsewhere
cannot be computed in place. Placers may cut more (`BlockTable.cut`). Example, one sequence of
samples 5 and 3, CP = 2 contiguous, B = 4:

    token      0 1 2 3 | 4 5 6 7
    sample     0 0 0 0   0 1 1 1        fragments: block 0 = sample 0 [0, 4)
    block      0 0 0 0   1 1 1 1                   block 1 = sample 0 [4, 5) and sample 1 [0, 3)
    pairs      1 2 3 4   5 1 2 3        block 0: 10, block 1: 11
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import SamplePool

__all__ = ["BlockTable", "TileTable", "causal_pairs", "cut_blocks", "edges"]

Int64 = NDArray[np.int64]
Int32 = NDArray[np.int32]
LONG_SAMPLE = 2
"""Blocks of a sample around which blocks may be cut: at most twice as many blocks."""


@dataclass(frozen=True, slots=True, eq=False)
class BlockTable:
    """Blocks of a pool (columns of N) and their fragments (columns of F, block-major)."""

    slot: Int64
    start: Int64
    stop: Int64
    pairs: Int64
    """(N,) causal query-key pairs of one query head (Eq. 6)."""
    home: Int64
    """(N,) the worker that holds the block's tokens."""
    first_fragment: Int64
    """(N + 1,) fragments of block b are first_fragment[b] : first_fragment[b + 1]."""
    fragment_sample: Int64
    """(F,) row of the sample in SamplePool; consecutive inside a block."""
    fragment_start: Int64
    """(F,) first query position, sample-local."""
    fragment_stop: Int64
    """(F,) behind the last query position, sample-local."""

    @property
    def num_blocks(self) -> int:
        """N."""
        return len(self.slot)

    @property
    def num_tokens(self) -> Int64:
        """(N,) query tokens of each block."""
        return self.stop - self.start

    @property
    def first_token(self) -> Int64:
        """(N,) number of each block's first token among the tokens of all blocks; `cut`'s unit."""
        tokens = self.num_tokens
        first: Int64 = np.cumsum(tokens) - tokens
        return first

    def cut(self, tokens: Int64) -> BlockTable:
        """The same tokens with blocks that begin at some more of them.

        Args:
            tokens: numbers as in first_token, in any order; where a block begins anyway, or behind
                the last token, nothing changes.
        """
        if not len(tokens):
            return self
        total, first = int(self.num_tokens.sum()), self.first_token
        tokens = tokens[tokens < total]
        block, begin = edges(first, tokens)
        start = self.start[block] + begin - first[block]
        lengths = self.fragment_stop - self.fragment_start
        fragment_first = np.cumsum(lengths) - lengths
        fragment, fragment_begin = edges(fragment_first, tokens)
        fragment_start = self.fragment_start[fragment] + fragment_begin - fragment_first[fragment]
        fragment_stop = fragment_start + np.diff(fragment_begin, append=total)
        first_fragment = np.searchsorted(fragment_begin, np.append(begin, total)).astype(np.int64)
        pairs = causal_pairs(fragment_start, fragment_stop)
        return BlockTable(
            slot=self.slot[block],
            start=start,
            stop=start + np.diff(begin, append=total),
            pairs=np.add.reduceat(pairs, first_fragment[:-1]) if len(block) else pairs,
            home=self.home[block],
            first_fragment=first_fragment,
            fragment_sample=self.fragment_sample[fragment],
            fragment_start=fragment_start,
            fragment_stop=fragment_stop,
        )


@dataclass(frozen=True, slots=True, eq=False)
class TileTable:
    """SH-Tiles by id: sequence-major, then block in token order, then head shard."""

    slot: Int32
    head_shard: Int32
    start: Int32
    stop: Int32
    pairs: Int64
    """Causal query-key pairs of one query head (Eq. 6)."""
    home: Int32
    worker: Int32

    @classmethod
    def of(cls, blocks: BlockTable, head_split: int, worker: Int64) -> TileTable:
        """Tiles of blocks x head shards with their workers."""

        def narrow(column: Int64) -> Int32:
            return np.repeat(column, head_split).astype(np.int32)

        return cls(
            slot=narrow(blocks.slot),
            head_shard=np.tile(np.arange(head_split, dtype=np.int32), blocks.num_blocks),
            start=narrow(blocks.start),
            stop=narrow(blocks.stop),
            pairs=np.repeat(blocks.pairs, head_split),
            home=narrow(blocks.home),
            worker=worker.astype(np.int32),
        )


def causal_pairs(start: Int64, stop: Int64) -> Int64:
    """Pairs of queries [start, stop) with keys [0, query] of one sample: sum of (q + 1), Eq. 6."""
    return (stop * (stop + 1) - start * (start + 1)) // 2


def cut_blocks(
    samples: SamplePool, layout: TokenLayout, block_size: int, *, around_long_samples: bool = False
) -> BlockTable:
    """All blocks of a pool, slot-major and in token order.

    Args:
        around_long_samples: cut before and behind samples of at least LONG_SAMPLE * block_size
            tokens too; else only as in the paper.
    """
    slot, start, stop, home = _blocks(samples, layout, block_size)
    length = layout.seq_length
    block_key, sample_key = slot * length + start, samples.slot * length + samples.start
    _, fragment_key = edges(block_key, sample_key)
    block = np.searchsorted(block_key, fragment_key, side="right") - 1
    sample = np.searchsorted(sample_key, fragment_key, side="right") - 1
    fragment_start = fragment_key - sample_key[sample]
    fragment_stop = np.minimum(
        stop[block] + slot[block] * length - sample_key[sample], samples.length[sample]
    )
    first = np.searchsorted(block, np.arange(len(slot) + 1))
    pairs = causal_pairs(fragment_start, fragment_stop)
    table = BlockTable(
        slot=slot,
        start=start,
        stop=stop,
        pairs=np.add.reduceat(pairs, first[:-1]) if len(slot) else pairs,
        home=home,
        first_fragment=first.astype(np.int64),
        fragment_sample=sample.astype(np.int64),
        fragment_start=fragment_start,
        fragment_stop=fragment_stop,
    )
    if not around_long_samples:
        return table
    end = np.cumsum(samples.length)
    is_long = samples.length >= LONG_SAMPLE * block_size
    return table.cut(np.concatenate([end - samples.length, end])[np.tile(is_long, 2)])


def _blocks(
    samples: SamplePool, layout: TokenLayout, block_size: int
) -> tuple[Int64, Int64, Int64, Int64]:
    """Columns slot, start, stop, home of every block."""
    piece_start = np.arange(layout.num_pieces) * layout.piece_tokens
    tokens = np.clip(samples.num_tokens[:, None] - piece_start, 0, layout.piece_tokens).ravel()
    slot = np.repeat(np.arange(samples.num_slots), layout.num_pieces)
    piece = np.tile(np.arange(layout.num_pieces), samples.num_slots)
    count = -(-tokens // block_size)
    row = np.repeat(np.arange(len(tokens)), count)
    index = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    start = piece_start[piece[row]] + index * block_size
    stop = np.minimum(start + block_size, piece_start[piece[row]] + tokens[row])
    home = slot[row] * layout.context_parallel_size + layout.piece_rank[piece[row]]
    return slot[row].astype(np.int64), start, stop, home.astype(np.int64)


def edges(first: Int64, cuts: Int64) -> tuple[Int64, Int64]:
    """(owner, begin) of the ranges that begin at `first`, which is sorted, or at a cut; owner: the
    range of `first` that each is in."""
    begin = np.sort(np.concatenate([first, cuts]))
    begin = begin[np.diff(begin, prepend=-1) > 0]
    owner: Int64 = np.searchsorted(first, begin, side="right") - 1
    return owner, begin
