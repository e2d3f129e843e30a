"""The code blocks of the pages on frameworks and engines run as they stand, against the emulator."""

from __future__ import annotations

import asyncio
import json
import math
import operator
import re
import tempfile
import zlib
from collections.abc import Callable, Iterator
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
MODEL = EmulatorConfig().model
PASSAGES = [f"Passage {n}. " + f"The function number {n} opens a file and reads it. " * 12 for n in range(6)]
READ_AND_WRITE = ("How do I read a file?", "How do I write a file?")

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

Start = Callable[..., str]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start an emulator that ends with the test, and return its base URL. It gives `answers` to requests with tools."""
    with ExitStack() as stack:

        def started(*answers: dict[str, Any], profile: str = "full-attention") -> str:
            script = tmp_path / "script.json" if answers else None
            if script is not None:
                script.write_text(json.dumps(answers))
            rates: dict[str, Any] = {"prefill_rate": math.inf, "decode_rate": math.inf, "base_ttft_ms": 0}
            return stack.enter_context(EmulatorServer(EmulatorConfig(**rates, script=script, profile=profile))).base_url

        yield started


@pytest.fixture
def clients(start: Start) -> Iterator[dict[str, OpenAI]]:
    """Clients of two agents, each with an engine of its own."""
    with ExitStack() as stack:
        yield {name: stack.enter_context(OpenAI(base_url=start(), api_key="none")) for name in ("ann", "ben")}


def run(page: str, heading: str, names: dict[str, Any], replaced: dict[str, str] | None = None) -> dict[str, Any]:
    """Run the Python blocks under a heading of the second level, one after the other."""
    _, *parts = re.split(r"^## ", (DOCS / page).read_text(encoding="utf-8"), flags=re.MULTILINE)
    (section,) = (part for part in parts if part.startswith(f"{heading}\n"))
    blocks = re.findall(r"^```python\n(.*?)^```$", section, re.DOTALL | re.MULTILINE)
    assert blocks, heading
    for block in blocks:
        for old, new in (replaced or {}).items():
            block = block.replace(old, new)
        exec(compile(block, page, "exec", dont_inherit=True), names)
    return names


# -- frameworks.md ----------------------------------------------------------------------------------------------------


def chat_model(url: str) -> Any:
    from langchain_openai import ChatOpenAI
    from pydantic import SecretStr

    return ChatOpenAI(base_url=url, api_key=SecretStr("none"), model=MODEL, max_retries=0)


def test_langchain_chains(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    from langchain_core.documents import Document
    from langchain_core.runnables import RunnableLambda

    documents = [Document(text, id=f"d{n}") for n, text in enumerate(PASSAGES)]
    found = dict(zip(READ_AND_WRITE, (documents, documents[::-1]), strict=True))
    names = {"your_retriever": RunnableLambda(found.__getitem__), "model": chat_model(start())}
    run("frameworks.md", "LangChain chains", names)
    capsys.readouterr()
    run("frameworks.md", "Before you start", names)
    shown = r"1 of 2 prompts have another order\n[1-9]\d?% of the context is predicted"
    assert re.match(shown, capsys.readouterr().out)
    assert names["retriever"].invoke(READ_AND_WRITE[1]) == documents


def test_langchain_agents(start: Start, capsys: pytest.CaptureFixture[str]) -> None:
    from langchain_core.tools import tool

    @tool
    def read(path: str) -> str:
        """Read a file."""
        return PASSAGES[0]

    call = {"calls": [{"name": "read", "arguments": {"path": "sea.txt"}}]}
    model = chat_model(start(call, call, {"text": "It is deep."}))
    stats = run("frameworks.md", "LangChain agents", {"tools": [read], "model": model})["middleware"].stats()
    assert capsys.readouterr().out == "1 repeated results became references\n"
    assert (stats.prompts, stats.references, stats.errors) == (3, 1, 0)


@pytest.fixture
def index() -> Any:
    asyncio.set_event_loop(None)  # keep LlamaIndex from creating one that it never closes
    from llama_index.core import MockEmbedding, VectorStoreIndex
    from llama_index.core.schema import TextNode

    nodes = [TextNode(text=text, id_=f"n{number}") for number, text in enumerate(PASSAGES)]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=4))


def language_model(url: str, client: Any = None) -> Any:
    from llama_index.llms.openai_like import OpenAILike

    model: Any = OpenAILike
    kinds = {"is_chat_model": True, "is_function_calling_model": True, "context_window": 100_000, "max_retries": 0}
    return model(model=MODEL, api_base=url, api_key="none", async_http_client=client, **kinds)


def test_llamaindex_engines(start: Start, index: Any) -> None:
    names = run("frameworks.md", "LlamaIndex engines", {"index": index, "llm": language_model(start())})
    assert names["planner"].stats().plans == 2
    sources = names["query_engine"].query("How?").source_nodes
    assert sorted(source.metadata["warmprefix_rank"] for source in sources) == list(range(len(sources)))


async def test_llamaindex_agents(start: Start, index: Any) -> None:
    prompts: list[str] = []

    async def record(request: Any) -> None:
        prompts.append(request.content.decode())

    call = {"calls": [{"name": "search", "arguments": {"input": "files"}}]}
    url = start(call, call, {"text": "So it is."})
    async with DefaultAsyncHttpxClient(event_hooks={"request": [record]}) as client:
        names = run("frameworks.md", "LlamaIndex agents", {"index": index, "llm": language_model(url, client)})
        assert await names["ask"](READ_AND_WRITE[0]) == "So it is."
    assert [prompt.count("[Word for word") for prompt in prompts[1:3]] == [0, 1]


@pytest.fixture
def your_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("MEM0_DIR", tempfile.mkdtemp(prefix="mem0-"))
    monkeypatch.setenv("MEM0_TELEMETRY", "False")
    from mem0 import Memory
    from mem0.embeddings.base import EmbeddingBase
    from qdrant_client import QdrantClient

    def embed(self: Any, text: str, memory_action: str | None = None) -> list[float]:
        places = {zlib.crc32(word.encode()) % 64 for word in re.findall(r"\w+", text.lower())}
        return [float(place in places) for place in range(64)]

    store = {"client": QdrantClient(":memory:"), "collection_name": "how-to", "embedding_model_dims": 64}
    unused = {"provider": "openai", "config": {"api_key": "none"}}
    vectors = {"provider": "qdrant", "config": store}
    memory = Memory.from_config(
        {"vector_store": vectors, "embedder": unused, "llm": unused, "history_db_path": ":memory:"}
    )
    memory.embedding_model = type("Words", (EmbeddingBase,), {"embed": embed})()  # words shared are places shared
    for fact in ("Ann drinks green tea every morning.", "Does Ann drink coffee? She does not drink coffee."):
        memory.add(fact, user_id="ann", infer=False)
    yield memory
    memory.close()


def test_mem0(clients: dict[str, OpenAI], your_memory: Any) -> None:
    names = {"your_memory": your_memory, "client": clients["ann"], "model_name": MODEL}
    run("frameworks.md", "Mem0", names)
    assert "Ann drinks green tea every morning." in names["found"]["context"]
    prompt = "\n".join(message["content"] for message in names["chat"].messages)
    assert prompt.count("Ann drinks green tea every morning.") == 1
    assert re.search(r"Please also use the context labelled \[m[0-9a-f]{4}\].* above in this conversation\.", prompt)
    assert names["answer"].usage.prompt_tokens_details.cached_tokens > 0


def test_chain_of_agents(clients: dict[str, OpenAI], capsys: pytest.CaptureFixture[str]) -> None:
    names = {"clients": clients, "model_name": MODEL, "documents": PASSAGES}
    run("frameworks.md", "Chain-of-Agents", names)
    chain: Any = names["chain"]
    again = chain.run(READ_AND_WRITE[1], PASSAGES)
    assert {report.agent for report in again.workers} == {"ann", "ben"}
    assert "tokens were cached" in capsys.readouterr().out
    assert again.usage.cached_tokens > 0


class State(TypedDict):
    """The state of the graph."""

    question: str
    documents: list[Any]
    notes: Annotated[list[str], operator.add]


def test_langgraph(clients: dict[str, OpenAI]) -> None:
    from langgraph.graph import END, StateGraph

    graph: Any = StateGraph(State)
    names = {"graph": graph, "clients": clients, "model_name": MODEL}
    run("frameworks.md", "LangGraph and LlamaIndex workflows", names)
    graph.add_edge("read", END)
    application = graph.compile()
    for question in READ_AND_WRITE:
        assert len(application.invoke({"question": question, "documents": PASSAGES, "notes": []})["notes"]) == 2


def test_tenants(start: Start) -> None:
    names = run("frameworks.md", "Tenants", {"model": chat_model(start()), "salt_key": b"a secret of ours"})

    def cached(tenant: str) -> Any:
        salted = names["model"].bind(extra_body={"cache_salt": names["tenant_salt"](names["salt_key"], tenant)})
        return salted.invoke("Hello. " * 100).usage_metadata["input_token_details"].get("cache_read", 0)

    assert [cached(tenant) > 0 for tenant in ("acme", "acme", "umbrella")] == [False, True, False]


# -- engines.md -------------------------------------------------------------------------------------------------------


@pytest.fixture
def retrieved() -> list[tuple[str, list[ContextBlock]]]:
    blocks = [ContextBlock(text * 3, id=f"p{number}") for number, text in enumerate(PASSAGES)]
    return [(f"Question {n}?", blocks if n % 2 else blocks[::-1]) for n in range(8)]


def test_the_check_that_fits_all(start: Start, retrieved: Any, capsys: pytest.CaptureFixture[str]) -> None:
    names = {"base_url": start(), "model": MODEL, "retrieved": retrieved}
    run("engines.md", "The check that fits all", names)["client"].close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "8 answers with a count of cached tokens"
    assert int(lines[1].partition(" cached")[0]) > 0
    assert float(lines[2].removeprefix("agreement ")) > 0.8
    assert lines[4].startswith("profile: full-attention from ")


def test_kv_events(start: Start) -> None:
    here = {"http://engine:8000": start().removesuffix("/v1"), "tcp://engine:": "tcp://127.0.0.1:"}
    ask = {"documents": PASSAGES, "ask": lambda plan: SimpleNamespace(prompt_token_ids=[1, 2, 3])}
    planner = run("engines.md", "KV events", ask, here)["planner"]
    planner.close()
    assert planner.stats().commits == 1


def test_hybrid_models(capsys: pytest.CaptureFixture[str]) -> None:
    run("engines.md", "Hybrid models", {})
    assert capsys.readouterr().out == "Checkpoints(block=528, unit=16, junction_only=False)\n"


def test_hosted_apis(start: Start, retrieved: Any) -> None:
    pytest.importorskip("anthropic")
    url = start(profile="anthropic").removesuffix("/v1")
    names = {"anthropic_url": url, "model": MODEL, "retrieved": retrieved, "preamble": "Answer. " * 600}
    run("engines.md", "Anthropic", names)["hosted"].close()
    marks = names["link"].mark_stats()
    assert marks.read_tokens > marks.written_tokens > 0
    assert (marks.refused, marks.errors) == (0, 0)
    planner = run("engines.md", "OpenAI", names)["planner"]
    assert (planner.profile.name, planner.profile.isolation) == ("openai", "prompt_cache_key")


def test_the_named_profiles_exist() -> None:
    page = (DOCS / "engines.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| .* \| .* \| (.*`.*) \|$", page.partition("\n## ")[0], re.MULTILINE)
    listed = " ".join(table).replace("BLOCK,UNIT", "528,16").replace("SLOTS", "4")
    named = {*re.findall(r"`([^`]+)`", listed), *re.findall(r'profile[= ]"([^"]+)"', page)}
    assert {"anthropic", "openai", "gemini", "deepseek", "sglang-checkpoints", "llama.cpp(4)"} <= named
    for name in named:
        assert as_profile(name).name == name
