"""Conversations: each agent has a chat of its own, and a document that it holds is referred to."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from warmprefix_chain_of_agents import ChainOfAgents, Chat, ChatKey, InMemoryChats, Manager, Worker, WorkersFailedError

QUESTIONS = ["What is fact 1?", "And fact 2?", "Which of them is worth more?"]


@pytest.mark.parametrize("mode", ["map", "chain"])
def test_documents_are_sent_once_and_then_referred_to(
    start_team: Any, documents: Any, dangling: Any, shown: Any, mode: str
) -> None:
    team, given = start_team(mode=mode), documents(6)
    for question in QUESTIONS:
        answer = team.chain.run(question, given, conversation="c")
        assert answer.skipped == ()
    for engine in team.workers.values():
        assert len(engine.bodies) == 3
        for body in engine.bodies:
            assert dangling(body, given) == []
            assert shown(body, given)
        whole = "\n".join(message["content"] for message in engine.bodies[-1]["messages"])
        for document in given:
            assert whole.count(document.text) <= 1
        assert "Please also use the context labelled [d" in whole


def test_a_chat_is_only_ever_appended_to(start_team: Any, documents: Any) -> None:
    team, given = start_team(), documents(9)
    for turn, question in enumerate(QUESTIONS):
        team.chain.run(question, given[turn * 2 : turn * 2 + 5], conversation="c")
    for engine in team.engines.values():
        for earlier, later in zip(engine.bodies, engine.bodies[1:], strict=False):
            assert later["messages"][: len(earlier["messages"])] == earlier["messages"]


def test_the_manager_remembers_the_conversation(start_team: Any, documents: Any) -> None:
    team = start_team()
    first = team.chain.run(QUESTIONS[0], documents(2), conversation="c")
    team.chain.run(QUESTIONS[1], documents(2), conversation="c")
    roles = [(message["role"], message["content"]) for message in team.engines["manager"].bodies[-1]["messages"]]
    assert [role for role, _ in roles] == ["system", "user", "assistant", "user"]
    assert roles[2][1] == first.text


def test_conversations_and_single_questions_are_apart(start_team: Any, documents: Any) -> None:
    team, given = start_team(), documents(3)
    team.chain.run(QUESTIONS[0], given, conversation="one")
    team.chain.run(QUESTIONS[1], given, conversation="two")
    team.chain.run(QUESTIONS[2], given)
    for engine in team.engines.values():
        assert all(len(body["messages"]) == 2 for body in engine.bodies)


def test_tenants_share_no_cache_and_no_chat(start_team: Any, documents: Any) -> None:
    team, given = start_team(), documents(4)
    for tenant in ("acme", "umbrella"):
        for question in QUESTIONS[:2]:
            team.chain.run(question, given, conversation="c", tenant=tenant)
    salts: dict[str, set[str]] = {"acme": set(), "umbrella": set()}
    for engine in team.engines.values():
        assert [len(body["messages"]) for body in engine.bodies] == [2, 4, 2, 4] or engine.bodies == []
        for place, body in enumerate(engine.bodies):
            salts["acme" if place < 2 else "umbrella"].add(body["cache_salt"])
        assert [one.cached_tokens for one in engine.answered][2:3] in ([0], [])
    assert len(salts["acme"]) == len(salts["umbrella"]) == 1
    assert salts["acme"] != salts["umbrella"]


def test_salts_can_be_left_out(start_engine: Any, connect: Any, documents: Any) -> None:
    engine = start_engine()
    client = connect(engine)
    chain = ChainOfAgents(
        [Worker("w", client, engine.model, cache_salt=False)],
        Manager(client, engine.model, options={"extra_body": {"top_k": 1}}),
    )
    chain.run(QUESTIONS[0], documents(1), tenant="acme")
    read, answered = engine.bodies
    assert "cache_salt" not in read
    assert answered["cache_salt"]
    assert answered["top_k"] == 1


@pytest.mark.parametrize(("owner", "takes"), [("llamacpp", False), ("vllm", True), (None, True)])
@pytest.mark.parametrize("is_async", [False, True], ids=["threads", "tasks"])
async def test_tenants_are_refused_where_an_engine_ignores_salts(
    start_faulty: Any,
    faults: Any,
    connect: Any,
    connect_async: Any,
    documents: Any,
    owner: str | None,
    takes: bool,
    is_async: bool,
) -> None:
    engine = start_faulty(faults.text("A summary."), owner=owner)
    client = (connect_async if is_async else connect)(engine)
    chain = ChainOfAgents([Worker("w", client, "m")], Manager(client, "m"))
    if takes:
        await chain.arun(QUESTIONS[0], documents(1), tenant="acme")
        assert all(body["cache_salt"] for body in engine.bodies)
    else:
        with pytest.raises(WorkersFailedError, match="this engine ignores cache_salt"):
            await chain.arun(QUESTIONS[0], documents(1), tenant="acme")
    assert len(engine.bodies) == 2 * takes
    await chain.arun(QUESTIONS[0], documents(1))
    unsalted = ChainOfAgents([Worker("w", client, "m", cache_salt=False)], Manager(client, "m", cache_salt=False))
    await unsalted.arun(QUESTIONS[0], documents(1), tenant="acme")
    assert [bool(body.get("cache_salt")) for body in engine.bodies] == [True, True] * takes + [False] * 4


def test_a_chat_that_would_get_too_long_begins_again(
    start_team: Any, documents: Any, dangling: Any, shown: Any
) -> None:
    team = start_team(workers=2, max_chat_tokens=700)
    pool = documents(12)
    for turn in range(6):
        given = [pool[(turn + place * 3) % 12] for place in range(3)]
        answer = team.chain.run(f"Question {turn}?", given, conversation="c")
        assert answer.skipped == ()
    begun = 0
    for engine in team.workers.values():
        for body in engine.bodies:
            assert dangling(body, pool) == []
        lengths = [len(body["messages"]) for body in engine.bodies]
        begun += lengths.count(2)
        assert max(lengths) > 2
    assert begun > 2


def test_forgotten_conversations_begin_again(start_team: Any, documents: Any) -> None:
    team, given = start_team(), documents(3)
    team.chain.run(QUESTIONS[0], given, conversation="c")
    team.chain.forget("c")
    team.chain.run(QUESTIONS[1], given, conversation="c")
    for engine in team.engines.values():
        assert all(len(body["messages"]) == 2 for body in engine.bodies)


async def test_runs_of_one_conversation_at_once(start_async_team: Any, documents: Any, dangling: Any) -> None:
    team, given = start_async_team(mode="map"), documents(6)
    await team.chain.arun("Where do we begin?", given[:3], conversation="c")
    await asyncio.gather(*(team.chain.arun(f"Question {n}?", given, conversation="c") for n in range(4)))
    await team.chain.arun("Where were we?", given, conversation="c")
    for name, engine in team.workers.items():
        for body in engine.bodies:
            assert dangling(body, given) == []
            roles = [message["role"] for message in body["messages"]]
            assert roles == ["system", *["user", "assistant"] * ((len(roles) - 2) // 2), "user"]
        whole = "\n".join(message["content"] for message in engine.bodies[-1]["messages"])
        assert all(whole.count(document.text) <= 1 for document in given), name


def test_what_an_agent_reads_at_once_all_gets_into_its_chat(start_team: Any, documents: Any, dangling: Any) -> None:
    team, given = start_team(workers=2, mode="map", together=False), documents(6)
    team.chain.run(QUESTIONS[0], given, conversation="c")
    for engine in team.workers.values():
        lengths = [len(body["messages"]) for body in engine.bodies]
        assert lengths == [2 * turn + 2 for turn in range(len(lengths))]
        assert all(dangling(body, given) == [] for body in engine.bodies)
    assert sum(len(engine.bodies) for engine in team.workers.values()) == 6


def test_a_memory_keeps_the_conversations_used_last() -> None:
    memory = InMemoryChats(max_conversations=2)
    chat = Chat().extended("q", "a")
    for name in ("one", "two"):
        assert memory.save(ChatKey(None, name, "w"), chat, instead_of=Chat())
    memory.load(ChatKey(None, "one", "w"))
    assert memory.save(ChatKey("acme", "one", "w"), chat, instead_of=Chat())
    assert len(memory) == 2
    assert memory.load(ChatKey(None, "one", "w")) == chat
    assert memory.load(ChatKey(None, "one", "other")) == Chat()
    assert memory.load(ChatKey(None, "two", "w")) == Chat()
    with pytest.raises(ValueError, match="max_conversations must be 1 or more, got 0"):
        InMemoryChats(0)


def test_a_memory_keeps_the_turn_that_came_first() -> None:
    memory, key = InMemoryChats(), ChatKey(None, "c", "w")
    begun = memory.load(key)
    first, second = begun.extended("q1", "a1"), begun.extended("q2", "a2")
    assert memory.save(key, first, instead_of=begun)
    assert not memory.save(key, second, instead_of=begun)
    assert memory.load(key) == first
    assert first.tokens == 2
