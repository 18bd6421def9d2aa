"""Packers: by hand, against slow literal versions, and on the whole nothing lost or overfull."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_libra.data.packing import PACKERS, Packing, pack_best_fit, pack_cut, pack_greedy

Packer = Callable[[list[int], int], Packing]
documents = st.lists(st.integers(0, 20), max_size=40)


@pytest.mark.parametrize(
    ("packer", "rows", "ids"),
    [
        (pack_cut, [(5, 3), (1, 3, 2)], [0, 1, 1, 2, 3]),
        (pack_greedy, [(5,), (4, 3), (2,)], [0, 1, 2, 3]),
        (pack_best_fit, [(5, 3), (4, 2)], [0, 2, 1, 3]),
    ],
)
def test_by_hand(packer: Packer, rows: list[tuple[int, ...]], ids: list[int]) -> None:
    packed = packer([5, 4, 3, 2], 8)
    assert list(packed.rows) == rows
    assert packed.documents.tolist() == ids


@pytest.mark.parametrize("packer", PACKERS.values())
def test_empty_documents_are_left_out_but_keep_their_numbers(packer: Packer) -> None:
    packed = packer([0, 4, 0, 4, 0], 8)
    assert list(packed.rows) == [(4, 4)]
    assert packed.documents.tolist() == [1, 3]
    assert len(packer([0, 0], 8).rows) == len(packer([], 8).rows) == 0


@pytest.mark.parametrize("packer", PACKERS.values())
@given(documents)
def test_every_token_is_packed_once(packer: Packer, lengths: list[int]) -> None:
    packed = packer(lengths, 20)
    assert packed.rows.row_sums().max(initial=0) <= 20
    assert packed.rows.flat.min(initial=1) >= 1
    tokens = np.bincount(packed.documents, packed.rows.flat, minlength=len(lengths))
    assert tokens.tolist() == lengths


def cut(lengths: list[int], seq_length: int) -> list[tuple[int, ...]]:
    """Token after token."""
    stream = [document for document, length in enumerate(lengths) for _ in range(length)]
    pieces = [stream[at : at + seq_length] for at in range(0, len(stream), seq_length)]
    return [tuple(piece.count(d) for d in sorted(set(piece))) for piece in pieces]


def best_fit(lengths: list[int], seq_length: int) -> list[list[int]]:
    """Documents of each sequence; the fullest sequence with room, the first of equals."""
    packs: list[list[int]] = []
    for document in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        rooms = [seq_length - sum(lengths[i] for i in pack) for pack in packs]
        fitting = [(room, at) for at, room in enumerate(rooms) if room >= lengths[document]]
        if not fitting:
            packs.append([])
        packs[min(fitting)[1] if fitting else -1].append(document)
    return [sorted(pack) for pack in packs]


@given(documents, st.integers(1, 25))
def test_cut_equals_a_walk_over_tokens(lengths: list[int], seq_length: int) -> None:
    assert list(pack_cut(lengths, seq_length).rows) == cut(lengths, seq_length)


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50))
def test_greedy_never_leaves_room_for_the_next(lengths: list[int], seq_length: int) -> None:
    packed = pack_greedy(lengths, seq_length)
    assert packed.documents.tolist() == list(range(len(lengths)))
    rows = list(packed.rows)
    for row, following in zip(rows, rows[1:], strict=False):
        assert sum(row) + following[0] > seq_length


@given(st.lists(st.integers(1, 20), max_size=40), st.integers(20, 50), st.integers(1, 50))
def test_best_fit_equals_the_search(lengths: list[int], seq_length: int, window: int) -> None:
    packed = pack_best_fit(lengths, seq_length, window=window)
    expected = [
        [start + document for document in pack]
        for start in range(0, len(lengths), window)
        for pack in best_fit(lengths[start : start + window], seq_length)
    ]
    bounds = packed.rows.offsets
    found = [packed.documents[a:b].tolist() for a, b in zip(bounds, bounds[1:], strict=False)]
    assert found == expected


def test_a_large_corpus_is_quick() -> None:
    """Guards the complexity, not the machine: a scan of all sequences would take minutes."""
    lengths = np.random.default_rng(0).lognormal(6, 1.5, 200_000).astype(int).clip(1, 32_768)
    packed = pack_best_fit(lengths, 32_768)
    assert packed.rows.row_sums().mean() > 0.99 * 32_768


@pytest.mark.parametrize("packer", [pack_greedy, pack_best_fit])
def test_a_document_that_does_not_fit_is_named(packer: Packer) -> None:
    with pytest.raises(ValueError, match=r"lengths\[1\] \(9\) must be at most seq_length \(8\)"):
        packer([3, 9], 8)


def test_bad_arguments() -> None:
    with pytest.raises(ValueError, match=r"seq_length \(0\) must be at least 1"):
        pack_cut([1], 0)
    with pytest.raises(ValueError, match=r"lengths\[0\] \(-1\)"):
        pack_cut([-1], 8)
    with pytest.raises(ValueError, match=r"window \(0\) must be at least 1"):
        pack_best_fit([1], 8, window=0)
