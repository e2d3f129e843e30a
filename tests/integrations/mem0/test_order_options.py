"""Orders that are facts: locked orders, pinned memories, and memories without text."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from warmprefix import ContextPlanner
from warmprefix.blocks import Pin
from warmprefix_mem0 import AsyncContextReuseMemory, ContextReuseMemory, ContextReuseReranker

Entry = dict[str, Any]
Arrange = Callable[..., list[Any]]


class Replies:
    """Memory with a given result."""

    def __init__(self, found: Sequence[Any]) -> None:
        self.found = found

    def search(self, query: str, **kwargs: Any) -> Any:
        return {"results": list(self.found)}


class AsyncReplies(Replies):
    async def search(self, query: str, **kwargs: Any) -> Any:
        return super().search(query)


def by_search(found: Sequence[Any], **options: Any) -> list[Any]:
    results: list[Any] = ContextReuseMemory(Replies(found), **options).search("?", filters={"user_id": "ann"})[
        "results"
    ]
    return results


def by_async_search(found: Sequence[Any], **options: Any) -> list[Any]:
    memory = AsyncContextReuseMemory(AsyncReplies(found), **options)
    results: list[Any] = asyncio.run(memory.search("?", filters={"user_id": "ann"}))["results"]
    return results


def by_reranker(found: Sequence[Any], **options: Any) -> list[Any]:
    ranked = ContextReuseReranker(options).rerank("?", list(found))
    return [{key: value for key, value in entry.items() if key != "rerank_score"} for entry in ranked]


@pytest.fixture(params=[by_search, by_async_search, by_reranker])
def arrange(request: pytest.FixtureRequest) -> Arrange:
    """Arrange memories where the engine's cache holds the last of them."""
    by: Arrange = request.param

    def arrange(found: Sequence[Any], **options: Any) -> list[Any]:
        planner = ContextPlanner(policy="greedy")
        by(found[-1:], planner=planner, **options)
        return by(found, planner=planner, **options)

    return arrange


def memory(text: str | None, **fields: Any) -> Entry:
    return {"id": text, "memory": text, "user_id": "ann", **fields}


def test_a_locked_order_is_kept(arrange: Arrange) -> None:
    found = [memory(f"Event {i}.") for i in range(3)]
    assert arrange(found) == [found[2], found[0], found[1]]
    assert arrange(found, order_locked=True) == found


def test_pins_come_from_metadata_or_a_function(arrange: Arrange) -> None:
    found = [memory(f"Event {i}.", metadata={"place": place}) for i, place in enumerate(["end", None, 3, "x"])]

    def by_text(entry: Entry) -> Pin | None:
        return "end" if entry["memory"] == "Event 0." else None

    for rule in ("place", by_text):
        assert arrange(found, pinned=rule) == [found[3], found[1], found[2], found[0]]


def test_memories_without_text_keep_their_places(arrange: Arrange) -> None:
    found = [memory("One."), memory("", image="a"), memory("Two."), memory(None), memory(" "), memory("Three.")]
    assert arrange(found) == [found[5], found[1], found[0], found[3], found[4], found[2]]
    assert arrange([found[1], found[3]]) == [found[1], found[3]]


def test_neighbours_are_not_guessed(arrange: Arrange) -> None:
    """Memories have the time when they were stored, and do not name what they follow."""
    found = [memory(f"Event {i}.", created_at=f"2026-01-0{i + 1}T00:00:00Z", run_id="r") for i in range(3)]
    assert arrange([found[0], found[1], found[2]]) == [found[2], found[0], found[1]]


def test_a_rule_of_another_type_is_refused() -> None:
    with pytest.raises(TypeError, match="pinned must be a metadata key, a function or None, got int"):
        ContextReuseMemory(Replies([]), pinned=3)  # type: ignore[arg-type]
