"""`choose=`: more memories than places, from a real Mem0; which are returned, and in what shape."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mem0 import AsyncMemory, AsyncMemoryClient, MemoryClient
from mem0.client.types import SearchMemoryOptions
from mem0.utils.factory import RerankerFactory

from warmprefix import Branch, Choice, ContextPlanner
from warmprefix_mem0 import AsyncContextReuseMemory, ContextReuseMemory, register

ANN = {"user_id": "ann"}
SUBJECTS = ("tea", "work", "cats", "music", "the sea", "bread", "snow", "trains", "maps", "chess", "salt", "glass")
FACTS = [
    f"Ann said in week {week} that {subject} matters to her, and why: {f'{subject} and week {week} go together ' * 3}"
    for week in (1, 2)
    for subject in SUBJECTS
]
QUESTIONS = [
    f"Why does {one} matter to Ann, like {other}?"
    for one, other in zip(SUBJECTS, SUBJECTS[1:] + SUBJECTS[:1], strict=True)
] * 2
CHOICE = Choice(k=4, keep=2, within=0.5, most=1)

Remember = Callable[..., list[str]]
Listen = Callable[[Any], list[dict[str, Any]]]


class Replies:
    """Memory with a given result, which keeps the options of its searches."""

    def __init__(self, found: Sequence[Any]) -> None:
        self.found = found
        self.asked: list[dict[str, Any]] = []

    def search(self, query: str, options: Any = None, **kwargs: Any) -> Any:
        self.asked.append(kwargs)
        return {"results": list(self.found), "relations": [{"source": "ann"}]}


def entries(*scores: Any, **more: Any) -> list[dict[str, Any]]:
    return [{"id": str(i), "memory": f"memory {i} " * 9, "score": score, **more} for i, score in enumerate(scores)]


def ids(found: Any) -> list[str]:
    return [entry["id"] for entry in found["results"]]


def chosen(plain: dict[str, Any], found: dict[str, Any], k: int = CHOICE.k) -> int:
    """Check a result against that of Mem0 itself; return how many memories entered by choice."""
    assert found.keys() == plain.keys() | {"context", "order_annotation"}
    candidates = {entry["id"]: entry for entry in plain["results"]}
    scores = [entry["score"] for entry in plain["results"]]
    assert scores == sorted(scores, reverse=True)  # similarities, the best first
    assert len({*ids(found)}) == len(found["results"]) == min(k, len(candidates))
    assert all(entry == candidates[entry["id"]] for entry in found["results"])
    assert {*ids(plain)[:2]} <= {*ids(found)}
    assert all(entry["score"] >= 1.5 * scores[k - 1] - 0.5 * scores[0] - 1e-9 for entry in found["results"])
    assert found["context"] == "\n".join(f"- {entry['memory']}" for entry in found["results"])
    return len({*ids(found)} - {*ids(plain)[:k]})


@pytest.mark.parametrize("is_async", [False, True])
async def test_memories_that_the_engine_holds_enter_with_their_scores(
    is_async: bool, open_memory: Callable[..., Any], log_searches: Listen
) -> None:
    memory = open_memory(AsyncMemory) if is_async else open_memory()
    for fact in FACTS:
        added = memory.add(fact, infer=False, **ANN)
        _ = await added if is_async else added
    plain = log_searches(memory)
    ours: Any = (AsyncContextReuseMemory if is_async else ContextReuseMemory)(memory, choose=CHOICE)
    entered = 0
    for question in QUESTIONS:
        searched = ours.search(question, filters=ANN, threshold=0.0)
        found = await searched if is_async else searched
        assert len(plain[-1]["results"]) == 10
        entered += chosen(plain[-1], found)
        if question == QUESTIONS[0] and len(plain) == 1:
            assert ids(found) == ids(plain[0])[:4]
    assert entered


@pytest.fixture
def facts(memory: Any, remember: Remember) -> Any:
    remember(memory, *FACTS, **ANN)
    return memory


def test_top_k_of_a_call_lowers_the_places_or_raises_the_candidates(facts: Any, log_searches: Listen) -> None:
    plain = log_searches(facts)
    ours = ContextReuseMemory(facts, choose=Choice(k=4, keep=3))
    for top_k, places, candidates in ((None, 4, 10), (1, 1, 3), (2, 2, 5), (4, 4, 10), (5, 4, 10), (16, 4, 16)):
        options = {} if top_k is None else {"top_k": top_k}
        found = ours.search(QUESTIONS[0], filters=ANN, threshold=0.0, **options)
        assert (len(found["results"]), len(plain[-1]["results"])) == (places, candidates)
    assert ours.search(QUESTIONS[0], filters=ANN, top_k=0)["results"] == []
    for wrong in (-1, "4", True, 2.5):
        with pytest.raises(ValueError, match="top_k"):
            ours.search(QUESTIONS[0], filters=ANN, top_k=wrong)
    assert ours.search(QUESTIONS[0], filters={"user_id": "bob"})["results"] == []
    close = ours.search(QUESTIONS[0], filters=ANN, threshold=plain[1]["results"][1]["score"] - 1e-6)
    assert len(close["results"]) <= 4  # Mem0 found fewer


async def test_the_hosted_api_is_asked_for_the_candidates(hosted: Any, remember: Remember) -> None:
    remember(hosted.memory, *FACTS, **ANN)
    client = MemoryClient(api_key=hosted.key, host=hosted.host)
    later = AsyncMemoryClient(api_key=hosted.key, host=hosted.host)
    ours, theirs = ContextReuseMemory(client, choose=CHOICE), AsyncContextReuseMemory(later, choose=CHOICE)
    calls: list[tuple[tuple[Any, ...], dict[str, Any], int]] = [
        ((), {"filters": ANN}, 10),
        ((), {"filters": ANN, "top_k": 2}, 5),
        ((SearchMemoryOptions(filters=ANN, top_k=12),), {}, 12),
        ((), {"options": SearchMemoryOptions(filters=ANN, top_k=3)}, 8),
        ((SearchMemoryOptions(filters=ANN),), {"top_k": 4}, 10),
    ]
    for args, options, candidates in calls:
        for found in (
            await asyncio.to_thread(ours.search, QUESTIONS[0], *args, **options),
            await theirs.search(QUESTIONS[0], *args, **options),
        ):
            assert hosted.searches[-1]["top_k"] == candidates
            assert len(found["results"]) == min(4, int(candidates / 2.5))
            assert all("categories" in entry for entry in found["results"])
    client.client.close()
    await later.async_client.aclose()


def test_a_reranker_decides_by_its_own_scores(
    open_memory: Callable[..., Any], remember: Remember, log_searches: Listen, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RerankerFactory, "provider_to_class", dict(RerankerFactory.provider_to_class))
    register()
    memory = open_memory(reranker={"provider": "warmprefix"})
    remember(memory, *FACTS, **ANN)
    plain = log_searches(memory)
    ours = ContextReuseMemory(memory, choose=CHOICE)
    is_other = 0
    for question in QUESTIONS[:8]:
        found = ours.search(question, filters=ANN, threshold=0.0, rerank=True)
        scores = [entry["score"] for entry in plain[-1]["results"]]
        is_other += scores != sorted(scores, reverse=True)
        assert {*ids(plain[-1])[:2]} <= {*ids(found)}
        assert len(found["results"]) == 4
    assert is_other
    assert ours.search("?", filters={"user_id": "bob"}, rerank=True)["results"] == []


@pytest.mark.parametrize(
    "found",
    [
        entries(None, None, None, None),
        entries(0.9, float("nan"), 0.8, 0.7),
        entries(0.1, 0.2, 0.3, 0.4),
        entries(0.9, 0.8, 0.7, "0.6"),
        [{key: value for key, value in entry.items() if key != "score"} for entry in entries(1, 2, 3, 4)],
        [*entries(0.9, 0.8, 0.7), "no entry"],
    ],
    ids=["none", "nan", "rising", "text", "absent", "no entry"],
)
def test_without_usable_scores_the_first_memories_are_returned(
    found: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    ours = ContextReuseMemory(Replies(found), choose=Choice(k=2))
    with caplog.at_level(logging.DEBUG, logger="warmprefix"):
        for _ in range(2):
            result = ours.search("?", filters=ANN)
            assert result["results"] == found[:2]
            assert result["relations"] == [{"source": "ann"}]
            assert result["context"] == f"- {found[0]['memory']}\n- {found[1]['memory']}"
    assert [record.levelno for record in caplog.records] == [logging.WARNING, logging.DEBUG]


def test_equal_memories_count_once_and_those_without_text_are_left_out() -> None:
    found = entries(0.9, 0.8, 0.7, 0.6, 0.5)
    found[1]["memory"], found[2]["memory"] = found[0]["memory"], " "
    ours = ContextReuseMemory(Replies(found), choose=Choice(k=2))
    assert ids(ours.search("?", filters=ANN)) == ["0", "3"]


def test_reranked_scores_count_only_if_all_have_one() -> None:
    found = entries(0.1, 0.2, 0.3, rerank_score=0.5)
    ours = ContextReuseMemory(Replies(found), choose=Choice(k=2))
    assert ids(ours.search("?", filters=ANN)) == ["0", "1"]
    del found[2]["rerank_score"]
    assert ids(ContextReuseMemory(Replies(found[::-1]), choose=Choice(k=2)).search("?", filters=ANN)) == ["2", "1"]


def test_versions_and_twins_are_read_from_memories() -> None:
    found = entries(0.9, 0.8, 0.7, 0.6, 0.5)
    for entry, topic, day in zip(found, ["a", "b", "a", "c", "d"], [1, 1, 2, 1, 1], strict=True):
        entry["metadata"] = {"topic": topic, "day": day}
    newest = Choice(k=3, version=lambda entry: (entry["metadata"]["topic"], entry["metadata"]["day"]))
    assert sorted(ids(ContextReuseMemory(Replies(found), choose=newest).search("?", filters=ANN))) == ["1", "2", "3"]
    one_a_topic = Choice(k=3, twins=lambda entry: entry["metadata"]["topic"])
    assert ids(ContextReuseMemory(Replies(found), choose=one_a_topic).search("?", filters=ANN)) == ["0", "1"]


@pytest.mark.parametrize("conversation", ["chat", Branch(after=None)])
def test_in_a_conversation_the_first_memories_are_fed(
    conversation: str | Branch, facts: Any, log_searches: Listen
) -> None:
    plain = log_searches(facts)
    ours = ContextReuseMemory(facts, ContextPlanner(), choose=CHOICE)
    shown: set[str] = set()
    for turn, question in enumerate(QUESTIONS[:4]):
        found = ours.search(question, filters=ANN, threshold=0.0, conversation=conversation)
        assert ids(found) == ids(plain[-1])[:4]
        for entry in found["results"]:
            assert (entry["memory"] in found["context"]) == (entry["id"] not in shown)
        assert ours.commit(found, turn_id=f"turn {turn}")
        shown |= {*ids(found)}
        conversation = conversation if isinstance(conversation, str) else Branch(after=f"turn {turn}")


def test_a_wrong_configuration_is_refused() -> None:
    replies = Replies(())
    with pytest.raises(ValueError, match=r"choose\.scores must be 'similarity', as Mem0's scores are, got 'distance'"):
        ContextReuseMemory(replies, choose=Choice(k=2, scores="distance"))
    with pytest.raises(ValueError, match="choose must be None with order_locked=True"):
        ContextReuseMemory(replies, choose=CHOICE, order_locked=True)
    with pytest.raises(TypeError, match="choose must be a Choice or None, got int"):
        ContextReuseMemory(replies, choose=8)  # type: ignore[arg-type]


@given(
    st.lists(st.lists(st.tuples(st.text("ab ", max_size=3), st.none() | st.floats()), max_size=8), max_size=4),
    st.integers(1, 4),
    st.booleans(),
)
def test_whatever_is_found_the_first_are_returned_and_nothing_else_than_found(
    searches: list[list[tuple[str, float | None]]], k: int, is_sorted: bool
) -> None:
    replies = Replies(())
    ours = ContextReuseMemory(replies, choose=Choice(k=k, keep=1, most=1))
    for search in searches:
        pairs = list(dict(search).items())
        if is_sorted:
            pairs = [(text, score or 0.0) for text, score in pairs]
            pairs.sort(key=lambda pair: pair[1] or 0.0, reverse=True)
        replies.found = [{"id": text, "memory": text * 5, "score": score} for text, score in pairs]
        found = ours.search("?", filters=ANN)
        with_text = [entry for entry in replies.found if entry["memory"].strip()]
        returned = [entry for entry in found["results"] if entry["memory"].strip()]
        assert all(entry in replies.found or entry["score"] != entry["score"] for entry in found["results"])
        assert len(returned) == min(k, len(with_text))
        assert {entry["id"] for entry in with_text[:1]} <= {*ids(found)}
