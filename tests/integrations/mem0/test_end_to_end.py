"""Sessions of several users on real text over HTTP: the engine's cache and its requests."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any, NamedTuple

import pytest
import pytest_asyncio
from mem0 import AsyncMemory
from openai import AsyncOpenAI, InternalServerError, OpenAI

from warmprefix import Templates
from warmprefix_mem0 import AsyncContextReuseMemory, ContextReuseMemory, MemoryChat

USERS = 3
TURNS = 24
TOP_K = 6
SYSTEM = "You are an assistant who remembers what the user once read. Answer from it."


class UserQuestion(NamedTuple):
    """A question of a user in a session."""

    session: str
    user: str
    question: str


@pytest.fixture
def asked(turns: list[Any]) -> list[UserQuestion]:
    return [UserQuestion(turn.conversation, user_of(turn.conversation), turn.question) for turn in turns[:TURNS]]


def user_of(conversation: str) -> str:
    return f"user-{int(conversation.rpartition('-')[2]) % USERS}"


@pytest.fixture
def filled(memory: Any, turns: list[Any], remember: Callable[..., list[str]]) -> Any:
    """A memory that holds, for each user, the best passages for their questions."""
    for user, text in dict.fromkeys(
        (user_of(t.conversation), p.text) for t in turns[:TURNS] for p in t.passages[:TOP_K]
    ):
        remember(memory, text, user_id=user)
    return memory


@pytest.fixture
def openai() -> Iterator[Callable[[Any], OpenAI]]:
    clients: list[OpenAI] = []

    def openai(engine: Any) -> OpenAI:
        clients.append(OpenAI(base_url=engine.base_url, api_key="none", max_retries=0))
        return clients[-1]

    yield openai
    for client in clients:
        client.close()


def answer_of(client: OpenAI, engine: Any, messages: Any) -> str:
    answer = client.chat.completions.create(model=engine.model, messages=messages, max_tokens=16)
    return answer.choices[0].message.content or ""


def search_of(memory: Any, turn: UserQuestion) -> dict[str, Any]:
    found: dict[str, Any] = memory.search(turn.question, filters={"user_id": turn.user}, top_k=TOP_K, threshold=0.0)
    return found


def in_the_system_prompt(client: OpenAI, engine: Any, memory: Any, asked: Iterable[UserQuestion]) -> None:
    """Memories rebuilt each turn in front of the history, as in Mem0's own examples."""
    histories: dict[str, list[dict[str, str]]] = {}
    for turn in asked:
        found = search_of(memory, turn)
        context = found.get("context") or "\n".join(f"- {entry['memory']}" for entry in found["results"])
        history = histories.setdefault(turn.session, [])
        history.append({"role": "user", "content": turn.question})
        messages = [{"role": "system", "content": f"{SYSTEM}\nMemories:\n{context}"}, *history]
        history.append({"role": "assistant", "content": answer_of(client, engine, messages)})
        prompt = engine.prompts[-1]
        assert all(prompt.count(f"- {entry['memory']}") >= 1 for entry in found["results"])


def in_the_history(client: OpenAI, engine: Any, memory: Any, asked: Iterable[UserQuestion]) -> None:
    """Memories appended with their turn, by `MemoryChat`."""
    chats: dict[str, MemoryChat] = {}
    for turn in asked:
        found = search_of(memory, turn)
        chat = chats.setdefault(turn.session, MemoryChat(SYSTEM))
        messages = chat.ask(turn.question, found)
        chat.commit(messages, answer_of(client, engine, messages))
        assert_all_there(engine.answered[-1].body["messages"], [entry["memory"] for entry in found["results"]])


def assert_all_there(messages: list[dict[str, str]], memories: list[str]) -> None:
    """Each memory is in this prompt in full, under a label that the last message shows."""
    prompt = "\n\n".join(message["content"] for message in messages)
    last = messages[-1]["content"]
    for text in memories:
        labels = [
            label
            for label in set(re.findall(r"\[(m[0-9a-f]{4}(?:~[0-9a-f]+)?)\]", last))
            if Templates().block(label, text) in prompt
        ]
        assert labels, f"neither here nor referred to: {text!r}"
    for label in set(re.findall(r"\[(m[0-9a-f]{4}(?:~[0-9a-f]+)?)\]", prompt)):
        assert re.search(rf"^\[{label}\] ", prompt, re.MULTILINE), f"dangling: {label}"


def test_steady_order_raises_the_hit_ratio_and_appended_history_raises_it_most(
    start_engine: Callable[[], Any], openai: Callable[[Any], OpenAI], filled: Any, asked: list[UserQuestion]
) -> None:
    plain, ours, chat = start_engine(), start_engine(), start_engine()
    in_the_system_prompt(openai(plain), plain, filled, asked)
    in_the_system_prompt(openai(ours), ours, ContextReuseMemory(filled), asked)
    in_the_history(openai(chat), chat, filled, asked)
    assert len(plain.answered) == len(ours.answered) == len(chat.answered) == TURNS
    assert sorted(map(len, plain.prompts)) == sorted(map(len, ours.prompts))
    assert ours.hit_ratio > plain.hit_ratio
    assert chat.hit_ratio > 2 * plain.hit_ratio
    assert chat.prompt_tokens - chat.cached_tokens < plain.prompt_tokens - plain.cached_tokens


def five_turns(asked: list[UserQuestion]) -> list[UserQuestion]:
    """One user's, in one session."""
    return [turn for turn in asked if turn.user == asked[0].user][:5]


def test_five_turns_with_an_error_and_a_retry(
    start_engine: Callable[[], Any], openai: Callable[[Any], OpenAI], filled: Any, asked: list[UserQuestion]
) -> None:
    engine = start_engine()
    client, memory, chat = openai(engine), ContextReuseMemory(filled), MemoryChat(SYSTEM)
    questions = five_turns(asked)
    questions[3:3] = questions[:1]  # a repeated question finds memories that the history shows
    before: list[dict[str, str]] = []
    for i, turn in enumerate(questions):
        found = search_of(memory, turn)
        messages = chat.ask(turn.question, found)
        if i in (0, 2):
            engine.fail_next(1)
            with pytest.raises(InternalServerError):
                answer_of(client, engine, messages)
            messages = chat.ask(turn.question, search_of(memory, turn))
        chat.commit(messages, answer_of(client, engine, messages))
        sent = engine.answered[-1].body["messages"]
        assert sent == messages
        assert sent[: len(before)] == before
        assert_all_there(sent, [entry["memory"] for entry in found["results"]])
        before = sent
    assert len(engine.answered) == 6
    assert len(engine.bodies) == 8
    assert [body["messages"] for body in engine.bodies[:2]] == [engine.bodies[0]["messages"]] * 2
    assert engine.bodies[3]["messages"] == engine.bodies[4]["messages"]
    assert "Please also use the context labelled" in engine.prompts[3]
    assert chat.messages[:-1] == before


@pytest_asyncio.fixture
async def async_filled(
    open_memory: Callable[..., Any], asked: list[UserQuestion], turns: list[Any]
) -> AsyncIterator[Any]:
    memory = open_memory(AsyncMemory)
    for text in dict.fromkeys(p.text for turn in turns[:8] for p in turn.passages):
        await memory.add(text, user_id=asked[0].user, infer=False)
    yield memory


async def test_async_and_streaming(
    start_engine: Callable[[], Any], async_filled: Any, asked: list[UserQuestion]
) -> None:
    engine = start_engine()
    memory, chat = AsyncContextReuseMemory(async_filled), MemoryChat(SYSTEM)
    async with AsyncOpenAI(base_url=engine.base_url, api_key="none", max_retries=0) as client:
        for turn in five_turns(asked):
            found = await memory.search(turn.question, filters={"user_id": asked[0].user}, top_k=TOP_K, threshold=0.0)
            messages: Any = chat.ask(turn.question, found)
            stream = await client.chat.completions.create(model=engine.model, messages=messages, stream=True)
            pieces = [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]
            chat.commit(messages, "".join(pieces))
            assert len(found["results"]) == TOP_K
            assert_all_there(engine.answered[-1].body["messages"], [entry["memory"] for entry in found["results"]])
    assert all(message["content"] for message in chat.messages)
    assert engine.answered[-1].body["messages"] == chat.messages[:-1]
    assert engine.hit_ratio > 0.3
