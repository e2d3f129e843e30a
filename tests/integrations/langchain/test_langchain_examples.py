"""The examples and the code blocks of README.md and docs/frameworks.md for LangChain, run unchanged."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.documents import Document
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.language_models import GenericFakeChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from redis_servers import Server

RunExample = Callable[[str, Any], tuple[str, int]]
RunSection = Callable[[str, dict[str, Any]], dict[str, Any]]
PASSAGES = [f"Passage {n}. " + "A function opens a file and reads it. " * 12 for n in range(6)]


def chat_model(engine: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=engine.base_url, api_key=SecretStr("none"), model=engine.model, max_retries=0)


@tool
def read(path: str) -> str:
    """Read a file."""
    return PASSAGES[0]


def test_readme_block_runs(readme_blocks: Callable[[str], list[str]]) -> None:
    names: dict[str, Any] = {
        "your_retriever": RunnableLambda(lambda _: [Document("Passage.", id="a")]),
        "model": GenericFakeChatModel(messages=iter([AIMessage("An answer.")])),
        "tools": [],
    }
    [block] = readme_blocks("warmprefix_langchain")
    with Server() as server:
        exec(compile(block.replace("redis://localhost:6379/0", server.url), "README.md", "exec"), names)
        with names["planner"]:
            found = names["chat"].invoke("question", {"configurable": {"thread_id": "chat-42"}})
    assert [document.page_content.endswith("] Passage.") for document in found] == [True]
    assert names["retriever"].invoke("question") == [Document("Passage.", id="a")]
    assert names["agent"].invoke({"messages": [HumanMessage("Hello.")]})["messages"][-1].content == "An answer."


def test_the_pages_chain_runs(
    run_section: RunSection, start_engine: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    documents = [Document(text, id=f"d{n}") for n, text in enumerate(PASSAGES)]
    found = {"How do I read a file?": documents, "How do I write a file?": documents[::-1]}
    names: dict[str, Any] = {
        "your_retriever": RunnableLambda(found.__getitem__),
        "model": chat_model(start_engine()),
        "embeddings": DeterministicFakeEmbedding(size=8),
    }
    run_section("LangChain chains", names)
    capsys.readouterr()
    run_section("Before you start", names)
    assert re.match(r"1 of 2 prompts have another order\n[1-9]\d?% of the context", capsys.readouterr().out)
    names["store"].add_documents(documents)
    assert len(names["chosen"].invoke("How do I read a file?", k=2)) == 2
    run_section("Orders that are facts", names)
    locked: Any = names["chronological"]
    assert locked.invoke("How do I write a file?") == documents[::-1]


def test_the_pages_agent_runs(
    run_section: RunSection, start_engine: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    engine = start_engine()
    for call_id in ("a", "b"):
        call = {"id": call_id, "type": "function", "function": {"name": "read", "arguments": '{"path": "sea.txt"}'}}
        engine.script({"role": "assistant", "content": None, "tool_calls": [call]})
    stats = run_section("LangChain agents", {"tools": [read], "model": chat_model(engine)})["middleware"].stats()
    assert capsys.readouterr().out == "1 repeated results became references\n"
    assert (stats.prompts, stats.references, stats.errors) == (3, 1, 0)


def test_the_pages_memories_stand_in_front_of_the_question(
    run_section: RunSection, start_engine: Callable[[], Any]
) -> None:
    engine = start_engine()
    run_section("LangChain memories", {"model": chat_model(engine)})
    assert [message["content"] for message in engine.answered[0].body["messages"]] == [
        "You help Ann.",
        "[Memories]\n- Ann drinks tea.\n\nWhat do I drink?",
    ]


def test_the_pages_tenants_share_no_cache(run_section: RunSection, start_engine: Callable[[], Any]) -> None:
    engine = start_engine()
    names = run_section("Tenants", {"model": chat_model(engine), "salt_key": b"a secret of ours"})
    for tenant in ("acme", "acme", "umbrella"):
        salt = names["tenant_salt"](names["salt_key"], tenant)
        names["model"].bind(extra_body={"cache_salt": salt}).invoke("Hello. " * 100)
    assert [request.cached_tokens > 0 for request in engine.answered[1:]] == [False, True, False]


def test_agent_example_sends_the_passage_once(start_engine: Callable[[], Any], run_example: RunExample) -> None:
    engine = start_engine()
    for turn in range(2):
        function = {"name": "documentation", "arguments": json.dumps({"function": "dumps"})}
        call = {"id": f"call-{turn}", "type": "function", "function": function}
        engine.script({"role": "assistant", "content": None, "tool_calls": [call]})
        engine.script({"role": "assistant", "content": f"That was turn {turn}."})
    printed, lines = run_example("langchain_agent.py", engine)
    passage = str(inspect.getdoc(json.dumps))
    assert "That was turn 1." in printed
    assert f"{(len(passage) + 3) // 4} tokens were spared" in printed
    assert engine.prompts[-1].count(passage) == 1
    assert engine.prompts[-1].count("[Word for word the result of the earlier call documentation(") == 1
    assert lines <= 40
