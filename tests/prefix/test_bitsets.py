"""`BitCounter`, compared with counting single bits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.ordering.coaccess import BitCounter

bitsets = st.lists(st.integers(0, 2**70 - 1) | st.just(0) | st.just(2**70 - 1), max_size=20)


@given(bitsets)
def test_counts_equal_those_of_single_bits(given_bitsets: list[int]) -> None:
    counts = [sum(bitset >> bit & 1 for bitset in given_bitsets) for bit in range(70)]
    counter = BitCounter(given_bitsets)
    assert counter.highest == max(counts)
    for count in range(1, 24):
        assert counter.at_least(count) == sum(1 << bit for bit in range(70) if counts[bit] >= count)


@pytest.mark.parametrize("nothing", [[], [0], [0, 0]])
def test_no_bits_count_zero(nothing: list[int]) -> None:
    assert BitCounter(nothing).highest == 0
    assert BitCounter(nothing).at_least(1) == 0
