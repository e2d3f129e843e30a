"""`AsyncContextReuseMemory` around a real `AsyncMemory`."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
from mem0 import AsyncMemory

from warmprefix import ContextPlanner
from warmprefix_mem0 import AsyncContextReuseMemory

ANN = {"user_id": "ann"}
FACTS = [f"Ann's fact number {i} is about {about}" for i, about in enumerate(("tea", "work", "cats", "music", "sea"))]


@pytest_asyncio.fixture
async def facts(open_memory: Callable[..., Any]) -> AsyncIterator[Any]:
    memory = open_memory(AsyncMemory)
    for user in ("ann", "bob"):
        for fact in FACTS:
            await memory.add(f"{user}: {fact}", user_id=user, infer=False)
    yield memory


def texts(found: dict[str, Any]) -> list[str]:
    return [entry["memory"] for entry in found["results"]]


async def test_result_is_the_memorys_own_with_two_more_keys_and_the_last_one_in_front(
    facts: Any, log_searches: Callable[[Any], list[dict[str, Any]]]
) -> None:
    results = log_searches(facts)
    ours = AsyncContextReuseMemory(facts)
    last: list[str] = []
    for question, top_k in (("Ann's fact about tea", 3), ("number 3 is music", 4), ("the fact about cats and sea", 5)):
        found = await ours.search(question, filters=ANN, top_k=top_k, threshold=0.0)
        plain = results[-1]
        assert found.keys() == plain.keys() | {"context", "order_annotation"}
        assert {entry["id"]: entry for entry in found["results"]} == {entry["id"]: entry for entry in plain["results"]}
        kept = [text for text in last if text in texts(plain)]
        assert texts(found) == [*kept, *(text for text in texts(plain) if text not in kept)]
        assert found["context"] == "\n".join(f"- {text}" for text in texts(found))
        last = texts(found)


async def test_search_is_a_coroutine_function_with_the_same_signature(facts: Any) -> None:
    search = AsyncContextReuseMemory(facts).search
    assert inspect.iscoroutinefunction(search)
    assert inspect.signature(search) == inspect.signature(facts.search)


async def test_many_tasks_share_one(facts: Any) -> None:
    ours = AsyncContextReuseMemory(facts)
    users = [("ann", "bob")[i % 2] for i in range(24)]
    searches = [ours.search(FACTS[i % 5], filters={"user_id": user}, threshold=0.0) for i, user in enumerate(users)]
    for user, found in zip(users, await asyncio.gather(*searches), strict=True):
        assert sorted(texts(found)) == sorted(f"{user}: {fact}" for fact in FACTS)


async def test_searches_that_are_planned_together_share_a_prefix() -> None:
    class Finds:
        async def search(self, query: list[str], **kwargs: Any) -> dict[str, Any]:
            return {"results": [{"memory": text} for text in query]}

    ours = AsyncContextReuseMemory(Finds(), ContextPlanner())
    asked = [[fact, "Ann's fact that all searches find"] for fact in FACTS[:3]]
    for found in await asyncio.gather(*[ours.search(question, filters=ANN) for question in asked]):
        assert texts(found)[0] == "Ann's fact that all searches find"


async def test_mem0s_own_exceptions_and_cancellation_pass_through(facts: Any) -> None:
    ours = AsyncContextReuseMemory(facts)
    with pytest.raises(ValueError, match="filters") as theirs:
        await facts.search("tea")
    with pytest.raises(ValueError, match=re.escape(str(theirs.value))):
        await ours.search("tea")
    task = asyncio.create_task(ours.search("tea", filters=ANN))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_all_else_is_the_wrapped_memorys(facts: Any) -> None:
    ours = AsyncContextReuseMemory(facts)
    [added] = (await ours.add("Ann sings", user_id="ann", infer=False))["results"]
    assert await ours.get(added["id"]) == await facts.get(added["id"])
    if hasattr(AsyncMemory, "__aenter__"):
        async with ours as entered:
            assert entered is ours
    else:
        with pytest.raises(AttributeError, match="__aenter__"):
            await ours.__aenter__()
        ours.close()
    assert facts.db is None
