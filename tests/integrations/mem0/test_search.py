"""`ContextReuseMemory` around a real `Memory`."""

from __future__ import annotations

import copy
import inspect
import logging
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from mem0 import AsyncMemory, Memory

from warmprefix import ContextPlan, ContextPlanner
from warmprefix_mem0 import AsyncContextReuseMemory, ContextReuseMemory

ANN = {"user_id": "ann"}
BOB = {"user_id": "bob"}
FACTS = (
    "Ann drinks green tea every morning",
    "Ann cycles to her work at the hospital",
    "Ann is allergic to peanuts and eats no fish",
    "Ann plays the cello in an orchestra on Mondays",
    "Ann has two cats called Ada and Grace",
    "Ann wants to learn Portuguese before her journey to Lisbon",
)
TEA = "what does Ann drink every morning, green tea?"
WORK = "how does Ann cycle to work at the hospital on Mondays?"
CATS = "two cats called Ada and Grace, and the cello of Ann"

Remember = Callable[..., list[str]]
SearchResults = list[dict[str, Any]]


@pytest.fixture
def facts(memory: Any, remember: Remember) -> Any:
    """A memory of Ann."""
    remember(memory, *FACTS, user_id="ann")
    return memory


@pytest.fixture
def results(facts: Any, log_searches: Callable[[Any], SearchResults]) -> SearchResults:
    """What that memory itself returned for each search."""
    return log_searches(facts)


def texts(found: dict[str, Any]) -> list[str]:
    return [entry["memory"] for entry in found["results"]]


def test_result_is_the_memorys_own_in_another_order_with_two_more_keys(facts: Any, results: SearchResults) -> None:
    ours = ContextReuseMemory(facts)
    for question in (TEA, WORK, CATS, TEA):
        found = ours.search(question, filters=ANN, top_k=4, threshold=0.0)
        plain = results[-1]
        assert found.keys() == plain.keys() | {"context", "order_annotation"}
        assert len(found["results"]) == len(plain["results"]) == 4
        by_id = {entry["id"]: entry for entry in plain["results"]}
        assert {entry["id"]: entry for entry in found["results"]} == by_id


def test_first_search_is_in_relevance_order(facts: Any, results: SearchResults) -> None:
    found = ContextReuseMemory(facts).search(TEA, filters=ANN)
    assert found["results"] == results[-1]["results"]
    assert found["order_annotation"] is None


def test_last_turns_memories_keep_their_place_and_new_ones_follow(facts: Any, results: SearchResults) -> None:
    ours = ContextReuseMemory(facts)
    last: list[str] = []
    kept_in_all = 0
    for question, top_k in ((TEA, 3), (WORK, 4), (CATS, 6), (TEA, 6), (WORK, 6)):
        found = texts(ours.search(question, filters=ANN, top_k=top_k, threshold=0.0))
        plain = texts(results[-1])
        kept = [text for text in last if text in plain]
        assert found == [*kept, *(text for text in plain if text not in kept)]
        kept_in_all += len(kept)
        last = found
    assert kept_in_all > 8


def test_context_has_every_memory_once_and_nothing_else(facts: Any) -> None:
    ours = ContextReuseMemory(facts)
    for question in (TEA, WORK, CATS):
        found = ours.search(question, filters=ANN, threshold=0.0)
        assert found["context"] == "\n".join(f"- {text}" for text in texts(found))
        for entry in found["results"]:
            assert found["context"].count(entry["memory"]) == 1


def test_nothing_found_is_an_empty_context(facts: Any) -> None:
    found = ContextReuseMemory(facts).search(TEA, filters=BOB)
    assert found == {"results": [], "context": "", "order_annotation": None}


def reordering() -> ContextPlanner:
    """A planner that reorders short memories too, whatever a note costs."""
    return ContextPlanner(policy="oracle")


def test_a_note_quotes_an_item_of_the_list(facts: Any, results: SearchResults) -> None:
    ours = ContextReuseMemory(facts, reordering(), annotate="auto")
    first = ours.search(TEA, filters=ANN, threshold=0.0)
    assert first["context"] == "\n".join(f"- {text}" for text in texts(first))
    assert first["order_annotation"] is None
    second = ours.search(CATS, filters=ANN, threshold=0.0)
    listed, note = second["context"].split("\n\n")
    assert listed == "\n".join(f"- {text}" for text in texts(second))
    assert note == second["order_annotation"]
    [quote] = re.findall('"(.+)"', note)
    assert [text for text in texts(second) if quote in text] == texts(results[-1])[:1]


def test_an_order_must_pay_for_its_note() -> None:
    found = {}
    for annotate in ("none", "auto"):
        for words in (1, 30):
            reply = [{"id": str(i), "memory": f"memory {i} " * words} for i in range(2)]

            class Replies:
                def search(self, query: int, reply: Any = reply, **kwargs: Any) -> Any:
                    return {"results": reply[::query]}

            ours = ContextReuseMemory(Replies(), annotate=annotate)
            ours.search(1, filters=ANN)
            found[annotate, words] = [entry["id"] for entry in ours.search(-1, filters=ANN)["results"]]
    assert found == {
        ("none", 1): ["0", "1"],
        ("none", 30): ["0", "1"],
        ("auto", 1): ["1", "0"],
        ("auto", 30): ["0", "1"],
    }


def test_an_unknown_annotation_is_refused(memory: Any) -> None:
    with pytest.raises(ValueError, match="annotate must be one of auto, note, labels, both, none, got True"):
        ContextReuseMemory(memory, annotate=True)  # type: ignore[arg-type]


def test_labelled_context_has_labels_always_and_the_relevance_order_where_it_changed(
    facts: Any, results: SearchResults
) -> None:
    ours = ContextReuseMemory(facts, reordering(), annotate="both")
    first = ours.search(TEA, filters=ANN, threshold=0.0)
    label = re.compile(r"\[(ctx-[0-9a-f]+)\] (.+)")
    names = {text: name for name, text in label.findall(first["context"])}
    assert list(names) == texts(first)
    assert first["order_annotation"] is None
    second = ours.search(CATS, filters=ANN, threshold=0.0)
    *paragraphs, note = second["context"].split("\n\n")
    assert paragraphs == [f"[{names[text]}] {text}" for text in texts(second)]
    assert note == second["order_annotation"]
    assert re.findall(r"\[(.+?)\]", note) == [names[text] for text in texts(results[-1])[:3]]


def test_updated_memory_is_new_text_under_its_id(facts: Any) -> None:
    ours = ContextReuseMemory(facts)
    before = ours.search(CATS, filters=ANN, threshold=0.0)
    changed = before["results"][0]
    facts.update(changed["id"], "Ann has three cats called Ada, Grace and Mary")
    after = ours.search(CATS, filters=ANN, threshold=0.0)
    [entry] = [entry for entry in after["results"] if entry["id"] == changed["id"]]
    assert entry["memory"] == "Ann has three cats called Ada, Grace and Mary"
    assert entry["hash"] != changed["hash"]
    assert entry["memory"] in after["context"]
    assert changed["memory"] not in after["context"]
    assert texts(after) == [*texts(before)[1:], entry["memory"]]


def test_updated_memory_never_gets_the_label_of_what_it_was(facts: Any) -> None:
    ours = ContextReuseMemory(facts, annotate="both")
    before = ours.search(CATS, filters=ANN, threshold=0.0)
    changed = before["results"][0]
    facts.update(changed["id"], "Ann has three cats called Ada, Grace and Mary")
    after = ours.search(CATS, filters=ANN, threshold=0.0)["context"]
    [old] = re.findall(rf"\[(.+?)\] {re.escape(changed['memory'])}", before["context"])
    [new] = re.findall(r"\[(.+?)\] Ann has three cats", after)
    assert old != new
    assert old not in after


def test_deleted_memory_is_gone_and_the_others_stay_as_they_were(facts: Any) -> None:
    ours = ContextReuseMemory(facts)
    before = ours.search(CATS, filters=ANN, threshold=0.0)
    facts.delete(before["results"][2]["id"])
    after = ours.search(TEA, filters=ANN, threshold=0.0)
    assert texts(after) == texts(before)[:2] + texts(before)[3:]
    assert before["results"][2]["memory"] not in after["context"]


def test_equal_texts_of_two_memories_both_stay_and_the_context_has_one(memory: Any, remember: Remember) -> None:
    ids = remember(memory, "Ann likes the sea", "Ann likes tea", "Ann likes the sea", user_id="ann")
    found = ContextReuseMemory(memory).search("Ann likes the sea", filters=ANN)
    assert {entry["id"] for entry in found["results"]} == set(ids)
    assert found["context"].splitlines() == ["- Ann likes the sea", "- Ann likes tea"]


@pytest.mark.parametrize("kind", ["user_id", "agent_id", "run_id"])
def test_nothing_that_others_search_changes_what_one_gets(
    memory: Any, remember: Remember, log_searches: Callable[[Any], SearchResults], kind: str
) -> None:
    other_kind = "agent_id" if kind == "user_id" else "user_id"
    owners = [{kind: "ann"}, {kind: "bob"}, {kind: "ann", other_kind: "other"}]
    for owner in owners:
        remember(memory, *FACTS, **owner)
    results = log_searches(memory)
    together = ContextReuseMemory(memory, annotate="both")
    alone = [ContextReuseMemory(Echo(), annotate="both") for _ in owners]
    for turn in range(6):
        for i, owner in enumerate(owners):
            question = (TEA, WORK, CATS)[(turn + i) % 3]
            found = together.search(question, filters=owner, top_k=4 + turn % 3, threshold=0.0)
            assert found == alone[i].search(results[-1], filters=owner)


class OfUser(Memory):
    """An application's own memory, whose search asks in another way."""

    def search(self, query: str, user: str, **options: Any) -> dict[str, Any]:  # pyright: ignore[reportIncompatibleMethodOverride]
        found: dict[str, Any] = super().search(query, filters={"user_id": user}, **options)
        return found


def test_without_filters_the_memories_found_name_the_tenant(
    open_memory: Callable[..., Any], remember: Remember, log_searches: Callable[[Any], SearchResults]
) -> None:
    memory = open_memory(OfUser)
    for user in ("ann", "bob"):
        remember(memory, *FACTS, user_id=user)
    results = log_searches(memory)
    ours = ContextReuseMemory(memory)
    ann = ours.search(TEA, "ann", threshold=0.0)
    assert ours.search(CATS, "bob", threshold=0.0)["results"] == results[-1]["results"]
    assert texts(ours.search(CATS, user="ann", threshold=0.0)) == texts(ann)


class Echo:
    """A memory that finds what it is asked for."""

    def search(self, query: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        return query


def test_tenant_keeps_apart_memories_that_share_a_planner() -> None:
    planner = ContextPlanner()
    acme, globex = [ContextReuseMemory(Echo(), planner, tenant=tenant) for tenant in ("acme", "globex")]
    first, second = ({"results": [{"memory": fact} for fact in facts]} for facts in (FACTS, FACTS[::-1]))
    for ours in (acme, globex):
        assert ours.search(first, filters={"user_id": "1"})["results"] == first["results"]
    assert acme.search(second, filters={"user_id": "1"})["results"] == first["results"]
    assert globex.search(second, filters={"user_id": "2"})["results"] == second["results"]
    assert planner.stats().scopes == 3


def test_planner_of_ones_own_orders_by_its_own_policy(facts: Any, results: SearchResults) -> None:
    ours = ContextReuseMemory(facts, ContextPlanner(policy="relevance"))
    for question in (TEA, WORK, CATS):
        assert ours.search(question, filters=ANN, threshold=0.0)["results"] == results[-1]["results"]


def test_same_signature_and_documentation(facts: Any) -> None:
    search = ContextReuseMemory(facts).search
    assert inspect.signature(search) == inspect.signature(facts.search)
    assert search.__doc__ == facts.search.__doc__


@pytest.mark.parametrize(
    ("args", "options"),
    [
        ((TEA,), {}),
        ((TEA,), {"filters": {}}),
        ((TEA,), {"user_id": "ann"}),
        ((TEA,), {"filters": ANN, "top_k": -1}),
        (("   ",), {"filters": ANN, "threshold": 7}),
        ((), {"filters": ANN}),
    ],
)
def test_mem0s_own_exceptions_pass_through(facts: Any, args: tuple[str, ...], options: dict[str, Any]) -> None:
    with pytest.raises((ValueError, TypeError)) as theirs:
        facts.search(*args, **options)
    with pytest.raises(theirs.type, match=re.escape(str(theirs.value))):
        ContextReuseMemory(facts).search(*args, **options)


class BrokenPlanner(ContextPlanner):
    def plan(self, *args: Any, **kwargs: Any) -> ContextPlan:
        raise RuntimeError("broken")


def test_failing_planner_leaves_the_search_as_it_was(
    facts: Any, results: SearchResults, caplog: pytest.LogCaptureFixture
) -> None:
    ours = ContextReuseMemory(facts, BrokenPlanner())
    with caplog.at_level(logging.DEBUG, "warmprefix"):
        for question in (TEA, CATS):
            found = ours.search(question, filters=ANN, threshold=0.0)
            assert found["results"] == results[-1]["results"]
            assert found["context"].splitlines() == [f"- {text}" for text in texts(found)]
            assert found["order_annotation"] is None
    assert [record.levelno for record in caplog.records if record.name == "warmprefix"] == [
        logging.WARNING,
        logging.DEBUG,
    ]
    assert "broken" in caplog.text


def test_all_else_is_the_wrapped_memorys(facts: Any) -> None:
    ours = ContextReuseMemory(facts)
    [added] = ours.add("Ann sings", user_id="ann", infer=False)["results"]
    assert facts.get(added["id"])["memory"] == "Ann sings"
    ours.update(added["id"], "Ann sings and dances")
    assert ours.get_all(filters=ANN, top_k=100) == facts.get_all(filters=ANN, top_k=100)
    assert [event["event"] for event in ours.history(added["id"])] == ["ADD", "UPDATE"]
    ours.delete(added["id"])
    assert added["id"] not in {entry["id"] for entry in facts.get_all(filters=ANN, top_k=100)["results"]}
    ours.custom_instructions = "be brief"
    assert facts.custom_instructions == ours.custom_instructions == "be brief"
    assert set(dir(facts)) | {"search"} <= set(dir(ours))
    assert repr(facts) in repr(ours)
    assert copy.copy(ours).config is facts.config
    with pytest.raises(AttributeError, match="no_such"):
        ours.no_such  # noqa: B018
    ours.close()
    assert facts.db is None


def test_is_a_context_manager_where_the_wrapped_memory_is(facts: Any) -> None:
    ours = ContextReuseMemory(facts)
    if hasattr(Memory, "__enter__"):
        with ours as entered:
            assert entered is ours
        assert facts.db is None
    else:
        with pytest.raises(AttributeError, match="__enter__"):
            ours.__enter__()


def test_wrong_kind_names_the_class_to_use(facts: Any, open_memory: Callable[..., Any]) -> None:
    with pytest.raises(TypeError, match="use AsyncContextReuseMemory for AsyncMemory"):
        ContextReuseMemory(open_memory(AsyncMemory))
    with pytest.raises(TypeError, match="use ContextReuseMemory for Memory"):
        AsyncContextReuseMemory(facts)
    with pytest.raises(TypeError, match="memory must be Mem0's Memory or MemoryClient, got str"):
        ContextReuseMemory("memory")
    with pytest.raises(TypeError, match="planner must be a ContextPlanner or None, got str"):
        ContextReuseMemory(facts, "coaccess")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="tenant must be a str or None, got int"):
        ContextReuseMemory(facts, tenant=7)  # type: ignore[arg-type]


def test_many_threads_share_one(memory: Any, remember: Remember) -> None:
    users = [f"user-{i}" for i in range(4)]
    for user in users:
        remember(memory, *(f"{user}: {fact}" for fact in FACTS), user_id=user)
    ours = ContextReuseMemory(memory)

    def search(i: int) -> tuple[str, dict[str, Any]]:
        user = users[i % len(users)]
        return user, ours.search((TEA, WORK, CATS)[i % 3], filters={"user_id": user}, threshold=0.0)

    with ThreadPoolExecutor(8) as pool:
        for user, found in pool.map(search, range(120)):
            assert sorted(texts(found)) == sorted(f"{user}: {fact}" for fact in FACTS)
            assert found["context"].splitlines() == [f"- {text}" for text in texts(found)]
