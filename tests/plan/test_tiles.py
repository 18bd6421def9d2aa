"""Layer 1: blocks, fragments and pairs, by hand; then the reader of sequences."""

import numpy as np
import pytest

from megatron_libra.plan.layout import TokenLayout
from megatron_libra.plan.sequences import read_samples
from megatron_libra.plan.tiles import LONG_SAMPLE, causal_pairs, cut_blocks


def blocks_of(sequences, seq_length, cp, block_size, kind="zigzag", **options):
    samples = read_samples(sequences, seq_length)
    return cut_blocks(samples, TokenLayout(kind, seq_length, cp), block_size, **options)


def test_block_across_samples_by_hand():
    table = blocks_of([[5, 3]], 8, 2, 4, "contiguous")
    assert table.start.tolist() == [0, 4]
    assert table.home.tolist() == [0, 1]
    assert table.pairs.tolist() == [10, 11]
    assert table.fragment_sample.tolist() == [0, 0, 1]
    assert table.fragment_start.tolist() == [0, 4, 0]
    assert table.fragment_stop.tolist() == [4, 5, 3]


def test_blocks_are_cut_inside_home_pieces():
    table = blocks_of([[20]], 20, 2, 3)  # pieces of 5 tokens, homes 0 1 1 0
    assert table.start.tolist() == [0, 3, 5, 8, 10, 13, 15, 18]
    assert table.stop.tolist() == [3, 5, 8, 10, 13, 15, 18, 20]
    assert table.home.tolist() == [0, 0, 1, 1, 1, 1, 0, 0]


def test_block_size_that_divides_the_piece_cuts_at_global_positions():
    table = blocks_of([[32]], 32, 2, 4)
    assert table.start.tolist() == list(range(0, 32, 4))


def test_blocks_are_cut_around_long_samples_by_hand():
    """B = 2: 4 tokens are a long sample, 3 are not. The long sample of slot 1 begins inside block
    [2, 4) and ends inside [6, 8).
    """
    sequences = [[4, 3], [3, 4, 1]]
    usual = blocks_of(sequences, 8, 1, 2)
    table = blocks_of(sequences, 8, 1, 2, around_long_samples=True)
    assert usual.start.tolist() == [0, 2, 4, 6, 0, 2, 4, 6]
    assert table.start.tolist() == [0, 2, 4, 6, 0, 2, 3, 4, 6, 7]
    assert table.stop.tolist() == [2, 4, 6, 7, 2, 3, 4, 6, 7, 8]
    assert table.pairs.tolist() == [3, 7, 3, 3, 3, 3, 1, 5, 4, 1]
    assert table.home.tolist() == [0] * 4 + [1] * 6
    assert table.fragment_sample.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 3, 4]


@pytest.mark.parametrize("seed", range(10))
def test_blocks_around_long_samples_are_the_usual_ones_with_some_cuts_more(seed):
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(1, 200, rng.integers(0, 12)).tolist() for _ in range(4)]
    length, block = 2400, int(rng.integers(1, 120))
    usual, table = (
        blocks_of(sequences, length, 3, block, around_long_samples=x) for x in (False, True)
    )
    starts, stops = (table.slot * length + x for x in (table.start, table.stop))
    covered = np.zeros(4 * length, int)
    for start, stop in zip(starts.tolist(), stops.tolist(), strict=True):
        covered[start:stop] += 1
    assert covered.tolist() == [int(t < sum(row)) for row in sequences for t in range(length)]
    edges = {
        slot * length + edge
        for slot, row in enumerate(sequences)
        for size, end in zip(row, np.cumsum(row).tolist(), strict=True)
        if size >= LONG_SAMPLE * block
        for edge in (end - size, end)
    }
    paper = set((usual.slot * length + usual.start).tolist())
    assert (
        paper <= set(starts.tolist()) <= paper | edges <= set(starts.tolist()) | set(stops.tolist())
    )
    assert table.num_blocks <= 2 * usual.num_blocks + len(sequences)
    assert table.pairs.sum() == usual.pairs.sum()


@pytest.mark.parametrize("seed", range(10))
def test_cut_blocks_hold_the_same_queries(seed):
    """Any cuts; fragments and pairs against those of single-token blocks."""
    rng = np.random.default_rng(seed)
    sequences = [rng.integers(1, 40, rng.integers(0, 9)).tolist() for _ in range(3)]
    table = blocks_of(sequences, 360, 3, int(rng.integers(1, 50)))
    total = int(table.num_tokens.sum())
    cuts = rng.integers(0, total + 9, rng.integers(0, 30))
    cut, single = table.cut(cuts), table.cut(np.arange(total))
    expected = set(table.first_token.tolist()) | {c for c in cuts.tolist() if c < total}
    assert set(cut.first_token.tolist()) == expected
    assert single.num_tokens.tolist() == [1] * total
    owner = np.repeat(np.arange(cut.num_blocks), cut.num_tokens)
    assert cut.pairs.tolist() == np.bincount(owner, single.pairs, cut.num_blocks).tolist()
    for name in ("slot", "home"):
        assert (getattr(cut, name)[owner] == getattr(single, name)).all()
    fragment_tokens = cut.fragment_stop - cut.fragment_start
    assert (np.repeat(cut.fragment_sample, fragment_tokens) == single.fragment_sample).all()
    block = np.repeat(np.arange(cut.num_blocks), np.diff(cut.first_fragment))
    assert np.bincount(block, fragment_tokens, cut.num_blocks).tolist() == cut.num_tokens.tolist()
    assert table.cut(np.zeros(0, int)) is table


def test_padding_tail_and_empty_slots_have_no_blocks():
    table = blocks_of([[6], [], [0, 0]], 16, 2, 4)
    assert table.slot.tolist() == [0, 0]
    assert table.stop.tolist() == [4, 6]
    assert table.home.tolist() == [0, 1]


def test_zero_lengths_are_dropped_like_repeated_cu_seqlens():
    with_zeros, without = blocks_of([[3, 0, 5, 0, 0]], 8, 1, 4), blocks_of([[3, 5]], 8, 1, 4)
    assert with_zeros.pairs.tolist() == without.pairs.tolist()
    assert with_zeros.fragment_sample.tolist() == without.fragment_sample.tolist()


def test_pairs_are_exact_beyond_32_bits():
    length = 2**20
    assert causal_pairs(np.array([0]), np.array([length])).tolist() == [length * (length + 1) // 2]
    table = blocks_of([[length]], length, 16, 8192)
    assert int(table.pairs.sum()) == length * (length + 1) // 2


@pytest.mark.parametrize(
    ("sequences", "line"),
    [
        ([[4, -1]], r"sequences\[0\]\[1\] \(-1\) is negative"),
        ([[1], [9]], r"sequences\[1\] sums to 9 tokens; seq_length \(8\)"),
        ([[1.5]], r"sequences\[0\] holds 1.5; sample lengths must be integers"),
        ([[True]], r"sequences\[0\] holds True"),
        ([["8"]], r"sequences\[0\] holds '8'"),
        ([[10**30]], r"sequences\[0\]"),
        ([[2**63, 2**63]], r"sequences\[0\] holds 9223372036854775808"),
        ([[[1]]], r"sequences\[0\] holds \[1\]"),
    ],
)
def test_bad_lengths_get_one_line(sequences, line):
    with pytest.raises(ValueError, match=line) as error:
        read_samples(sequences, 8)
    assert "\n" not in str(error.value)
