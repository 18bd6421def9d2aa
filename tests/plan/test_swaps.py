"""Layer 1: swaps by hand; properties on random bins."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_libra.plan.swaps import swap


def loads(work, bins):
    return [sum(work[i] for i in items) for items in bins]


def test_by_hand():
    assert swap([7, 6, 5, 4], [[0, 2], [1, 3]]) == [[1, 2], [0, 3]]
    assert swap([7, 6, 5, 4], [[0, 3], [1, 2]]) == [[0, 3], [1, 2]]
    assert swap([5], [[0]]) == [[0]]


def test_work_beyond_64_bits():
    work = [7 * 2**62, 6 * 2**62, 5 * 2**62, 4 * 2**62]
    assert loads(work, swap(work, [[0, 2], [1, 3]])) == [11 * 2**62, 11 * 2**62]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_counts_and_items_stay_and_the_largest_never_grows(num_bins, size, data):
    count = num_bins * size
    work = data.draw(st.lists(st.integers(0, 99), min_size=count, max_size=count))
    bins = [list(range(k * size, (k + 1) * size)) for k in range(num_bins)]
    result = swap(work, bins)
    assert sorted(i for items in result for i in items) == list(range(count))
    assert [len(items) for items in result] == [size] * num_bins
    assert max(loads(work, result)) <= max(loads(work, bins))
