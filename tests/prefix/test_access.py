"""`AccessWindow`, compared with a list of the last requests."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.ordering.coaccess import AccessWindow

requests = st.lists(st.sampled_from("ABCDE"), unique=True, max_size=5)


@given(size=st.integers(1, 6), observed=st.lists(requests, max_size=20))
def test_counts_are_those_of_the_last_requests(size: int, observed: list[list[str]]) -> None:
    window = AccessWindow[str](size)
    for seen in range(len(observed)):
        window.observe(observed[seen])
        recent = observed[max(0, seen + 1 - size) : seen + 1]
        for key in "ABCDEX":
            assert window.count(key) == sum(key in request for request in recent)
        assert len(window) == len(set().union(*recent))


@given(size=st.integers(1, 6), observed=st.lists(requests, max_size=20))
def test_requests_are_bitsets_of_the_window_places(size: int, observed: list[list[str]]) -> None:
    window = AccessWindow[str](size)
    for request in observed:
        window.observe(request)
    recent = list(enumerate(observed))[-size:]
    expected = [sum(1 << (i % size) for i, request in recent if key in request) for key in "ABCDEX"]
    assert window.requests("ABCDEX") == expected


@given(size=st.integers(1, 6), observed=st.lists(requests, min_size=1, max_size=20), data=st.data())
def test_latest_of_some_requests(size: int, observed: list[list[str]], data: st.DataObject) -> None:
    window = AccessWindow[str](size)
    places: list[int] = []
    for request in observed:
        places.append(window.next_place)
        window.observe(request)
    recent = places[-size:]
    chosen = data.draw(st.lists(st.integers(0, len(recent) - 1), min_size=1, unique=True))
    assert window.latest(sum(1 << recent[i] for i in chosen)) == recent[max(chosen)]


def test_no_blocks_are_in_no_request() -> None:
    window = AccessWindow[str]()
    window.observe(["A"])
    assert window.requests([]) == []


def test_request_is_dropped_when_it_leaves_the_window() -> None:
    window = AccessWindow[str](2)
    for request in (["A", "B"], ["A"], ["C"]):
        window.observe(request)
    assert (window.count("A"), window.count("B")) == (1, 0)


def test_empty_request_takes_a_place_in_the_window() -> None:
    window = AccessWindow[str](2)
    requests: list[Sequence[str]] = [["A"], [], []]
    for request in requests:
        window.observe(request)
    assert len(window) == window.count("A") == 0


def test_observed_list_may_change_later() -> None:
    window = AccessWindow[str](1)
    request = ["A"]
    window.observe(request)
    request[0] = "B"
    window.observe([])
    assert len(window) == 0


def test_memory_is_bounded_by_the_blocks_of_the_window() -> None:
    window = AccessWindow[int](50)
    for i in range(1_000):
        window.observe(range(10 * i, 10 * i + 10))
        assert len(window) <= 500
    assert max(bits.bit_length() for bits in window.requests(range(10_000))) <= 50


@pytest.mark.parametrize("size", [0, -3])
def test_window_of_size_below_one_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"size must be 1 or more, got {size}"):
        AccessWindow[str](size)
