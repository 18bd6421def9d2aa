"""Layer 1: homes of tokens, by hand and as a permutation."""

import numpy as np
import pytest

from megatron_libra.plan.layout import TokenLayout


def test_zigzag_and_contiguous_by_hand():
    zigzag, contiguous = TokenLayout("zigzag", 8, 2), TokenLayout("contiguous", 8, 2)
    assert zigzag.positions(0).tolist() == [0, 1, 6, 7]
    assert zigzag.positions(1).tolist() == [2, 3, 4, 5]
    assert contiguous.positions(1).tolist() == [4, 5, 6, 7]


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("cp", [1, 2, 3, 5])
def test_every_token_has_one_home(kind, cp):
    layout = TokenLayout(kind, 30, cp) if kind == "contiguous" or 30 % (2 * cp) == 0 else None
    layout = layout or TokenLayout(kind, 4 * cp, cp)
    held = [layout.positions(c) for c in range(cp)]
    assert [len(positions) for positions in held] == [layout.num_local_tokens] * cp
    assert sorted(np.concatenate(held).tolist()) == list(range(layout.seq_length))
    for c, positions in enumerate(held):
        piece, offset = np.divmod(positions, layout.piece_tokens)
        assert (layout.piece_rank[piece] == c).all()
        local = layout.piece_local_start[piece] + offset
        assert local.tolist() == list(range(layout.num_local_tokens))


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
def test_local_tokens_counts_what_each_rank_holds(kind):
    layout = TokenLayout(kind, 24, 3)
    rank = np.empty(24, np.int64)
    for c in range(3):
        rank[layout.positions(c)] = c
    start, stop = np.array([0, 3, 7, 23, 5]), np.array([24, 9, 7, 24, 20])
    expected = [
        np.bincount(rank[a:b], minlength=3).tolist() for a, b in zip(start, stop, strict=True)
    ]
    assert layout.local_tokens(start, stop).tolist() == expected


def test_length_that_the_pieces_do_not_divide_is_refused_with_a_way_out():
    with pytest.raises(ValueError, match=r"seq_length \(703\).*multiple of 2 \* context.*try 704"):
        TokenLayout("zigzag", 703, 4)
    assert TokenLayout("contiguous", 700, 4).num_local_tokens == 175
