"""The order that stays, against a plain model of it."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix_mem0 import ContextReuseMemory

TEXTS = [f"memory {i} " + "word " * (i % 3) for i in range(9)]

requests = st.lists(st.sampled_from(TEXTS), unique=True, max_size=7)


class Finds:
    """A memory that finds what it is asked for."""

    def search(self, query: list[str], **kwargs: Any) -> dict[str, Any]:
        return {"results": [{"id": text[:8], "memory": text} for text in query]}


def tokens(texts: list[str]) -> int:
    return sum((len(text) + 3) // 4 for text in texts)


def held(order: list[str], served: list[list[str]]) -> int:
    """Tokens of `order` that an engine holds which never forgets what it was served."""
    return max((tokens(shared_beginning(order, earlier)) for earlier in served), default=0)


def shared_beginning(one: list[str], other: list[str]) -> list[str]:
    return [text for text, _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other))]  # noqa: B905


def longest_held(request: list[str], served: list[list[str]]) -> int:
    """Tokens of the longest path that holds nothing but the request's memories."""
    return max((tokens(list(takewhile(request.__contains__, earlier))) for earlier in served), default=0)


@given(st.lists(st.tuples(st.sampled_from(["ann", "bob"]), requests), max_size=14))
@example([("ann", [TEXTS[0], TEXTS[3]]), ("ann", [TEXTS[6], TEXTS[3]]), ("ann", [TEXTS[0], TEXTS[6], TEXTS[3]])])
def test_last_result_stays_in_front_unless_more_is_held_of_another(searches: list[tuple[str, list[str]]]) -> None:
    ours = ContextReuseMemory(Finds())
    served: dict[str, list[list[str]]] = {"ann": [], "bob": []}
    for user, request in searches:
        found = [entry["memory"] for entry in ours.search(request, filters={"user_id": user})["results"]]
        last = served[user][-1] if served[user] else []
        kept = [text for text in last if text in request]
        new = [text for text in request if text not in kept]
        best = longest_held(request, served[user])
        assert sorted(found) == sorted(request)
        assert held(found, served[user]) == best
        if held(kept, served[user]) == best:
            assert found == kept + new
        else:
            # Another path comes first: the rest keeps its place behind it.
            path = next(found[:i] for i in range(len(found) + 1) if tokens(found[:i]) == best)
            assert found == [*path, *(t for t in kept if t not in path), *(t for t in new if t not in path)]
        if found:
            served[user].append(found)


@given(st.lists(requests, min_size=1, max_size=4))
def test_same_memories_in_any_rank_order_are_served_in_the_same_order(searches: list[list[str]]) -> None:
    ours = ContextReuseMemory(Finds())
    for request in searches:
        first = ours.search(request, filters={"user_id": "ann"})
        again = ours.search(request[::-1], filters={"user_id": "ann"})
        assert again == first
