"""Neighbours in one source, pins, and items that keep their places."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix import ContextBlock
from warmprefix.blocks import evidence_blocks, joined_blocks
from warmprefix_requests.neighbours import SourcePlace, neighbours, pin_of, with_kept_places


def place(metadata: dict[str, Any], characters: int = 100) -> SourcePlace:
    return SourcePlace.of_metadata(metadata, characters)


@pytest.mark.parametrize(
    ("before", "after", "continues"),
    [
        ({"source": "a", "start_index": 0}, {"source": "a", "start_index": 100}, True),
        ({"source": "a", "start_index": 0}, {"source": "a", "start_index": 80}, True),
        ({"source": "a", "start_index": 0}, {"source": "a", "start_index": 102}, True),
        ({"source": "a", "start_index": 0}, {"source": "a", "start_index": 200}, False),
        ({"source": "a", "start_index": 80}, {"source": "a", "start_index": 0}, False),
        ({"source": "a", "start_index": 0}, {"source": "a", "start_index": 0}, False),
        ({"source": "a", "start_index": 0}, {"source": "b", "start_index": 100}, False),
        ({"start_index": 0}, {"start_index": 100}, False),
        ({"source": "a"}, {"source": "a"}, False),
        ({"source": "a", "page": 3}, {"source": "a", "page": 4}, True),
        ({"source": "a", "page": 3}, {"source": "a", "page": 5}, False),
        ({"source": "a", "page": 4}, {"source": "a", "page": 3}, False),
        ({"source": "a", "page": 3}, {"source": "a", "page": 3}, False),
        ({"source": "a", "page": 3}, {"source": "a"}, False),
        ({"file_path": "a", "page_label": "9"}, {"file_path": "a", "page_label": "10"}, True),
        ({"file_path": "a", "page_label": "ix"}, {"file_path": "a", "page_label": "x"}, False),
        ({"source": "a", "page": 3, "start_index": 0}, {"source": "a", "page": 3, "start_index": 100}, True),
        ({"source": "a", "page": 3, "start_index": 0}, {"source": "a", "page": 4, "start_index": 0}, True),
        ({"source": "a", "page": 3, "start_index": 0}, {"source": "a", "page": 4, "start_index": 100}, False),
        ({"source": ["a"], "page": 3}, {"source": ["a"], "page": 4}, False),
        ({"source": "a", "page": True}, {"source": "a", "page": 2}, False),
        ({"source": "a", "start_index": "0"}, {"source": "a", "start_index": 100.0}, False),
        ({"source": "a", "page": "²"}, {"source": "a", "page": 3}, False),
    ],
)
def test_metadata_decide_what_continues_what(before: dict[str, Any], after: dict[str, Any], continues: bool) -> None:
    assert place(after).continues(place(before)) is continues


Item = tuple[int, str]
items = st.lists(st.tuples(st.integers(0, 4), st.sampled_from(["a", "b", "", " \n"])), max_size=8)


def is_next(item: Item, before: Item) -> bool:
    return item[0] == before[0] + 1


@given(items)
def test_blocks_that_follow_their_neighbours_form_the_same_runs(listed: list[Item]) -> None:
    texts = [text and f"{text}{number}" for number, text in listed]
    blocks: list[ContextBlock] = []
    for text, before in zip(texts, neighbours(listed, texts, is_next), strict=True):
        blocks.append(ContextBlock(text, follows=None if before is None else blocks[before]))
    distinct, places = evidence_blocks(blocks)
    joined = joined_blocks(blocks, places)
    shown = [i for i, block in enumerate(blocks) if not block.is_blank]
    for one, other in pairwise(shown):
        linked = all(is_next(listed[i], listed[i - 1]) for i in range(one + 1, other + 1))
        if distinct and (linked or is_next(listed[other], listed[one])):
            at = {place[0]: i for i, place in enumerate(places)}
            if one in at and other in at:
                assert at[other] in joined


def test_a_picture_between_two_neighbours_does_not_divide_them() -> None:
    listed = [(1, "a"), (2, ""), (3, "c"), (9, ""), (4, "d"), (7, ""), (9, "e")]
    texts = [text for _, text in listed]
    assert neighbours(listed, texts, is_next) == [None, None, 0, None, 2, None, None]


def test_pins_are_read_from_metadata_or_a_function() -> None:
    for value, pin in (("start", "start"), ("end", "end"), ("START", None), (1, None), (["start"], None), (None, None)):
        assert pin_of("place", "item", {"place": value}) == pin
    assert pin_of("place", "item", {}) is None
    assert pin_of(None, "item", {"place": "start"}) is None
    assert pin_of(lambda item: "end" if item == "item" else None, "item", {}) == "end"


@given(st.permutations(range(6)), st.sets(st.integers(0, 5)))
def test_kept_items_stand_where_they_stood(order: list[int], kept: set[int]) -> None:
    moved = [place for place in order if place not in kept]
    arranged = with_kept_places(moved, sorted(kept))
    assert sorted(arranged) == list(range(6))
    assert all(arranged[place] == place for place in kept)
    assert [place for place in arranged if place not in kept] == moved
