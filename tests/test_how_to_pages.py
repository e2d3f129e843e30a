"""The code blocks of the pages on frameworks and engines run as they stand, against the emulator."""

from __future__ import annotations

import asyncio
import json
import math
import operator
import os
import re
import runpy
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, TypedDict

import pytest
from openai import DefaultAsyncHttpxClient, OpenAI

from warmprefix import ContextBlock
from warmprefix.cache_profiles import as_profile
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

DOCS = Path(__file__).parents[1] / "docs"
LONG = "The sea is deep, and salt, and older than the land around it. " * 12
"""Long enough for a reference to be shorter."""
PASSAGES = [f"Passage {n}. " + f"The function number {n} opens a file and reads it. " * 12 for n in range(6)]

pytestmark = [
    # LangChain's first interface of Pydantic, and what LlamaIndex and its workflows warn of in themselves.
    pytest.mark.filterwarnings("ignore:Core Pydantic V1 functionality:UserWarning"),
    pytest.mark.filterwarnings("ignore:The 'validate_default' attribute"),
    pytest.mark.filterwarnings("ignore:The `(__fields__|__fields_set__|model_fields|model_computed_fields)`"),
    pytest.mark.filterwarnings("ignore:Accessing the 'model_(computed_)?fields' attribute"),
    pytest.mark.filterwarnings("ignore:Skipping serialization of .* unserializable key. memory"),
    # The database in memory of a LlamaIndex agent's own memory.
    pytest.mark.filterwarnings("ignore:.*was deleted before being closed:ResourceWarning"),
]


class Engines:
    """Starts emulators, and clients of them, which all end with the test."""

    def __init__(self, stack: ExitStack, folder: Path) -> None:
        self._stack = stack
        self._folder = folder
        self.model = EmulatorConfig().model

    def start(self, *answers: dict[str, Any], profile: str = "full-attention") -> str:
        """Start an emulator that gives `answers` to requests with tools; return its base URL."""
        script = None
        if answers:
            script = self._folder / "script.json"
            script.write_text(json.dumps(answers))
        config = EmulatorConfig(
            prefill_rate=math.inf, decode_rate=math.inf, base_ttft_ms=0, script=script, profile=profile
        )
        return self._stack.enter_context(EmulatorServer(config)).base_url

    def client(self, url: str) -> OpenAI:
        return self._stack.enter_context(OpenAI(base_url=url, api_key="none", max_retries=0))


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[Engines]:
    with ExitStack() as stack:
        yield Engines(stack, tmp_path)


def sections(page: str) -> dict[str, list[str]]:
    """Return the Python blocks under each heading of the second level."""
    _, *parts = re.split(r"^## ", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {
        part.partition("\n")[0]: re.findall(r"^```python\n(.*?)^```$", part, re.DOTALL | re.MULTILINE) for part in parts
    }


def run(page: str, heading: str, names: dict[str, Any], replaced: tuple[str, str] = ("", "")) -> dict[str, Any]:
    """Run the blocks under a heading, one after the other."""
    blocks = sections(page)[heading]
    assert blocks, heading
    for block in blocks:
        exec(compile(block.replace(*replaced) if replaced[0] else block, page, "exec", dont_inherit=True), names)
    return names


def chat_model(engines: Engines, url: str) -> Any:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    return ChatOpenAI(base_url=url, api_key=SecretStr("none"), model=engines.model, max_retries=0)


def test_langchain_chains(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableLambda

    documents = [Document(text, id=f"d{n}") for n, text in enumerate(PASSAGES)]
    found = {"How do I read a file?": documents, "How do I write a file?": documents[::-1]}
    url = engines.start()
    names = run(
        "frameworks.md",
        "LangChain chains",
        {"your_retriever": RunnableLambda(found.__getitem__), "model": chat_model(engines, url)},
    )
    capsys.readouterr()
    run("frameworks.md", "Before you start", names)
    assert re.match(
        r"1 of 2 prompts have another order\n[1-9]\d?% of the context is predicted", capsys.readouterr().out
    )
    assert names["retriever"].invoke("How do I write a file?") == documents


def test_langchain_agents(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    from langchain_core.tools import tool

    @tool
    def read(path: str) -> str:
        """Read a file."""
        return LONG

    call = {"calls": [{"name": "read", "arguments": {"path": "sea.txt"}}]}
    url = engines.start(call, call, {"text": "It is deep."})
    names = run("frameworks.md", "LangChain agents", {"tools": [read], "model": chat_model(engines, url)})
    assert capsys.readouterr().out == "1 repeated results became references\n"
    stats = names["middleware"].stats()
    assert (stats.prompts, stats.references, stats.errors) == (3, 1, 0)


@pytest.fixture
def index() -> Any:
    asyncio.set_event_loop(None)  # keep LlamaIndex from creating one that it never closes
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.schema import TextNode

    nodes = [TextNode(text=text, id_=f"n{number}") for number, text in enumerate(PASSAGES)]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))


def language_model(engines: Engines, url: str, client: Any = None) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    model: Any = OpenAILike
    return model(
        async_http_client=client,
        model=engines.model,
        api_base=url,
        api_key="none",
        is_chat_model=True,
        is_function_calling_model=True,
        context_window=100_000,
        max_retries=0,
    )


def test_llamaindex_engines(engines: Engines, index: Any) -> None:
    names = run(
        "frameworks.md", "LlamaIndex engines", {"index": index, "llm": language_model(engines, engines.start())}
    )
    assert names["planner"].stats().plans == 2
    sources = names["query_engine"].query("How?").source_nodes
    assert sorted(source.metadata["warmprefix_rank"] for source in sources) == list(range(len(sources)))


async def test_llamaindex_agents(engines: Engines, index: Any) -> None:
    prompts: list[str] = []

    async def record(request: Any) -> None:
        prompts.append(request.content.decode())

    call = {"calls": [{"name": "search", "arguments": {"input": "files"}}]}
    url = engines.start(call, call, {"text": "So it is."})
    async with DefaultAsyncHttpxClient(event_hooks={"request": [record]}) as client:
        names = run("frameworks.md", "LlamaIndex agents", {"index": index, "llm": language_model(engines, url, client)})
        assert await names["ask"]("How do I read a file?") == "So it is."
    assert "[Word for word" not in prompts[1]
    assert prompts[2].count("[Word for word") == 1


@pytest.fixture
def your_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MEM0_DIR", os.environ.get("MEM0_DIR") or tempfile.mkdtemp(prefix="mem0-"))
    monkeypatch.setenv("MEM0_TELEMETRY", "False")
    from mem0 import Memory
    from mem0.embeddings.base import EmbeddingBase
    from qdrant_client import QdrantClient

    def embed(self: Any, text: str, memory_action: str | None = None) -> list[float]:
        places = {zlib.crc32(word.encode()) % 64 for word in re.findall(r"\w+", text.lower())}
        return [float(place in places) for place in range(64)]

    store = {"client": QdrantClient(":memory:"), "collection_name": "how-to", "embedding_model_dims": 64}
    unused = {"provider": "openai", "config": {"api_key": "none"}}
    memory = Memory.from_config(
        {
            "vector_store": {"provider": "qdrant", "config": store},
            "embedder": unused,
            "llm": unused,
            "history_db_path": ":memory:",
        }
    )
    memory.embedding_model = type("Words", (EmbeddingBase,), {"embed": embed})()  # words shared are places shared
    for fact in ("Ann drinks green tea every morning.", "Does Ann drink coffee? She does not drink coffee."):
        memory.add(fact, user_id="ann", infer=False)
    yield memory
    memory.close()


def test_mem0(engines: Engines, your_memory: Any) -> None:
    url = engines.start()
    names = run(
        "frameworks.md",
        "Mem0",
        {"your_memory": your_memory, "client": engines.client(url), "model_name": engines.model},
    )
    assert "Ann drinks green tea every morning." in names["found"]["context"]
    prompt = "\n".join(message["content"] for message in names["chat"].messages)
    assert prompt.count("Ann drinks green tea every morning.") == 1
    assert re.search(r"Please also use the context labelled \[m[0-9a-f]{4}\].* above in this conversation\.", prompt)
    assert names["answer"].usage.prompt_tokens_details.cached_tokens > 0


def test_chain_of_agents(engines: Engines, capsys: pytest.CaptureFixture[str]) -> None:
    names: dict[str, Any] = {
        "clients": {name: engines.client(engines.start()) for name in ("ann", "ben")},
        "model_name": engines.model,
        "documents": PASSAGES,
    }
    run("frameworks.md", "Chain-of-Agents", names)
    again = names["chain"].run("How do I write a file?", PASSAGES)
    assert {report.agent for report in again.workers} == {"ann", "ben"}
    assert again.usage.cached_tokens > names["answer"].usage.cached_tokens
    assert "tokens were cached" in capsys.readouterr().out


class State(TypedDict):
    """The state of the graph."""

    question: str
    documents: list[Any]
    notes: Annotated[list[str], operator.add]


def test_langgraph(engines: Engines) -> None:
    from langgraph.graph import END, StateGraph

    graph: Any = StateGraph(State)
    names = {
        "graph": graph,
        "clients": {name: engines.client(engines.start()) for name in ("ann", "ben")},
        "model_name": engines.model,
    }
    run("frameworks.md", "LangGraph and LlamaIndex workflows", names)
    graph.add_edge("read", END)
    application = graph.compile()
    for question in ("How do I read a file?", "How do I write a file?"):
        notes = application.invoke({"question": question, "documents": PASSAGES, "notes": []})["notes"]
        assert len(notes) == 2


@pytest.fixture
def passages() -> list[SimpleNamespace]:
    return [SimpleNamespace(id=f"p{number}", text=text) for number, text in enumerate(PASSAGES)]


def test_openais_client(engines: Engines, passages: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = run(
        "frameworks.md",
        "OpenAI's client",
        {"base_url": engines.start(), "model_name": engines.model, "passages": passages},
    )
    names["linked"].close()
    assert capsys.readouterr().out == "1 0\n"
    link, planner = names["link"].stats(), names["planner"].stats()
    assert (link.requests, link.commits, link.unsent, link.unmatched) == (1, 1, 0, 0)
    assert (planner.commits, planner.reports) == (1, 1)


def test_plain_python(passages: Any) -> None:
    prompts: list[str] = []
    names = run("frameworks.md", "Plain Python", {"passages": passages, "call_model": prompts.append})
    assert names["planner"].stats().commits == 1
    assert all(passage.text in prompts[0] for passage in passages)


def test_anything_else(engines: Engines) -> None:
    from warmprefix_gateway import GatewayOptions, GatewayServer

    with GatewayServer(GatewayOptions(upstreams=(engines.start(),), port=0)) as gateway:
        here = ("http://127.0.0.1:8080", gateway.url)
        names = run("frameworks.md", "Anything else", {"model_name": engines.model}, here)
        names["behind"].close()


def test_tenants(engines: Engines) -> None:
    names = run(
        "frameworks.md", "Tenants", {"model": chat_model(engines, engines.start()), "salt_key": b"a secret of ours"}
    )
    long = "Hello. " * 100

    def cached(tenant: str) -> Any:
        salted = names["model"].bind(extra_body={"cache_salt": names["tenant_salt"](names["salt_key"], tenant)})
        return salted.invoke(long).usage_metadata["input_token_details"].get("cache_read", 0)

    assert cached("acme") == 0
    assert cached("acme") > 0
    assert cached("umbrella") == 0


@pytest.fixture
def retrieved() -> list[tuple[str, list[ContextBlock]]]:
    blocks = [ContextBlock(text * 3, id=f"p{number}") for number, text in enumerate(PASSAGES)]
    return [(f"Question {n}?", blocks if n % 2 else blocks[::-1]) for n in range(8)]


def test_the_check_that_fits_all(engines: Engines, retrieved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"base_url": engines.start(), "model": engines.model, "retrieved": retrieved}
    run("engines.md", "The check that fits all", names)
    names["client"].close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 answers with a count of cached tokens"
    assert int(lines[1].partition(" cached")[0]) > 0
    assert float(lines[2].removeprefix("agreement ")) > 0.8
    assert lines[4].startswith("profile: full-attention from ")


def test_kv_events(engines: Engines) -> None:
    url = engines.start().removesuffix("/v1")
    (block,) = sections("engines.md")["KV events"]
    here = re.sub(r"tcp://engine:\d+", "tcp://127.0.0.1:9", block.replace("http://engine:8000", url))
    names: dict[str, Any] = {"documents": PASSAGES, "ask": lambda plan: SimpleNamespace(prompt_token_ids=[1, 2, 3])}
    exec(compile(here, "engines.md", "exec", dont_inherit=True), names)
    names["planner"].close()
    assert names["planner"].stats().commits == 1


def test_hybrid_models(capsys: pytest.CaptureFixture[str]) -> None:
    run("engines.md", "Hybrid models", {})
    assert capsys.readouterr().out == "Checkpoints(block=528, unit=16, junction_only=False)\n"


def test_hosted_apis(engines: Engines, retrieved: Any) -> None:
    pytest.importorskip("anthropic")
    url = engines.start(profile="anthropic").removesuffix("/v1")
    names = {"anthropic_url": url, "model": engines.model, "retrieved": retrieved, "preamble": "Answer. " * 600}
    run("engines.md", "Anthropic", names)
    names["hosted"].close()
    marks = names["link"].mark_stats()
    assert marks.read_tokens > marks.written_tokens > 0
    assert (marks.refused, marks.errors) == (0, 0)
    run("engines.md", "OpenAI", names)
    assert names["planner"].profile.name == "openai"
    assert names["planner"].profile.isolation == "prompt_cache_key"


def test_the_named_profiles_exist() -> None:
    page = (DOCS / "engines.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| .* \| .* \| (.*`.*) \|$", page.partition("\n## ")[0], re.MULTILINE)
    listed = " ".join(table).replace("BLOCK,UNIT", "528,16").replace("SLOTS", "4")
    named = {*re.findall(r"`([^`]+)`", listed), *re.findall(r'profile[= ]"([^"]+)"', page)}
    assert {"anthropic", "openai", "gemini", "deepseek", "sglang-checkpoints", "llama.cpp(4)"} <= named
    for name in named:
        assert as_profile(name).name == name


def test_the_diagrams_are_those_that_the_script_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(DOCS / "pictures")
    drawn = runpy.run_path(str(DOCS / "pictures" / "diagrams.py"))["diagrams"]()
    page = (DOCS / "concepts.md").read_text(encoding="utf-8")
    for name, svg in drawn.items():
        assert (DOCS / "pictures" / name).read_text(encoding="utf-8") == svg
        assert f"(pictures/{name})" in page
