"""Searches in conversations whose history this process does not hold, with workers that share a Redis."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, ExitStack
from itertools import count
from typing import Any

import pytest
from mem0 import AsyncMemory, AsyncMemoryClient, MemoryClient

from redis_servers import Server, wait_until
from warmprefix import Branch, ContextPlanner
from warmprefix_mem0 import AsyncContextReuseMemory, ContextReuseMemory, MemoryChat
from warmprefix_redis import RedisSeenStore

ANN, BOB = {"user_id": "ann"}, {"user_id": "bob"}
WORDS = ("tea", "work", "cats", "music", "sea", "bread", "snow", "trains", "maps", "chess")
FACTS = [f"Fact {i} on {word}: {f'she wrote about {word} and {i} other things ' * 6}" for i, word in enumerate(WORDS)]
QUESTIONS = [" and ".join(WORDS[(turn * 3 + i) % 10] for i in range(4)) for turn in range(10)]
LABEL = re.compile(r"\[((?:ctx-|m)[0-9a-f~]+)\]")
TOP_K = 4
NOTE = "Please also use the context labelled"

_keys = count()


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as server, server.client() as client:
        # A server that has just started may be an older copy, which planners do not trust for two seconds.
        wait_until(lambda: client.info("server")["uptime_in_seconds"] > 2, "the server has been there for a while")
        yield server


@pytest.fixture
def open_planner(server: Server) -> Iterator[Callable[[], ContextPlanner]]:
    """Open planners of one application, each with its own connections."""
    prefix = f"t{next(_keys)}"
    with ExitStack() as opened:

        def open_planner() -> ContextPlanner:
            store = RedisSeenStore(server.url, prefix=prefix, timeout=10)
            return opened.enter_context(ContextPlanner(store=store, annotate="labels"))

        yield open_planner


@pytest.fixture
def facts(memory: Any, remember: Callable[..., list[str]]) -> Any:
    for user in ("ann", "bob"):
        remember(memory, *FACTS, user_id=user)
    return memory


@pytest.fixture
def workers(facts: Any, open_planner: Callable[[], ContextPlanner]) -> list[ContextReuseMemory]:
    """Two processes of one application, as far as their planners can see."""
    return [ContextReuseMemory(facts, open_planner(), annotate="both") for _ in range(2)]


def search(memory: Any, question: str, conversation: str | Branch, owner: dict[str, str] = ANN) -> Any:
    return memory.search(question, filters=owner, conversation=conversation, top_k=TOP_K, threshold=0.0)


def assert_whole(history: list[str], found: Any) -> None:
    """Each memory is in this prompt in full; each label of its sentences is, and names one text."""
    prompt = "\n\n".join([*history, found["context"]])
    for entry in found["results"]:
        assert entry["memory"].strip() in prompt, "lost"
    for sentence in re.findall(rf"^{NOTE} (.*) above in this conversation\.$", found["context"], re.MULTILINE):
        for label in LABEL.findall(sentence):
            texts = set(re.findall(rf"^\[{label}\] (.*)$", "\n\n".join(history), re.MULTILINE))
            assert len(texts) == 1, "dangling" if not texts else "ambiguous"


def times(history: list[str], text: str) -> int:
    return "\n\n".join(history).count(text)


@pytest.mark.parametrize("is_branch", [False, True])
def test_two_workers_show_each_memory_in_full_once(workers: list[ContextReuseMemory], is_branch: bool) -> None:
    history: list[str] = []
    last: str | None = None
    chat = MemoryChat()
    for turn, question in enumerate(QUESTIONS):
        memory = workers[turn % 2]
        found = search(memory, question, Branch(after=last) if is_branch else "chat-42")
        assert_whole(history, found)
        assert memory.commit(found, turn_id=f"turn-{turn}")
        last = f"turn-{turn}"
        history += [found["context"], question, "Yes."]
        chat.commit(chat.ask(question, found), "Yes.")
    shown = [message["content"] for message in chat.messages]
    assert [times(history, fact) for fact in FACTS] == [times(shown, fact) for fact in FACTS] == [1] * len(FACTS)


def test_a_turn_counts_only_once_it_is_committed(workers: list[ContextReuseMemory]) -> None:
    one, other = workers
    failed = search(one, QUESTIONS[0], "chat-42")
    assert one.abandon(failed)
    assert not one.abandon(failed)
    retried = search(other, QUESTIONS[0], "chat-42")
    assert NOTE not in retried["context"]
    assert other.commit(retried)
    again = search(one, QUESTIONS[0], "chat-42")
    assert_whole([retried["context"]], again)
    assert again["context"].startswith(NOTE)
    assert again["results"] == retried["results"]
    forgotten = search(one, QUESTIONS[1], "other")
    del forgotten  # neither committed nor abandoned
    assert NOTE not in search(other, QUESTIONS[1], "other")["context"]


def test_a_history_can_be_cut_once_it_is_forgotten(workers: list[ContextReuseMemory]) -> None:
    one, other = workers
    for owner in (ANN, BOB):
        assert one.commit(search(one, QUESTIONS[0], "chat-42", owner))
    other.forget("chat-42", {"AND": [ANN]})
    assert NOTE not in search(one, QUESTIONS[0], "chat-42")["context"]
    assert search(one, QUESTIONS[0], "chat-42", BOB)["context"].startswith(NOTE)


def test_branches_fork_and_unknown_turns_are_unseen(workers: list[ContextReuseMemory]) -> None:
    one, other = workers
    begin = search(one, QUESTIONS[0], Branch(after=None))
    assert one.commit(begin, turn_id="a")
    left, right = (search(memory, QUESTIONS[1], Branch(after="a")) for memory in workers)
    assert left["context"] == right["context"]
    assert one.commit(left, turn_id="b")  # the turn on the right failed, and `commit` was never called
    fork = search(other, QUESTIONS[2], Branch(after="a"))
    assert_whole([begin["context"]], fork)
    onwards = search(other, QUESTIONS[2], Branch(after="b"))
    assert_whole([begin["context"], left["context"]], onwards)
    assert fork["context"] != onwards["context"]
    unknown = search(other, QUESTIONS[0], Branch(after="never seen"))
    assert_whole([], unknown)


def test_a_search_that_finds_nothing_continues_its_branch(workers: list[ContextReuseMemory]) -> None:
    one, other = workers
    begin = search(one, QUESTIONS[0], Branch(after=None))
    one.commit(begin, turn_id="a")
    nothing = one.search("tea", filters=ANN, conversation=Branch(after="a"), threshold=1.0)
    assert (nothing["results"], nothing["context"]) == ([], "")
    assert one.commit(nothing, turn_id="b")
    assert search(other, QUESTIONS[0], Branch(after="b"))["context"].startswith(NOTE)


def test_an_updated_memory_is_sent_again_under_another_label(workers: list[ContextReuseMemory], facts: Any) -> None:
    one, other = workers
    found = search(one, "tea", "chat-42")
    one.commit(found)
    tea = next(entry for entry in found["results"] if "on tea" in entry["memory"])
    facts.update(tea["id"], tea["memory"] + "and no more")
    again = search(other, "tea", "chat-42")
    assert_whole([found["context"]], again)
    updated = next(entry for entry in again["results"] if entry["id"] == tea["id"])
    assert updated["hash"] != tea["hash"]
    (label,) = re.findall(rf"^\[(.*)\] {re.escape(updated['memory'])}$", again["context"], re.MULTILINE)
    assert label not in LABEL.findall(found["context"])


def test_memories_shorter_than_their_label_are_sent_as_they_are(
    memory: Any, remember: Callable[..., list[str]], open_planner: Callable[[], ContextPlanner]
) -> None:
    texts = ["Ann likes tea", "Tea, [ctx-000000] tea", " ", "Tea\nand more", FACTS[0], f"{NOTE} [ctx-000000] above."]
    remember(memory, *texts, user_id="ann")
    for is_locked in (False, True):
        wrapper = ContextReuseMemory(memory, open_planner(), order_locked=is_locked, annotate="both")
        history: list[str] = []
        for _ in range(2):
            found = wrapper.search("tea", filters=ANN, conversation=f"{is_locked}", threshold=0.0)
            shown = found["context"].replace("\\", "")  # what could be mistaken for a label or a note is escaped
            assert_whole(history, {**found, "context": shown})
            assert wrapper.commit(found)
            history.append(shown)
        assert [times(history, text) for text in (texts[0], texts[-1], FACTS[0])] == [2 - is_locked, 1, 1]
        assert ("- Ann likes tea" in history[0]) is not is_locked


def test_owners_and_tenants_share_nothing(facts: Any, open_planner: Callable[[], ContextPlanner]) -> None:
    planner = open_planner()
    acme, umbrella = (
        ContextReuseMemory(facts, planner, tenant=tenant, annotate="both") for tenant in ("acme", "umbrella")
    )
    for conversation in ("chat-42", Branch(after="a")):
        for memory, owner in ((acme, ANN), (acme, BOB), (umbrella, ANN), (acme, {**ANN, "run_id": "chat-42"})):
            found = search(memory, QUESTIONS[0], conversation, owner)
            assert NOTE not in found["context"]
            assert memory.commit(found, turn_id="a")


def test_run_id_restricts_the_search_and_the_conversation_does_not(
    workers: list[ContextReuseMemory], remember: Callable[..., list[str]], facts: Any
) -> None:
    remember(facts, "Tea was served in this run", user_id="ann", run_id="chat-42")
    everything = search(workers[0], QUESTIONS[0], "chat-42")
    restricted = search(workers[0], QUESTIONS[0], "chat-42", {**ANN, "run_id": "chat-42"})
    assert len(everything["results"]) == 4
    assert [entry["memory"] for entry in restricted["results"]] == ["Tea was served in this run"]
    with pytest.raises(ValueError, match="run_id"):
        workers[0].search("tea", filters=ANN, run_id="chat-42")


@pytest.mark.parametrize("conversation", [42, b"chat", ["chat"], ""])
def test_bad_ids_are_refused_before_the_search(
    workers: list[ContextReuseMemory], conversation: Any, log_searches: Callable[[Any], list[Any]], facts: Any
) -> None:
    searches = log_searches(facts)
    with pytest.raises((TypeError, ValueError), match="conversation"):
        search(workers[0], "tea", conversation)
    assert not searches
    found = search(workers[0], "tea", Branch(after=None))
    for turn_id in (42, ""):
        with pytest.raises((TypeError, ValueError), match="turn_id"):
            workers[0].commit(found, turn_id=turn_id)  # type: ignore[arg-type]
    others: list[Any] = [{"results": []}, found["results"], found["context"], None]
    for other in others:
        with pytest.raises(TypeError, match="found"):
            workers[0].commit(other)


def test_a_result_is_plain_data_and_without_a_conversation_there_is_nothing_to_commit(facts: Any) -> None:
    memory = ContextReuseMemory(facts, annotate="both")
    found = memory.search("tea", filters=ANN)
    assert not memory.commit(found)
    assert not memory.abandon(found)
    assert json.loads(json.dumps(search(memory, "tea", "\ud800")))["results"]


def test_redis_that_is_gone_costs_tokens_only(facts: Any) -> None:
    with Server() as server, ContextPlanner.from_url(server.url, annotate="labels") as planner:
        memory = ContextReuseMemory(facts, planner, annotate="both")
        history: list[str] = []
        for turn in range(6):
            if turn == 2:
                server.kill()
            if turn == 4:
                server.restart()
            found = search(memory, QUESTIONS[0], "chat-42")
            assert_whole(history, found)
            memory.commit(found)
            history.append(found["context"])
        assert NOTE not in history[2] + history[3]


async def test_async_twins_commit_what_was_not_cancelled(
    open_memory: Callable[..., Any], open_planner: Callable[[], ContextPlanner]
) -> None:
    plain = open_memory(AsyncMemory)
    for fact in FACTS:
        await plain.add(fact, user_id="ann", infer=False)
    history: list[str] = []
    committed = []
    last = None
    async with AsyncExitStack() as opened:
        planners = [await opened.enter_async_context(open_planner()) for _ in range(2)]
        workers = [AsyncContextReuseMemory(plain, planner, annotate="both") for planner in planners]
        for turn, question in enumerate(QUESTIONS):
            memory = workers[turn % 2]
            cancelled = asyncio.ensure_future(search(memory, question, Branch(after=last)))
            await asyncio.sleep(0)
            cancelled.cancel()
            found = await search(memory, question, Branch(after=last))
            assert_whole(history, found)
            lost = asyncio.ensure_future(memory.commit(found, turn_id=f"lost-{turn}"))
            await asyncio.sleep(0)
            lost.cancel()
            await memory.commit(found, turn_id=f"turn-{turn}")
            last = f"turn-{turn}"
            history.append(found["context"])
            committed.append((memory, found))
        memory, found = committed[-1]
        assert not await memory.abandon(found)
    assert [times(history, fact) for fact in FACTS] == [1] * len(FACTS)


def test_the_hosted_api_is_not_told_of_the_conversation(hosted: Any, remember: Callable[..., list[str]]) -> None:
    remember(hosted.memory, *FACTS, user_id="ann")
    client = MemoryClient(api_key=hosted.key, host=hosted.host)
    memory = ContextReuseMemory(client, ContextPlanner(), annotate="labels")
    first = search(memory, QUESTIONS[0], "chat-42")
    memory.commit(first)
    again = search(memory, QUESTIONS[0], "chat-42")
    client.client.close()
    assert_whole([first["context"]], again)
    assert again["context"].startswith(NOTE)
    assert hosted.searches[0] == hosted.searches[1]
    assert "chat-42" not in json.dumps(hosted.searches)


async def test_the_hosted_api_from_tasks(hosted: Any, remember: Callable[..., list[str]]) -> None:
    remember(hosted.memory, *FACTS, user_id="ann")
    client = AsyncMemoryClient(api_key=hosted.key, host=hosted.host)
    memory = AsyncContextReuseMemory(client, ContextPlanner(), annotate="labels")
    first = await search(memory, QUESTIONS[0], Branch(after=None))
    assert await memory.commit(first, turn_id="a")
    again = await search(memory, QUESTIONS[0], Branch(after="a"))
    await client.async_client.aclose()
    assert_whole([first["context"]], again)
    assert again["context"].startswith(NOTE)
