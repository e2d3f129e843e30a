"""Agents and an engine over HTTP: the requests that it received, and its prefix cache."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import create_retriever_tool
from langgraph.checkpoint.memory import InMemorySaver
from openai import InternalServerError

from warmprefix_langchain import ContextReuseMiddleware

WHOLE, PART = "[Word for word the result of the earlier call ", "[Word for word in the result of the earlier call "
AGAIN = "[Ran again; word for word the result of the earlier call "
QUOTES = re.compile(r': the passages? that begins? ((?:"(?:[^"\\]|\\.)*"(?:, )?)+)\.\]')


def search_call(question: str, number: int) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"query": question})}
    call = {"id": f"call-{number}", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture
def search_agent(shelf: Any, chat_model: Any) -> Callable[..., Any]:
    """Build an agent with one tool, which finds the passages of the turns."""

    def build(engine: Any, turns: Sequence[Any], *middleware: Any) -> Any:
        found = {turn.question: [Document(p.text, id=p.id) for p in turn.passages] for turn in turns}
        search = create_retriever_tool(shelf(found), "search", "Search.", response_format="content_and_artifact")
        return create_agent(
            chat_model(engine), [search], system_prompt="Search.", middleware=middleware, checkpointer=InMemorySaver()
        )

    return build


def conversation_of_five(turns: Sequence[Any]) -> list[Any]:
    """A real conversation of four turns, and its first question once more."""
    conversations: dict[str, list[Any]] = {}
    for turn in turns:
        conversations.setdefault(turn.conversation, []).append(turn)
    four = next(conversation for conversation in conversations.values() if len(conversation) == 4)
    return [*four, four[0]]


def hold(agent: Any, engine: Any, turns: Sequence[Any], thread: str) -> None:
    """One conversation: each turn a search and an answer."""
    for number, turn in enumerate(turns):
        script(engine, turn, number)
        agent.invoke(*question(turn, thread))


def script(engine: Any, turn: Any, number: int) -> None:
    engine.script(search_call(turn.question, number), {"role": "assistant", "content": f"That was question {number}."})


def question(turn: Any, thread: str) -> tuple[Any, Any]:
    return {"messages": [HumanMessage(turn.question)]}, {"configurable": {"thread_id": thread}}


def evidence(messages: Sequence[dict[str, Any]], turns: Sequence[Any]) -> list[int]:
    """Check that each passage is there, in full or where a reference points; return the references per result."""
    shown_calls: list[str] = []
    results: list[str] = []
    referred: list[int] = []
    for message in messages:
        for call in message.get("tool_calls") or ():
            arguments = json.dumps(json.loads(call["function"]["arguments"]), ensure_ascii=False, separators=(",", ":"))
            shown_calls.append(f"search({arguments})")
        if message["role"] != "tool":
            continue
        rest, turn = message["content"], turns[len(referred)]
        expected = "\n\n".join(passage.text for passage in turn.passages)
        referred.append(0)
        results.append(rest)

        def source(reference: str) -> tuple[str, str]:
            """The result that a reference names, and what follows the name. No question has two results here."""
            shown_call = max((shown for shown in shown_calls if reference.startswith(shown)), key=len)
            return results[shown_calls.index(shown_call)], reference[len(shown_call) :]

        if rest.startswith(AGAIN):
            rest = WHOLE + rest[len(AGAIN) :]
        if rest.startswith(WHOLE):
            assert source(rest[len(WHOLE) :]) == (expected, ".]")
            referred[-1] += 1
            continue
        while rest:
            if not rest.startswith(PART):
                length = rest.find(PART) if PART in rest else len(rest)
                assert expected.startswith(rest[:length])
                rest, expected = rest[length:], expected[length:]
                continue
            held, rest = source(rest[len(PART) :])
            quotes = QUOTES.match(rest)
            assert quotes is not None
            rest = rest[quotes.end() :]
            for n, quote in enumerate(json.loads(f"[{quotes[1]}]")):
                expected = expected.removeprefix("\n\n" if n else "")
                texts = [passage.text.strip("\r\n") for passage in turn.passages]
                text = max((text for text in texts if expected.startswith(text)), key=len)
                assert held.count(quote) == 1
                assert held.startswith(text, held.index(quote))
                expected = expected.removeprefix(text)
                referred[-1] += 1
        assert not expected
    return referred


def test_five_turns_keep_every_passage_and_every_byte(
    start_engine: Any, turns: list[Any], search_agent: Callable[..., Any]
) -> None:
    engine, five = start_engine(), conversation_of_five(turns)
    hold(search_agent(engine, five, ContextReuseMiddleware()), engine, five, "t")

    prompts = [answered.body["messages"] for answered in engine.answered]
    assert [sum(message["role"] == "tool" for message in prompt) for prompt in prompts] == [
        0,
        1,
        1,
        2,
        2,
        3,
        3,
        4,
        4,
        5,
    ]
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier
    referred = [evidence(prompt, five) for prompt in prompts][-1]
    assert referred[0] == 0
    assert sum(referred[1:4]) > 0
    assert prompts[-1][-1]["content"].startswith((WHOLE, AGAIN))


def test_nothing_of_ours_but_text_reaches_the_server(
    start_engine: Any, turns: list[Any], search_agent: Callable[..., Any]
) -> None:
    engine, five = start_engine(), conversation_of_five(turns)
    hold(search_agent(engine, five, ContextReuseMiddleware()), engine, five, "t")
    plain = start_engine()
    hold(search_agent(plain, five), plain, five, "t")

    for ours, theirs in zip(engine.bodies, plain.bodies, strict=True):
        assert {k: v for k, v in ours.items() if k != "messages"} == {
            k: v for k, v in theirs.items() if k != "messages"
        }
        for message, unchanged in zip(ours["messages"], theirs["messages"], strict=True):
            if message["role"] == "tool":
                assert message.keys() == unchanged.keys()
                assert message["tool_call_id"] == unchanged["tool_call_id"]
            else:
                assert message == unchanged


def test_a_model_error_and_a_retry_lose_nothing(
    start_engine: Any, turns: list[Any], search_agent: Callable[..., Any]
) -> None:
    engine, five = start_engine(), conversation_of_five(turns)
    agent = search_agent(engine, five, ContextReuseMiddleware())
    hold(agent, engine, five[:2], "t")
    script(engine, five[2], 2)

    engine.fail_next(1)  # before the search
    with pytest.raises(InternalServerError):
        agent.invoke(*question(five[2], "t"))
    agent.invoke(None, question(five[2], "t")[1], interrupt_after=["tools"])
    engine.fail_next(1)  # with what the search found
    with pytest.raises(InternalServerError):
        agent.invoke(None, question(five[2], "t")[1])
    agent.invoke(None, question(five[2], "t")[1])

    assert len(engine.bodies) == len(engine.answered) + 2
    assert engine.bodies[4]["messages"] == engine.bodies[5]["messages"]
    assert engine.bodies[6]["messages"] == engine.bodies[7]["messages"]
    assert len(evidence(engine.bodies[-1]["messages"], five)) == 3
    assert evidence(engine.bodies[-1]["messages"], five)[2]


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_streaming_sends_the_same(
    start_engine: Any, turns: list[Any], search_agent: Callable[..., Any], asynchronous: bool
) -> None:
    five = conversation_of_five(turns)
    engine, streamed = start_engine(), start_engine()
    hold(search_agent(engine, five, ContextReuseMiddleware()), engine, five, "t")
    agent = search_agent(streamed, five, ContextReuseMiddleware())
    for number, turn in enumerate(five):
        script(streamed, turn, number)
        if asynchronous:
            events = [event async for event in agent.astream(*question(turn, "t"), stream_mode="messages")]
        else:
            events = list(agent.stream(*question(turn, "t"), stream_mode="messages"))
        # Users see the result as the tool returned it.
        [shown] = [message for message, _ in events if isinstance(message, ToolMessage)]
        assert shown.content == "\n\n".join(passage.text for passage in turn.passages)

    assert all(body["stream"] for body in streamed.bodies)
    assert [body["messages"] for body in streamed.bodies] == [body["messages"] for body in engine.bodies]


def test_the_engine_serves_more_from_its_cache_and_is_sent_less(
    start_engine: Any, turns: list[Any], search_agent: Callable[..., Any]
) -> None:
    with_it, without = start_engine(), start_engine()
    middleware = ContextReuseMiddleware()
    conversations: dict[str, list[Any]] = {}
    for turn in turns:
        conversations.setdefault(turn.conversation, []).append(turn)

    references = 0
    for name, its_turns in list(conversations.items())[:8]:
        before = len(with_it.answered)
        hold(search_agent(with_it, its_turns, middleware), with_it, its_turns, name)
        hold(search_agent(without, its_turns), without, its_turns, name)
        prompts = [answered.body["messages"] for answered in with_it.answered[before:]]
        referred = [evidence(prompt, its_turns) for prompt in prompts]
        assert len(referred[-1]) == len(its_turns)
        references += sum(map(sum, referred))

    assert with_it.hit_ratio > without.hit_ratio
    assert with_it.prompt_tokens < without.prompt_tokens
    assert middleware.stats().references == references > 0
