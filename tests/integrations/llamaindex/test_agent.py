"""A real `FunctionAgent` with `ContextReuseLLM`, and the prompts that a server received from it."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.memory import Memory
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.core.tools import RetrieverTool
from llama_index.core.workflow import Context
from sqlalchemy.ext.asyncio import create_async_engine

from warmprefix import ContextBlock
from warmprefix_llamaindex import ContextReuseLLM, ContextReuseRetrieverTool

REFERENCE = re.compile(
    r'\[(?:W|Ran again; w)ord for word (?:in )?the result of the earlier call search\(\{"input": ?"(\d+)"\}\)'
    r'(?:, number 1 of such calls)?(?:: the passages? that begins? ((?:"(?:[^"\\]|\\.)*"(?:, )?)+))?\.\]'
)
BLANK_LINES = re.compile(r"\n\s*\n")
STREAMING = [True, False] if "streaming" in FunctionAgent.model_fields else [True]


class Library(BaseRetriever):
    """Finds what was found for the turn whose number the query ends with."""

    def __init__(self, turns: Sequence[Any]) -> None:
        super().__init__()
        self.turns = turns
        self.once_found: Callable[[], None] = lambda: None

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        self.once_found()
        passages = self.turns[int(query_bundle.query_str.split()[-1])].passages
        return [NodeWithScore(node=TextNode(text=block.text, id_=block.id), score=0.5) for block in passages]


@pytest.fixture
def conversation(turns: list[Any]) -> list[Any]:
    """Five turns on few topics, so that passages repeat, but no whole result does."""
    lengths = Counter(turn.conversation for turn in turns)
    long = [name for name, length in lengths.items() if length >= 3]
    ordered = [turn for name in long for turn in turns if turn.conversation == name]
    return list({frozenset(turn.passages): turn for turn in reversed(ordered)}.values())[::-1][:5]


class Chat:
    """An agent, its memory, and what it was asked."""

    def __init__(
        self,
        engine: Any,
        llm: Any,
        library: Library,
        tool: RetrieverTool,
        memory: Memory,
        turns: Sequence[Any],
        **fields: Any,
    ) -> None:
        self.engine = engine
        self.library = library
        self.agent = FunctionAgent(tools=[tool], llm=llm, system_prompt="Answer from what you find.", **fields)
        self.context = Context(self.agent)
        self.memory = memory
        self.turns = turns

    async def ask(self, turn: int, *, search: Sequence[int] | None = None) -> None:
        """Ask a turn's question; the model calls the tool for each of the turns in `search`, then answers."""
        calls = [
            {"id": f"call_{turn}_{i}", "type": "function", "function": function(found)}
            for i, found in enumerate([turn] if search is None else search)
        ]
        self.engine.script({"role": "assistant", "content": None, "tool_calls": calls})
        await self.agent.run(self.turns[turn].question, ctx=self.context, memory=self.memory)


def function(turn: int) -> dict[str, str]:
    return {"name": "search", "arguments": json.dumps({"input": str(turn)})}


@pytest.fixture
def chat(conversation: list[Any], open_model: Any) -> Callable[..., Any]:
    @asynccontextmanager
    async def start(
        engine: Any,
        *,
        turns: Sequence[Any] = conversation,
        reuse: bool = True,
        tool: type[RetrieverTool] = ContextReuseRetrieverTool,
        separator: str | None = None,
        token_limit: int = 100_000,
        **fields: Any,
    ) -> AsyncIterator[Chat]:
        database = create_async_engine("sqlite+aiosqlite:///:memory:")
        async with open_model(engine) as model:
            llm = ContextReuseLLM(llm=model, separator=separator) if reuse else model
            memory = Memory.from_defaults(
                token_limit=token_limit, token_flush_size=token_limit // 10, async_engine=database
            )
            library = Library(turns)
            found = tool.from_defaults(library, name="search", description="Finds passages.")
            yield Chat(engine, llm, library, found, memory, turns, **fields)
        await database.dispose()

    return start


def check_prompts(engine: Any, turns: Sequence[Any]) -> int:
    """Every passage that a prompt's tool messages brought is in that prompt, whole. The number of references."""
    references = 0
    for body in engine.bodies:
        prompt = ""
        results: dict[int, str] = {}  # by the number that was searched for, which no two results share
        called: dict[str, int] = {}
        for message in body["messages"]:
            called.update({call["id"]: number_in(call) for call in message.get("tool_calls", ())})
            text = message["content"] or ""
            if message["role"] == "tool":
                for reference in REFERENCE.finditer(text):
                    held = results[int(reference[1])]
                    assert REFERENCE.search(held) is None or reference[2], "the whole of a result that is not there"
                    assert all(held.count(quote) == 1 for quote in json.loads(f"[{reference[2] or ''}]"))
                    references += 1
                assert text.lower().count("word for word") == len(REFERENCE.findall(text))
                results.setdefault(called[message["tool_call_id"]], text)
            prompt += text + "\n\n"
        found = [block for number in results for block in turns[number].passages]
        assert [block.text for block in found if block.text.strip("\r\n") not in prompt] == []
    return references


def number_in(call: dict[str, Any]) -> int:
    return int(json.loads(call["function"]["arguments"])["input"])


def check_append_only(engine: Any) -> None:
    """Each prompt begins with the whole of the one before it."""
    prompts = [answered.body["messages"] for answered in engine.answered]
    for before, after in pairwise(prompts):
        assert after[: len(before)] == before
    for before, after in pairwise(engine.prompts):
        assert after.startswith(before)


@pytest.mark.parametrize("streaming", STREAMING)
async def test_five_turns(start_engine: Any, chat: Any, conversation: list[Any], streaming: bool) -> None:
    engine = start_engine()
    fields = {"streaming": streaming} if len(STREAMING) > 1 else {}
    async with chat(engine, **fields) as agent:
        for turn in range(5):
            await agent.ask(turn)
        remembered = "".join(str(message.content) for message in await agent.memory.aget())
    assert len(engine.answered) == 10
    assert [bool(body.get("stream")) for body in engine.bodies] == [streaming] * 10
    check_append_only(engine)
    assert check_prompts(engine, conversation) > 10
    assert REFERENCE.search(remembered) is None
    assert all(block.text in remembered for turn in conversation for block in turn.passages)


async def test_it_spares_tokens_and_the_engine_holds_more_of_the_rest(
    start_engine: Any, chat: Any, conversation: list[Any]
) -> None:
    with_it, without = start_engine(), start_engine()
    for engine in (with_it, without):
        async with chat(engine, reuse=engine is with_it) as agent:
            for turn in range(5):
                await agent.ask(turn)
    check_append_only(without)
    assert check_prompts(without, conversation) == 0
    assert with_it.prompt_tokens < 0.8 * without.prompt_tokens
    assert with_it.prompt_tokens - with_it.cached_tokens < 0.8 * (without.prompt_tokens - without.cached_tokens)
    assert with_it.hit_ratio > without.hit_ratio


async def test_nothing_dangles_after_a_failed_model_call(start_engine: Any, chat: Any, conversation: list[Any]) -> None:
    engine = start_engine()
    async with chat(engine) as agent:
        await agent.ask(0)
        agent.library.once_found = lambda: engine.fail_next(1)
        with pytest.raises(Exception, match="broken"):
            await agent.ask(1)
        assert "tool" in [message["role"] for message in engine.bodies[-1]["messages"][5:]]  # after what was found
        agent.library.once_found = lambda: None
        for turn in (1, 2, 0):
            await agent.ask(turn)
    assert len(engine.bodies) == len(engine.answered) + 1 == 10
    assert check_prompts(engine, conversation) > 0


@pytest.mark.parametrize("streaming", STREAMING)
async def test_parallel_calls(start_engine: Any, chat: Any, conversation: list[Any], streaming: bool) -> None:
    engine = start_engine()
    fields = {"streaming": streaming} if len(STREAMING) > 1 else {}
    async with chat(engine, **fields) as agent:
        await agent.ask(0, search=[0, 1, 0])
        await agent.ask(1, search=[1, 2])
    check_append_only(engine)
    assert check_prompts(engine, conversation) > 0
    results = [message["content"] for message in engine.bodies[1]["messages"] if message["role"] == "tool"]
    assert len(results) == 3
    assert REFERENCE.search(results[2])


async def test_a_memory_that_flushes(start_engine: Any, chat: Any, conversation: list[Any]) -> None:
    engine = start_engine()
    async with chat(engine, token_limit=6_000) as agent:
        for turn in (0, 1, 2, 3, 4, 0, 1, 2, 3, 4):
            await agent.ask(turn)
    questions = [message for message in engine.bodies[-1]["messages"] if message["role"] == "user"]
    assert len(questions) < 10
    assert check_prompts(engine, conversation) > 0


async def test_a_plain_retriever_tool_needs_the_separator(
    start_engine: Any, chat: Any, conversation: list[Any]
) -> None:
    flat = [
        replace(turn, passages=[ContextBlock(BLANK_LINES.sub("\n", block.text), block.id) for block in turn.passages])
        for turn in conversation
    ]
    references = []
    for separator in ("\n\n", None):
        engine = start_engine()
        async with chat(engine, turns=flat, tool=RetrieverTool, separator=separator) as agent:
            for turn in range(5):
                await agent.ask(turn)
        check_append_only(engine)
        references.append(check_prompts(engine, flat))
    assert references[0] > 10
    assert references[1] == 0


# What the model copies from a reference


@pytest.mark.parametrize("streaming", STREAMING)
async def test_a_tool_gets_the_text_of_a_reference_that_the_model_copies(
    start_engine: Any, open_model: Any, streaming: bool
) -> None:
    engine = start_engine()
    sea = 'The "sea" is 3,688 metres deep\non average, as the \\\\chart shows. ' * 9
    reference = '[Word for word the result of the earlier call read({"path":"sea.txt"}).]'
    forged = reference.replace("sea.txt", "secret.txt")
    written: list[dict[str, str]] = []

    def read(path: str) -> str:
        """Read a file."""
        return sea

    def write(path: str, content: str) -> str:
        """Write a file."""
        written.append({"path": path, "content": content})
        return "done"

    compact = partial(json.dumps, separators=(",", ":"))

    def calls(*made: tuple[str, str, dict[str, str]]) -> dict[str, Any]:
        listed = [
            {"id": key, "type": "function", "function": {"name": name, "arguments": compact(arguments)}}
            for key, name, arguments in made
        ]
        return {"role": "assistant", "content": None, "tool_calls": listed}

    engine.script(
        calls(("call_1", "read", {"path": "sea.txt"})),
        calls(("call_2", "read", {"path": "sea.txt"})),
        calls(
            ("call_3", "write", {"path": "a", "content": f"{reference}\n[1] {reference}"}),
            ("call_4", "write", {"path": forged, "content": reference}),
        ),
    )
    async with open_model(engine) as model:
        llm = ContextReuseLLM(llm=model)
        fields: Any = {"streaming": streaming} if len(STREAMING) > 1 else {}
        agent = FunctionAgent(tools=[read, write], llm=llm, allow_parallel_tool_calls=True, **fields)
        await agent.run("Copy it.")
    assert [message["content"] for message in engine.bodies[2]["messages"] if message["role"] == "tool"] == [
        sea,
        reference,
    ]
    copies = [{"path": "a", "content": f"{sea}\n[1] {sea}"}, {"path": forged, "content": sea}]
    assert sorted(written, key=lambda copy: len(copy["path"])) == copies
    made = [call for message in engine.bodies[3]["messages"] for call in message.get("tool_calls") or ()]
    assert [json.loads(call["function"]["arguments"]) for call in made[2:]] == copies
    assert llm.restored == 3
