"""The fold of SFT conversations: by hand, then a literal walk through Megatron's loop."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_libra.data.conversations import ConversationLengths, fold_conversations
from megatron_libra.data.rows import LengthRows


@pytest.mark.parametrize(
    ("counts", "context_parallel_size", "expected"),
    [
        ([3, 5], 1, (3, 13)),  # the padding joins the last conversation
        ([3, 5], 2, (4, 12)),  # 3 becomes 4
        ([3, 5, 9], 2, (4, 8, 4)),  # the last one is cut
        ([3, 13], 1, (3, 13)),  # exactly full
        ([16, 5], 1, (16,)),  # what does not fit at all is gone
        ([99], 4, (16,)),
        ([0, 2], 1, (16,)),  # an empty conversation is no sample
    ],
)
def test_fold_by_hand(
    counts: list[int], context_parallel_size: int, expected: tuple[int, ...]
) -> None:
    folded = fold_conversations(counts, seq_length=16, context_parallel_size=context_parallel_size)
    assert folded == expected


def walk(counts: list[int], seq_length: int, multiple: int) -> list[int]:
    """Conversation after conversation, as a dataset appends them."""
    total, stops = 0, []
    for count in counts:
        total += count
        total += -total % multiple
        stops.append(total)
        if total > seq_length:
            break
    stops[-1] = seq_length
    return [b - a for a, b in zip([0, *stops], stops, strict=False) if b > a]


@given(
    st.lists(st.integers(0, 40), min_size=1, max_size=12),
    st.integers(1, 64),
    st.sampled_from([1, 2, 4]),
)
def test_fold_equals_the_walk(counts: list[int], units: int, context_parallel_size: int) -> None:
    multiple = 2 * context_parallel_size if context_parallel_size > 1 else 1
    seq_length = units * multiple
    folded = fold_conversations(
        counts, seq_length=seq_length, context_parallel_size=context_parallel_size
    )
    assert list(folded) == walk(counts, seq_length, multiple)
    assert sum(folded) == seq_length


def test_samples_repeat_the_lines_in_their_order() -> None:
    table = ConversationLengths(
        LengthRows.from_rows([[2], [3, 3], [8]]),
        line_index=[2, 1],
        num_samples=5,
        seq_length=8,
    )
    assert len(table) == 5
    assert [table.lengths(i) for i in range(5)] == [(8,), (3, 5), (8,), (3, 5), (8,)]
    with pytest.raises(IndexError, match=r"sample 5 is outside \[0, 5\)"):
        table.lengths(5)
