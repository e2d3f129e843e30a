"""The examples and the code blocks of README.md and docs/frameworks.md for LlamaIndex, run unchanged."""

from __future__ import annotations

import gc
import json
import warnings
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

from llama_index.core import MockEmbedding, QueryBundle, Settings, VectorStoreIndex
from llama_index.core.base.base_retriever import BaseRetriever
from llama_index.core.llms import ChatMessage, MockLLM
from llama_index.core.schema import NodeWithScore, TextNode

RunExample = Callable[[str, Any], tuple[str, int]]


class EmptyRetriever(BaseRetriever):
    """A retriever that finds nothing."""

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return []


async def test_readme_block_runs(
    readme_blocks: Callable[[str], list[str]], start_engine: Callable[[], Any], open_model: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(Settings, "_llm", MockLLM())
    index = VectorStoreIndex([TextNode(text="Passage.", id_="a")], embed_model=MockEmbedding(embed_dim=4))
    engine = start_engine()
    async with open_model(engine) as model:
        names: dict[str, Any] = {"index": index, "retriever": index.as_retriever(), "llm": model}
        [block] = readme_blocks("warmprefix_llamaindex")
        exec(compile(block, "README.md", "exec"), names)
        assert "\nPassage.\n" in str(names["engine"].query("What is it?"))
        engine.script({"role": "assistant", "content": "An answer."})
        assert str(await names["agent"].run("Hello.")) == "An answer."


async def test_the_pages_engines_and_agent_run(
    run_section: Callable[[str, dict[str, Any]], dict[str, Any]], start_engine: Callable[[], Any], open_model: Any
) -> None:
    nodes = [TextNode(text=f"Passage {n}. " + "It opens a file. " * 20, id_=f"n{n}") for n in range(6)]
    engine = start_engine()
    async with open_model(engine) as model:
        names = {"index": VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4)), "llm": model}
        run_section("LlamaIndex engines", names)
        assert names["planner"].stats().plans == 2
        sources = names["query_engine"].query("How?").source_nodes
        assert sorted(source.metadata["warmprefix_rank"] for source in sources) == list(range(len(sources)))
        run_section("LlamaIndex agents", names)
        engine.script(search_call("files"), search_call("files"), {"role": "assistant", "content": "So it is."})
        assert await names["ask"]("How do I read a file?") == "So it is."
        run_section("LlamaIndex chats", names)
        index, empty = names["index"], SimpleNamespace(as_retriever=EmptyRetriever)  # old releases refuse empty indexes
        chat = names["Chat"]()
        context = names["Context"](chat)
        for question in ("How do I read a file?", "How do I write a file?", "And nothing?", "How do I copy a file?"):
            names["index"] = empty if "nothing" in question else index
            assert await chat.run(ctx=context, question=question)
            context = names["Context"].from_dict(chat, json.loads(json.dumps(context.to_dict())))
        assert [prompt.count("Also use the passages above that begin with") for prompt in engine.prompts[-4:]] == [
            0,
            1,
            1,
            2,
        ]
    assert [prompt.count("[Word for word") for prompt in engine.prompts[-6:]] == [0, 1, 0, 0, 0, 0]
    names.clear()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the database in memory of the agent's own memory
        gc.collect()


def test_rag_example_finds_most_of_its_prompt_cached(start_engine: Callable[[], Any], run_example: RunExample) -> None:
    engine = start_engine()
    printed, lines = run_example("llamaindex_rag.py", engine)
    assert "2 of 3 prompts were reordered" in printed
    assert len(engine.answered) == 3
    assert not any("Most relevant above" in prompt for prompt in engine.prompts)  # the best one stays the first
    assert engine.answered[-1].cached_tokens > engine.answered[-1].prompt_tokens / 2
    assert lines <= 40


def search_call(query: str) -> dict[str, Any]:
    function = {"name": "search", "arguments": json.dumps({"input": query})}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": query, "type": "function", "function": function}],
    }


def test_agent_example_repeats_nothing(start_engine: Callable[[], Any], run_example: RunExample) -> None:
    engine = start_engine()
    for query in ("rename a file", "remove a file", "remove a directory"):
        engine.script(search_call(query), {"role": "assistant", "content": f"See the passages on {query!r}."})
    printed, lines = run_example("llamaindex_agent.py", engine)
    assert "And a directory? See the passages on 'remove a directory'." in printed
    assert len(engine.answered) == 6
    assert '[Word for word in the result of the earlier call search({"input": "' in engine.prompts[-1]
    assert all(later.startswith(earlier) for earlier, later in pairwise(engine.prompts))
    assert engine.answered[-1].cached_tokens > engine.answered[-1].prompt_tokens / 2
    assert lines <= 40


async def test_the_pages_memory_stands_in_front_of_the_question(
    run_section: Callable[[str, dict[str, Any]], dict[str, Any]],
) -> None:
    memory: Any = run_section("LlamaIndex memories", {})["ann"]
    await memory.aput(ChatMessage(role="user", content="What do I drink?"))
    (message,) = await memory.aget()
    assert "- Ann drinks tea." in message.content
    assert message.content.endswith("What do I drink?")
    await memory.sql_store._async_engine.dispose()
