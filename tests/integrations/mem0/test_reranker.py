"""The reranker, named in Mem0's own configuration."""

from __future__ import annotations

import logging
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mem0 import AsyncMemory
from mem0.utils.factory import RerankerFactory

from warmprefix import ContextPlan, ContextPlanner
from warmprefix_mem0 import ContextReuseReranker, register

Open = Callable[..., Any]
Remember = Callable[..., list[str]]
Ranked = list[list[dict[str, Any]]]

ANN = {"user_id": "ann"}
FACTS = [f"Ann's fact number {i} is about {about}" for i, about in enumerate(("tea", "work", "cats", "music", "sea"))]
QUESTIONS = (("Ann's fact about tea", 3), ("number 3 is music", 4), ("the fact about cats and sea", 5))
RERANKER = {"reranker": {"provider": "warmprefix"}}


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RerankerFactory, "provider_to_class", dict(RerankerFactory.provider_to_class))
    register()


def without_score(entry: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in entry.items() if key != "rerank_score"}


@pytest.fixture
def ranked(monkeypatch: pytest.MonkeyPatch) -> list[list[dict[str, Any]]]:
    """The memories of each search in relevance order, as Mem0 handed them over."""
    handed_over: list[list[dict[str, Any]]] = []
    rerank = ContextReuseReranker.rerank

    def recorded(self: ContextReuseReranker, query: str, documents: Any, top_k: int | None = None) -> Any:
        handed_over.append(deepcopy(documents))
        return rerank(self, query, documents, top_k)

    monkeypatch.setattr(ContextReuseReranker, "rerank", recorded)
    return handed_over


def check(plain: list[dict[str, Any]], found: dict[str, Any], last: list[str]) -> list[str]:
    entries = {entry["id"]: entry for entry in plain}
    assert {entry["id"]: without_score(entry) for entry in found["results"]} == entries
    scores = [entry["rerank_score"] for entry in found["results"]]
    assert scores == sorted(set(scores), reverse=True)
    kept = [name for name in last if name in entries]
    order = [entry["id"] for entry in found["results"]]
    assert order == [*kept, *(name for name in entries if name not in kept)]
    return order


def test_memory_made_from_configuration(open_memory: Open, remember: Remember, ranked: Ranked) -> None:
    memory = open_memory(**RERANKER)
    assert isinstance(memory.reranker, ContextReuseReranker)
    remember(memory, *FACTS, user_id="ann")
    remember(memory, *FACTS, user_id="bob")
    last: dict[str, list[str]] = {"ann": [], "bob": []}
    for question, top_k in QUESTIONS:
        for user in last:
            options = {"filters": {"user_id": user}, "top_k": top_k, "threshold": 0.0}
            found = memory.search(question, rerank=True, **options)
            assert len(found["results"]) == top_k
            last[user] = check(ranked[-1], found, last[user])


async def test_async_memory_made_from_configuration(open_memory: Open, ranked: Ranked) -> None:
    memory = open_memory(AsyncMemory, **RERANKER)
    for fact in FACTS:
        await memory.add(fact, user_id="ann", infer=False)
    last: list[str] = []
    for question, top_k in QUESTIONS:
        options = {"filters": ANN, "top_k": top_k, "threshold": 0.0}
        found = await memory.search(question, rerank=True, **options)
        assert len(found["results"]) == top_k
        last = check(ranked[-1], found, last)


def test_configuration_may_name_a_planner(open_memory: Open, remember: Remember, ranked: Ranked) -> None:
    planner = ContextPlanner(policy="relevance")
    memory = open_memory(reranker={"provider": "warmprefix", "config": {"planner": planner, "tenant": "acme"}})
    remember(memory, *FACTS, user_id="ann")
    for question, _ in QUESTIONS:
        found = memory.search(question, filters=ANN, threshold=0.0, rerank=True)["results"]
        assert list(map(without_score, found)) == ranked[-1]
    assert planner.stats().commits == len(QUESTIONS)


class BrokenPlanner(ContextPlanner):
    def plan(self, *args: Any, **kwargs: Any) -> ContextPlan:
        raise RuntimeError("broken")


def test_failing_planner_leaves_the_order_as_it_was(caplog: pytest.LogCaptureFixture) -> None:
    documents = [{"id": str(i), "memory": fact, "user_id": "ann"} for i, fact in enumerate(FACTS)]
    reranker = ContextReuseReranker({"planner": BrokenPlanner()})
    with caplog.at_level(logging.WARNING, "warmprefix"):
        assert list(map(without_score, reranker.rerank("tea", documents))) == documents
    assert "broken" in caplog.text


def test_cuts_by_relevance_before_it_orders() -> None:
    documents = [{"id": str(i), "memory": fact, "user_id": "ann"} for i, fact in enumerate(FACTS)]
    reranker = ContextReuseReranker({"top_k": 4})
    assert [entry["id"] for entry in reranker.rerank("tea", documents)] == ["0", "1", "2", "3"]
    assert [entry["id"] for entry in reranker.rerank("tea", documents[::-1], top_k=3)] == ["2", "3", "4"]


@pytest.fixture(scope="module")
def owners() -> list[dict[str, str]]:
    return [{}, {"user_id": "ann"}, {"user_id": "bob"}, {"agent_id": "bot"}, {"user_id": "ann", "run_id": "1"}]


@given(data=st.data())
def test_nothing_is_lost_and_no_user_feels_another(data: st.DataObject, owners: list[dict[str, str]]) -> None:
    reranker, alone = ContextReuseReranker(), ContextReuseReranker()
    for _ in range(4):
        names = data.draw(st.lists(st.integers(0, 8), unique=True))
        documents = [{"id": str(i), "memory": f"fact {i % 5}", **owners[i % len(owners)]} for i in names]
        ranked = reranker.rerank("?", documents)
        assert sorted(map(repr, map(without_score, ranked))) == sorted(map(repr, documents))
        bobs = [document | {"user_id": "eve"} for document in documents]
        assert reranker.rerank("?", bobs) == alone.rerank("?", bobs)
