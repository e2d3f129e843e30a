"""Both classes around the clients of Mem0's hosted API, over HTTP."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import pytest_asyncio
from mem0 import AsyncMemoryClient, MemoryClient
from mem0.client.types import SearchMemoryOptions

from warmprefix_mem0 import AsyncContextReuseMemory, ContextReuseMemory

FACTS = [f"Ann's fact number {i} is about {about}" for i, about in enumerate(("tea", "work", "cats", "music", "sea"))]
QUESTIONS = (("Ann's fact about tea", 3), ("number 3 is music", 4), ("the fact about cats and sea", 5))

Listen = Callable[[Any], list[dict[str, Any]]]
Call = tuple[tuple[Any, ...], dict[str, Any]]


def texts(found: dict[str, Any]) -> list[str]:
    return [entry["memory"] for entry in found["results"]]


def _by_keywords(question: str, user: str, top_k: int) -> Call:
    return (question,), {"filters": {"user_id": user}, "top_k": top_k}


def _by_options(question: str, user: str, top_k: int) -> Call:
    return (question, SearchMemoryOptions(filters={"user_id": user}, top_k=top_k)), {}


def _by_named_options(question: str, user: str, top_k: int) -> Call:
    filters = {"AND": [{"user_id": user}]}
    return (), {"query": question, "options": SearchMemoryOptions(filters=filters, top_k=top_k)}


def _by_both(question: str, user: str, top_k: int) -> Call:
    options = SearchMemoryOptions(filters={"user_id": "zoe"}, top_k=top_k)
    return (question, options), {"filters": {"user_id": user}}


CALLS = [_by_keywords, _by_options, _by_named_options, _by_both]


@pytest.fixture
def facts(hosted: Any, remember: Callable[..., list[str]]) -> Any:
    for user in ("ann", "bob"):
        remember(hosted.memory, *(f"{user}: {fact}" for fact in FACTS), user_id=user)
    return hosted


@pytest.fixture
def client(facts: Any) -> Iterator[Any]:
    client = MemoryClient(api_key=facts.key, host=facts.host)
    yield client
    client.client.close()


@pytest_asyncio.fixture
async def async_client(facts: Any) -> AsyncIterator[Any]:
    async with AsyncMemoryClient(api_key=facts.key, host=facts.host) as client:
        yield client


def check(plain: dict[str, Any], found: dict[str, Any], last: list[str]) -> list[str]:
    assert found.keys() == plain.keys() | {"context", "order_annotation"}
    assert {entry["id"]: entry for entry in found["results"]} == {entry["id"]: entry for entry in plain["results"]}
    kept = [text for text in last if text in texts(plain)]
    assert texts(found) == [*kept, *(text for text in texts(plain) if text not in kept)]
    assert found["context"] == "\n".join(f"- {text}" for text in texts(found))
    return texts(found)


@pytest.mark.parametrize("call", CALLS)
def test_client(facts: Any, client: Any, log_searches: Listen, call: Callable[[str, str, int], Call]) -> None:
    results = log_searches(client)
    ours = ContextReuseMemory(client)
    last: dict[str, list[str]] = {"ann": [], "bob": []}
    for question, top_k in QUESTIONS:
        for user in last:
            args, options = call(question, user, top_k)
            found = ours.search(*args, **options)
            last[user] = check(results[-1], found, last[user])
            assert facts.searches[-1]["top_k"] == top_k


@pytest.mark.parametrize("call", CALLS)
async def test_async_client(async_client: Any, log_searches: Listen, call: Callable[[str, str, int], Call]) -> None:
    results = log_searches(async_client)
    ours = AsyncContextReuseMemory(async_client)
    last: dict[str, list[str]] = {"ann": [], "bob": []}
    for question, top_k in QUESTIONS:
        for user in last:
            args, options = call(question, user, top_k)
            found = await ours.search(*args, **options)
            last[user] = check(results[-1], found, last[user])


async def test_async_client_is_closed_as_ever(async_client: Any) -> None:
    async with AsyncContextReuseMemory(async_client) as ours:
        assert not ours.async_client.is_closed
    assert async_client.async_client.is_closed


@pytest.mark.parametrize("options", [{}, {"user_id": "ann"}, {"filters": {"topic": "food"}}])
def test_error_of_the_api_passes_through(client: Any, options: dict[str, Any]) -> None:
    with pytest.raises(Exception) as theirs:  # noqa: PT011
        client.search("tea", **options)
    with pytest.raises(theirs.type) as passed:
        ContextReuseMemory(client).search("tea", **options)
    assert str(passed.value) == str(theirs.value)


def test_all_else_is_the_clients(client: Any) -> None:
    ours = ContextReuseMemory(client)
    [entry, *_] = ours.search("tea", filters={"user_id": "ann"})["results"]
    assert ours.get(entry["id"]) == client.get(entry["id"])
    assert ours.user_email == "a@example.com"


async def test_wrong_kind_names_the_class_to_use(client: Any, async_client: Any) -> None:
    with pytest.raises(TypeError, match="use AsyncContextReuseMemory for AsyncMemoryClient"):
        ContextReuseMemory(async_client)
    with pytest.raises(TypeError, match="use ContextReuseMemory for MemoryClient"):
        AsyncContextReuseMemory(client)
