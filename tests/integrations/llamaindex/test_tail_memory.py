"""`TailMemory` in real chat engines and agents, with LlamaIndex's own blocks."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ChatMessage, TextBlock
from llama_index.core.chat_engine import SimpleChatEngine
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.memory import (
    BaseMemoryBlock,
    FactExtractionMemoryBlock,
    Memory,
    StaticMemoryBlock,
    VectorMemoryBlock,
)
from llama_index.core.schema import TextNode
from llama_index.core.vector_stores.types import BasePydanticVectorStore, VectorStoreQuery, VectorStoreQueryResult
from pydantic import Field

from warmprefix_llamaindex import TailMemory

TEA, COFFEE, CATS = "Ann drinks tea.", "Ann drinks coffee.", "Ann has two cats."
LONG = "Ann paints the sea, and sells what she paints on the market of the town where her mother was born."


class Notes(BaseMemoryBlock[str]):
    """A block with given texts per question; counts how often it is asked."""

    name: str = "notes"
    found: dict[str, str] = Field(default_factory=dict)
    asked: list[str] = Field(default_factory=list)

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> str:
        question = messages[-1].content or "" if messages else ""
        self.asked.append(question)
        return self.found.get(question, "")

    async def _aput(self, messages: list[ChatMessage]) -> None:
        assert all("[Memories]" not in (message.content or "") for message in messages)


@pytest.fixture
def memory_of() -> Iterator[Callable[..., Memory]]:
    """Make a memory, whose database is closed at the end."""
    made: list[Any] = []

    def make(kind: type[Memory] = TailMemory, **options: Any) -> Memory:
        memory = kind.from_defaults(**options)
        made.append(memory)
        return memory

    yield make

    async def close() -> None:
        for memory in made:
            if memory.sql_store._async_engine is not None:
                await memory.sql_store._async_engine.dispose()

    asyncio.run(close())


def texts(messages: list[ChatMessage]) -> list[str]:
    """Return the messages' texts, without the white space of LlamaIndex's template."""
    return [
        re.sub(r"\s*\n\s*", "\n", "".join(block.text for block in message.blocks if block.block_type == "text")).strip()
        for message in messages
    ]


def turn(memory: Memory, question: str, answer: str | None = None) -> list[ChatMessage]:
    memory.put(ChatMessage(role="user", content=question))
    prompt = memory.get()
    memory.put(ChatMessage(role="assistant", content=answer or f"Answer to {question}"))
    return prompt


def noted(note: str, question: str, name: str = "notes") -> str:
    return f"<memory>\n<{name}>\n{note}\n</{name}>\n</memory>\n{question}"


def test_the_prompt_only_grows_and_shows_what_is_new(memory_of: Any) -> None:
    block = Notes(found={"Tea?": TEA, "Cats?": f"{CATS}\n\n{TEA}", "And?": TEA})
    memory = memory_of(session_id="t", memory_blocks=[block])
    prompts = [turn(memory, question) for question in ("Tea?", "Cats?", "And?", "Bye.")]
    for earlier, later in pairwise(prompts):
        assert later[: len(earlier)] == earlier
    assert texts(prompts[-1])[::2] == [
        noted(f"[Memories]\n- {TEA}", "Tea?"),
        noted(f"[Memories]\n- {CATS}", "Cats?"),
        "And?",
        "Bye.",
    ]
    assert texts(memory.get_all())[::2] == ["Tea?", "Cats?", "And?", "Bye."], "the stored messages stay as they are"
    assert memory.get()[: len(prompts[-1])] == prompts[-1], "behind an answer, too"
    assert block.asked == ["Tea?", "Cats?", "And?", "Bye."]


def test_equal_questions_are_searched_each(memory_of: Any) -> None:
    block = Notes(found={"Yes.": TEA})
    memory = memory_of(memory_blocks=[block])
    turn(memory, "Yes.", "Which?")
    block.found["Yes."] = CATS
    assert texts(turn(memory, "Yes.", "Which?"))[-1] == noted(f"[Memories]\n- {CATS}", "Yes.")
    assert len(block.asked) == 2
    for _ in range(3):
        turn(memory, "Yes.", "Which?")
    assert len(block.asked) == 5


def test_facts_that_are_gone_were_removed(memory_of: Any) -> None:
    facts = FactExtractionMemoryBlock(name="facts", llm=MockLLM(), facts=[TEA, CATS, LONG])
    static = StaticMemoryBlock(name="who", static_content=[TextBlock(text="Ann is a painter.")])
    memory = memory_of(memory_blocks=[static, facts])
    turn(memory, "Hello?")
    facts.facts = [CATS, LONG, COFFEE]
    prompt = turn(memory, "And?")
    note = f"[Memories]\n- <fact>{COFFEE}</fact>\n[Removed from the memories: <fact>{TEA}</fact>]"
    assert texts(prompt)[-1] == noted(note, "And?", "facts")
    assert "Ann is a painter." in texts(prompt)[0]


class Nodes(BasePydanticVectorStore):
    """A store that finds all its nodes."""

    stores_text: bool = True
    nodes: list[TextNode] = Field(default_factory=list)

    @property
    def client(self) -> None: ...

    def add(self, nodes: Sequence[Any], **_: Any) -> list[str]:
        self.nodes += nodes
        return [node.node_id for node in nodes]

    def delete(self, ref_doc_id: str, **_: Any) -> None:
        raise NotImplementedError

    def query(self, query: VectorStoreQuery, **_: Any) -> VectorStoreQueryResult:
        return VectorStoreQueryResult(nodes=self.nodes, similarities=[0.5] * len(self.nodes))


def test_retrieved_messages_are_shown_once(memory_of: Any) -> None:
    store = Nodes(nodes=[TextNode(text=f"<message role='user'>{TEA}</message>")])
    block = VectorMemoryBlock(name="said", vector_store=store, embed_model=MockEmbedding(4), similarity_top_k=9)
    memory = memory_of(memory_blocks=[block])
    turn(memory, "Hello?")
    store.nodes.append(TextNode(text=f"<message role='user'>{CATS}</message>"))
    prompt = turn(memory, "And?")
    assert texts(prompt)[-1] == noted(f"[Memories]\n- <message role='user'>{CATS}</message>", "And?", "said")
    store.nodes.clear()
    assert texts(turn(memory, "Bye."))[-1] == "Bye.", "what is not found again was not removed"


def test_retrieved_messages_keep_paragraphs_that_others_have_too(memory_of: Any) -> None:
    first, second = (
        f"<message role='user'>Does Ann like {what}?\n\nYes.\n\nYes.</message>" for what in ("tea", "cats")
    )
    store = Nodes(nodes=[TextNode(text=first)])
    block = VectorMemoryBlock(name="said", vector_store=store, embed_model=MockEmbedding(4), similarity_top_k=9)
    memory = memory_of(memory_blocks=[block])
    turn(memory, "Hello?")
    store.nodes.append(TextNode(text=second))
    prompt = turn(memory, "And?")
    assert texts(prompt)[0].count("Yes.") == texts(prompt)[-1].count("Yes.") == 2
    assert "tea" not in texts(prompt)[-1]


def test_a_static_text_keeps_its_paragraphs(memory_of: Any) -> None:
    hours = "Monday:\n\nclosed\n\nTuesday:\n\nclosed"
    memory = memory_of(memory_blocks=[StaticMemoryBlock(name="hours", static_content=[TextBlock(text=hours)])])
    assert texts(turn(memory, "Hello?"))[0].split("\n")[2:7] == [
        "[Memories]",
        "- Monday:",
        "closed",
        "Tuesday:",
        "closed",
    ]
    assert texts(turn(memory, "And?"))[-1] == "And?"


def test_what_does_not_fit_begins_anew(memory_of: Any) -> None:
    block = Notes(found={f"{number}?": f"Fact {number}. " * 60 for number in range(9)})
    memory = memory_of(token_limit=900, token_flush_size=300, memory_blocks=[block])
    for number in range(9):
        prompt = turn(memory, f"{number}?")
        shown = "\n".join(texts(prompt))
        assert f"Fact {number}." in texts(prompt)[-1]
        assert len(memory.tokenizer_fn(shown)) <= 900
        assert all(shown.count(f"- Fact {other}.") <= 1 for other in range(9))


@pytest.mark.parametrize("limit", [150, 100])
def test_facts_that_do_not_fit_are_not_called_removed(memory_of: Any, limit: int) -> None:
    facts = FactExtractionMemoryBlock(name="facts", llm=MockLLM(), facts=[TEA, CATS], priority=2)
    other = Notes(found={f"{number}? " + "word " * 15: "long " * 200 for number in range(4)}, priority=1)
    memory = memory_of(token_limit=limit, memory_blocks=[other, facts])
    shown = ""
    for number in range(4):
        shown += "\n".join(texts(turn(memory, f"{number}? " + "word " * 15)))
    assert "long" not in shown
    assert "Removed" not in shown


def test_facts_that_are_all_forgotten_are_removed(memory_of: Any) -> None:
    facts = FactExtractionMemoryBlock(name="facts", llm=MockLLM(), facts=[TEA])
    memory = memory_of(memory_blocks=[facts])
    turn(memory, "Tea?")
    facts.facts = []
    assert f"[Removed from the memories: <fact>{TEA}</fact>]" in texts(turn(memory, "And?"))[-1]


def test_a_history_that_is_replaced_has_only_its_own_notes(memory_of: Any) -> None:
    block = Notes(found={"Tea?": TEA, "Cats?": CATS, "And?": f"{TEA}\n\n{CATS}"})
    memory = memory_of(memory_blocks=[block])
    turn(memory, "Tea?")
    turn(memory, "Cats?")
    memory.set(memory.get_all()[2:])
    prompt = turn(memory, "And?")
    assert sum(TEA in text for text in texts(prompt)) == sum(CATS in text for text in texts(prompt)) == 1
    memory.reset()
    assert memory.get() == []


class Pictures(BaseMemoryBlock[list[ChatMessage]]):
    """A block that returns messages."""

    name: str = "pictures"

    async def _aget(self, messages: list[ChatMessage] | None = None, **_: Any) -> list[ChatMessage]:
        return [ChatMessage(role="system", content="A picture.")]

    async def _aput(self, messages: list[ChatMessage]) -> None:
        pass


@pytest.mark.parametrize("block", [Pictures(), Notes(found={"Hello?": TEA})])
def test_anything_else_is_what_a_memory_returns(memory_of: Any, block: Any) -> None:
    prompts = []
    for kind in (Memory, TailMemory):
        memory = memory_of(kind, memory_blocks=[block])
        if isinstance(block, Notes):  # an engine that puts the question into the memory later
            prompts.append(texts(memory.get(input="Hello?")))
        else:
            prompts.append(texts(turn(memory, "Hello?")))
    assert prompts[0] == prompts[1]
    assert any(TEA in text or "picture" in text for text in prompts[0])


class Painted(Notes):
    """A block that returns messages once it is full."""

    async def _aget(self, messages: list[ChatMessage] | None = None, **options: Any) -> Any:
        text = await super()._aget(messages, **options)
        return text if len(self.asked) == 1 else [ChatMessage(role="system", content=text)]


def test_what_a_block_returns_besides_text_is_shown_behind_notes_too(memory_of: Any) -> None:
    memory = memory_of(memory_blocks=[Painted(found={"Tea?": TEA, "Cats?": CATS})])
    turn(memory, "Tea?")
    assert CATS in "".join(texts(turn(memory, "Cats?")))


def test_a_chat_engine_sends_what_only_grows(recording_llm: Any, memory_of: Any) -> None:
    llm = recording_llm()
    block = Notes(found={"Tea?": TEA, "Cats?": CATS})
    memory = memory_of(memory_blocks=[block])
    engine = SimpleChatEngine.from_defaults(llm=llm, memory=memory, system_prompt="You help Ann.")
    for question in ("Tea?", "Cats?", "And?"):
        engine.chat(question)
    assert all(later.startswith(earlier.removesuffix("assistant: ")) for earlier, later in pairwise(llm.prompts))
    assert [prompt.count("[Memories]") for prompt in llm.prompts] == [1, 2, 2]
    assert all(prompt.startswith("system: You help Ann.") for prompt in llm.prompts)


async def test_an_agent_computes_less_than_with_a_plain_memory(
    start_engine: Any, open_model: Any, memory_of: Any, turns: list[Any]
) -> None:
    """Memories of real texts; a real client talks to an emulated cache."""
    found = {turn.question: "\n\n".join(p.text.replace("\n", " ") for p in turn.passages[:4]) for turn in turns[:6]}
    computed = []
    for kind in (Memory, TailMemory):
        engine = start_engine()
        async with open_model(engine) as llm:
            memory = memory_of(kind, memory_blocks=[Notes(found=found)], token_limit=200_000)
            agent = FunctionAgent(llm=llm, tools=[], system_prompt="You help Ann.")
            for asked in turns[:6]:
                await agent.run(asked.question, memory=memory)
        prompts = [answered.body["messages"] for answered in engine.answered]
        assert len(prompts) == 6
        assert all(later[: len(earlier)] == earlier for earlier, later in pairwise(prompts)) is (kind is TailMemory)
        assert all(found[asked.question][:40] in str(prompts[-1]) for asked in turns[:6]) is (kind is TailMemory)
        computed.append(sum(answered.prompt_tokens - answered.cached_tokens for answered in engine.answered))
    assert computed[1] < computed[0]
