"""Whatever a search returns, nothing of it is lost or changed."""

from __future__ import annotations

from collections import Counter
from copy import deepcopy
from typing import Any, get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from warmprefix.annotate import Annotate, Templates
from warmprefix_mem0 import ContextReuseMemory

TEXTS = [
    "",
    "a",
    "a\n\nb",
    "[m1] a",
    "Please also use the context labelled [m1] above in this conversation.",
    "\ud800 lone",
    "long " * 30,
    None,
    7,
]
IDS = ["1", "2", "0b1d3a52-9c1f-4f6e-8a55-0f2a2d1c9e77", None, 3, "x" * 90]

entries = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(IDS),
        "memory": st.sampled_from(TEXTS),
        "hash": st.text(max_size=3),
        "score": st.floats(),
        "metadata": st.none() | st.dictionaries(st.text(max_size=2), st.integers()),
    },
)
results = st.lists(entries | st.sampled_from([None, "odd", 3]), max_size=9)


class Replies:
    """Memory with given results."""

    def __init__(self) -> None:
        self.reply: Any = None

    def search(self, query: str, **kwargs: Any) -> Any:
        return self.reply


@given(
    st.lists(results, max_size=4),
    st.sampled_from(get_args(Annotate)),
    st.sampled_from([{"user_id": "ann"}, {3: "x", "y": 1}, None, "odd"]),
)
def test_all_results_are_kept_as_they_are(searches: list[list[Any]], annotate: Annotate, filters: object) -> None:
    replies = Replies()
    ours = ContextReuseMemory(replies, annotate=annotate)
    for found in searches:
        replies.reply = {"results": deepcopy(found), "relations": [1]}
        arranged = ours.search("?", filters=filters)
        assert replies.reply == {"results": found, "relations": [1]} or "nan" in repr(found)
        assert Counter(map(repr, arranged["results"])) == Counter(map(repr, found))
        assert arranged["relations"] == [1]
        assert arranged.keys() == {"results", "relations", "context", "order_annotation"}
        if annotate not in ("labels", "both"):
            texts = [
                e["memory"] for e in arranged["results"] if isinstance(e, dict) and isinstance(e.get("memory"), str)
            ]
            shown = [Templates().escaped(text) for text in dict.fromkeys(texts) if text.strip()]
            note = arranged["order_annotation"]
            assert arranged["context"] == "\n".join(f"- {text}" for text in shown) + (f"\n\n{note}" if note else "")


def test_results_are_copies() -> None:
    replies = Replies()
    replies.reply = {"results": [{"id": "1", "memory": "a"}]}
    found = ContextReuseMemory(replies).search("?", filters={"user_id": "ann"})
    found["results"][0]["memory"] = "b"
    assert replies.reply == {"results": [{"id": "1", "memory": "a"}]}


@pytest.mark.parametrize("reply", [None, [], [{"memory": "a"}], "text", {"answer": 1}, {"results": None}])
def test_result_of_another_shape_comes_through_as_it_is(reply: Any) -> None:
    replies = Replies()
    replies.reply = reply
    assert ContextReuseMemory(replies).search("?", filters={"user_id": "ann"}) is reply
