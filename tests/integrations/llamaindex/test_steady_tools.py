"""Tools that come and go, in real agents: each request's list begins with that of the request before."""

from __future__ import annotations

import json
import pickle
from collections.abc import AsyncIterator
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage
from llama_index.core.bridge.pydantic import ValidationError
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.objects import ObjectRetriever
from llama_index.core.tools import BaseTool, FunctionTool
from llama_index_instrumentation.dispatcher import instrument_tags

from warmprefix_llamaindex import ContextReuseLLM

SYSTEM = "You help with files. " * 200


def tools_of(names: str) -> list[BaseTool]:
    def read(path: str) -> str:
        return path

    return [FunctionTool.from_defaults(read, name=name, description=f"Use {name}. " * 40) for name in names]


class Shelf(ObjectRetriever[BaseTool]):
    """Finds whatever tools are there now, sorted by name as clients of MCP do."""

    def __init__(self) -> None:
        self.names = ""

    async def aretrieve(self, str_or_query_bundle: Any) -> list[BaseTool]:
        return tools_of(self.names)


class Chat:
    """One agent whose tools change, and the prompts that its engine got."""

    def __init__(self, engine: Any, model: Any, mode: Any) -> None:
        self.engine, self.shelf = engine, Shelf()
        llm = ContextReuseLLM(llm=model, steady_tools=mode)
        self.agent = FunctionAgent(llm=llm, tool_retriever=self.shelf, system_prompt=SYSTEM)
        self.memories: dict[str, ChatMemoryBuffer] = {}

    async def ask(self, names: str, question: str = "What is new?", **tags: str) -> str:
        """Return the names of the tools in the request."""
        self.shelf.names = names
        memory = self.memories.setdefault(question, ChatMemoryBuffer.from_defaults(token_limit=100_000))
        with instrument_tags(tags):
            await self.agent.run(question, memory=memory)
        return sent_names(self.engine)


def sent_names(engine: Any) -> str:
    return "".join([tool["function"]["name"] for tool in engine.bodies[-1]["tools"]])


@pytest.fixture
async def engine(start_engine: Any) -> Any:
    return start_engine()


@pytest.fixture
async def model(engine: Any, open_model: Any) -> AsyncIterator[Any]:
    async with open_model(engine) as model:
        yield model


@pytest.mark.parametrize(
    ("mode", "lists"),
    [("off", ["bcd", "abcd", "abd"]), ("order", ["bcd", "bcda", "bda"]), ("keep", ["bcd", "bcda", "bcda"])],
)
async def test_lists_keep_their_beginning(engine: Any, model: Any, mode: str, lists: list[str]) -> None:
    chat = Chat(engine, model, mode)
    assert [await chat.ask(names, conversation_id="one") for names in ("bcd", "abcd", "abd")] == lists
    assert await chat.ask("abd", conversation_id="two") == "abd"
    assert await chat.ask("abd", conversation_id="one", tenant="ann") == "abd"


async def test_a_list_in_its_order_costs_new_tokens_only(engine: Any, model: Any) -> None:
    chat = Chat(engine, model, "order")
    for names in ("abcd", "dcba", "cadb", "bdac"):
        await chat.ask(names, conversation_id="one")
    before, *later = engine.answered
    for answered in later:
        assert answered.cached_tokens >= 0.95 * before.prompt_tokens
        before = answered


async def test_without_a_name_the_first_question_counts_and_nothing_that_is_gone_is_declared(
    engine: Any, model: Any
) -> None:
    chat = Chat(engine, model, "keep")
    assert [await chat.ask(names) for names in ("bc", "abc", "ab")] == ["bc", "bca", "ba"]
    assert await chat.ask("ab", "And what is old?") == "ab"


async def test_the_agent_answers_a_call_of_a_tool_that_is_gone(engine: Any, model: Any) -> None:
    chat = Chat(engine, model, "keep")
    await chat.ask("ab", conversation_id="one")
    call = {"id": "1", "type": "function", "function": {"name": "b", "arguments": json.dumps({"path": "x"})}}
    engine.script({"role": "assistant", "content": None, "tool_calls": [call]})
    assert await chat.ask("a", conversation_id="one") == "ab"
    assert "not found" in engine.bodies[-1]["messages"][-1]["content"]


async def test_every_way_to_chat_keeps_the_order(engine: Any, model: Any) -> None:
    llm = ContextReuseLLM(llm=model, steady_tools="order")
    history = [ChatMessage(role="user", content="What is new?")]
    llm.chat_with_tools(tools_of("ba"), chat_history=history)
    llm.chat_with_tools(tools_of("abc"), chat_history=history)
    assert sent_names(engine) == "bac"
    list(llm.stream_chat_with_tools(tools_of("abc"), chat_history=history))
    assert sent_names(engine) == "bac"
    await llm.achat_with_tools(tools_of("cab"), chat_history=history)
    assert sent_names(engine) == "bac"
    [_ async for _ in await llm.astream_chat_with_tools(tools_of("ac"), chat_history=history)]
    assert sent_names(engine) == "ac"
    llm.chat_with_tools(tools_of("ab"), "What is new?")  # no history, no conversation
    assert sent_names(engine) == "ab"
    pickle.loads(pickle.dumps(llm)).chat_with_tools(tools_of("ab"), chat_history=history)
    assert sent_names(engine) == "ab"


async def test_what_is_demanded_or_cannot_be_compared_goes_out_as_it_is(engine: Any, model: Any) -> None:
    llm = ContextReuseLLM(llm=model, steady_tools="keep")
    history = [ChatMessage(role="user", content="What is new?")]
    with instrument_tags({"conversation_id": "one"}):
        llm.chat_with_tools(tools_of("ba"), chat_history=history)
        llm.chat_with_tools(tools_of("a"), chat_history=history, tool_required=True)
        assert sent_names(engine) == "a"
        llm.chat_with_tools(tools_of("abb"), chat_history=history)
        assert sent_names(engine) == "abb"
        llm.chat_with_tools([], chat_history=history)
        assert not engine.bodies[-1].get("tools")
    with pytest.raises(ValidationError, match="steady_tools"):
        ContextReuseLLM(llm=model, steady_tools="behind")  # type: ignore[arg-type]
