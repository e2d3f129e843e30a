"""Memories in real agents, with LangGraph's store and checkpoints, and an emulated engine."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents import middleware as shipped
from langchain.agents.middleware import SummarizationMiddleware, dynamic_prompt
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.store.memory import InMemoryStore
from pydantic import PrivateAttr

from warmprefix_langchain import MemoryMiddleware

TEA, COFFEE, CATS, OSLO = "Ann drinks tea.", "Ann drinks coffee.", "Ann has two cats.", "Ann lives in Oslo."
SYSTEM = "You are Ann's assistant. " * 20
NAMESPACE = ("memories", "ann")


class RecordingModel(BaseChatModel):
    """Chat model that answers with the number of messages, and records every prompt."""

    _prompts: list[list[BaseMessage]] = PrivateAttr(default_factory=list)

    @property
    def _llm_type(self) -> str:
        return "recording"

    def _generate(self, messages: list[BaseMessage], *_: Any, **__: Any) -> ChatResult:
        self._prompts.append(list(messages))
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"{len(messages)} messages"))])


def texts(prompt: list[BaseMessage]) -> list[Any]:
    return [message.content for message in prompt]


def in_store(question: str, runtime: Any) -> Any:
    assert question
    return runtime.store.search(NAMESPACE)


def config(thread: str, **more: str) -> Any:
    return {"configurable": {"thread_id": thread, **more}}


def ask(agent: Any, question: Any, thread: str = "t") -> Any:
    return agent.invoke({"messages": [HumanMessage(question)]}, config(thread))


def agent_with(model: BaseChatModel, search: Callable[..., Any], *others: Any, **options: Any) -> Any:
    middleware = [*others, MemoryMiddleware(search, **options)]
    return create_agent(
        model, [], system_prompt=SYSTEM, middleware=middleware, checkpointer=InMemorySaver(), store=STORES[-1]
    )


STORES: list[InMemoryStore] = [InMemoryStore()]


@pytest.fixture(autouse=True)
def store() -> InMemoryStore:
    STORES[0] = InMemoryStore()
    return STORES[0]


def test_the_prompt_only_grows_and_shows_what_changed(store: InMemoryStore) -> None:
    model = RecordingModel()
    agent = agent_with(model, in_store)
    store.put(NAMESPACE, "drink", {"text": TEA})
    ask(agent, "Hello?")
    store.put(NAMESPACE, "pets", {"text": CATS})
    ask(agent, "Cats?")
    store.put(NAMESPACE, "drink", {"text": COFFEE})
    state = ask(agent, "And?")
    ask(agent, "Bye.")
    for earlier, later in pairwise(model._prompts):
        assert texts(later)[: len(earlier)] == texts(earlier)
    assert texts(model._prompts[-1])[1::2] == [
        f"[Memories]\n- {TEA}\n\nHello?",
        f"[Memories]\n- {CATS}\n\nCats?",
        f"[Memories]\n- {COFFEE}\n[Removed from the memories: {TEA}]\n\nAnd?",
        "Bye.",
    ]
    assert texts(state["messages"])[::2] == ["Hello?", "Cats?", "And?"], "the state has the raw messages"
    assert "warmprefix_memories" not in state


def test_a_removed_memory_is_said_if_the_search_returns_all(store: InMemoryStore) -> None:
    model = RecordingModel()
    agent = agent_with(model, in_store, is_all=True)
    store.put(NAMESPACE, "drink", {"text": TEA})
    store.put(NAMESPACE, "pets", {"text": CATS})
    ask(agent, "Hello?")
    store.delete(NAMESPACE, "drink")
    ask(agent, "And?")
    assert texts(model._prompts[-1])[-1] == f"[Removed from the memories: {TEA}]\n\nAnd?"


def test_a_fork_has_the_memories_of_its_own_turns(store: InMemoryStore) -> None:
    model = RecordingModel()
    agent = agent_with(model, in_store)
    store.put(NAMESPACE, "drink", {"text": TEA})
    ask(agent, "Hello?")
    fork = next(iter(agent.get_state_history(config("t")))).config
    store.put(NAMESPACE, "pets", {"text": CATS})
    ask(agent, "Cats?")
    agent.invoke({"messages": [HumanMessage("Dogs?")]}, fork)
    main, other = model._prompts[-2:]
    assert texts(other)[:-1] == texts(main)[:-1]
    assert texts(other)[-1] == f"[Memories]\n- {CATS}\n\nDogs?"


def test_a_summary_takes_notes_away_and_they_come_back(store: InMemoryStore) -> None:
    model = RecordingModel()
    options: dict[str, Any] = {"trigger": ("messages", 6), "keep": ("messages", 2)}
    if not hasattr(shipped, "ModelRetryMiddleware"):  # langchain 1.0 counts tokens only
        options = {"max_tokens_before_summary": 6, "messages_to_keep": 2}
    summaries = SummarizationMiddleware(RecordingModel(), token_counter=len, **options)  # type: ignore[arg-type]
    agent = agent_with(model, lambda *_: [TEA], summaries)
    for number in range(6):
        ask(agent, f"Question {number}?")
        shown = [text for text in texts(model._prompts[-1]) if TEA in text]
        assert len(shown) == 1, "in each prompt, once"
    assert len(model._prompts[-1]) < 8


def test_one_search_per_question_and_tools_of_a_turn_cause_none() -> None:
    asked: list[str] = []

    def search(question: str, runtime: Any) -> Any:
        asked.append(question)
        return {"results": [{"id": "1", "memory": OSLO}]}

    model = RecordingModel()
    agent = agent_with(model, search)
    ask(agent, [{"type": "text", "text": "Where?"}, {"type": "image_url", "image_url": {"url": "data:,"}}])
    ask(agent, "Why?")
    assert asked == ["Where?", "Why?"]
    assert texts(model._prompts[0])[1][:2] == [
        {"type": "text", "text": f"[Memories]\n- {OSLO}\n\n"},
        {"type": "text", "text": "Where?"},
    ]
    assert agent.invoke({"messages": []}, config("t"))
    assert asked == ["Where?", "Why?"]


async def test_a_coroutine_function_may_search() -> None:
    async def search(question: str, runtime: Any) -> Any:
        return await runtime.store.asearch(NAMESPACE)

    STORES[0].put(NAMESPACE, "drink", {"text": TEA})
    model = RecordingModel()
    agent = agent_with(model, search)
    await agent.ainvoke({"messages": [HumanMessage("Hello?")]}, config("t"))
    assert texts(model._prompts[0])[1] == f"[Memories]\n- {TEA}\n\nHello?"
    with pytest.raises(TypeError, match="use ainvoke"):
        ask(agent, "Hello?", "other")
    with pytest.raises(TypeError, match="search must be a function"):
        MemoryMiddleware("memories")  # type: ignore[arg-type]


def test_an_error_of_the_search_passes_through_and_leaves_no_trace() -> None:
    def search(question: str, runtime: Any) -> Any:
        if question == "Fail.":
            raise OSError("gone")
        return [TEA]

    model = RecordingModel()
    agent = agent_with(model, search)
    with pytest.raises(OSError, match="gone"):
        ask(agent, "Fail.")
    ask(agent, "Hello?")
    assert texts(model._prompts[-1])[-1] == f"[Memories]\n- {TEA}\n\nHello?"


def test_the_engine_computes_less_than_with_a_dynamic_prompt(
    start_engine: Any, chat_model: Any, turns: list[Any]
) -> None:
    """Memories of real texts; both agents of LangChain talk to a real client and an emulated cache."""
    found = {turn.question: [passage.text for passage in turn.passages[:4]] for turn in turns[:8]}

    @dynamic_prompt
    def with_memories(request: Any) -> str:
        return f"{SYSTEM}\n\nMemories:\n" + "\n".join(found[request.messages[-1].text])

    computed = []
    for middleware in (with_memories, MemoryMiddleware(lambda question, runtime: found[question])):
        engine = start_engine()
        agent = create_agent(
            chat_model(engine), [], system_prompt=SYSTEM, middleware=[middleware], checkpointer=InMemorySaver()
        )
        for turn in turns[:8]:
            agent.invoke({"messages": [HumanMessage(turn.question)]}, config("t"))
        computed.append(sum(request.prompt_tokens - request.cached_tokens for request in engine.answered))
        prompts = [request.body["messages"] for request in engine.answered]
        grows = [later[: len(earlier)] == earlier for earlier, later in pairwise(prompts)]
        assert all(grows) is (len(computed) == 2)
        assert {"warmprefix_memories", "memories"}.isdisjoint(engine.answered[0].body)
    assert computed[1] < computed[0]
