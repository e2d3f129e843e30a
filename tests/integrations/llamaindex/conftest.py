"""LlamaIndex's own warnings to ignore, a model that records its prompts, and a retriever with given results."""

from __future__ import annotations

import asyncio
import re
import warnings
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest

from warmprefix import ContextBlock, ContextPlanner

with warnings.catch_warnings():  # pytest ignores the below only once this file is read
    warnings.filterwarnings("ignore", "The 'validate_default' attribute")
    from llama_index.core.base.llms.types import CompletionResponse, CompletionResponseGen, LLMMetadata
    from llama_index.core.bridge.pydantic import Field
    from llama_index.core.llms import CustomLLM
    from llama_index.core.llms.callbacks import llm_completion_callback
    from llama_index.core.retrievers import BaseRetriever
    from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from llama_index.llms.openai_like import OpenAILike
from openai import DefaultAsyncHttpxClient, DefaultHttpxClient

from warmprefix_llamaindex import ContextReusePostprocessor

THIRD_PARTY_WARNINGS = (
    # Pydantic, because of models in llama-index-core 0.13.
    "ignore:The 'validate_default' attribute",
    # Workflows look at all members of an agent, which is a pydantic model.
    "ignore:The `(__fields__|__fields_set__|model_fields|model_computed_fields)`",
    "ignore:Accessing the 'model_(computed_)?fields' attribute",
    # Workflows make one of every agent in the older version.
    "ignore:ServiceManager is deprecated",
    # A context is copied from run to run without its memory, which is handed to each run.
    "ignore:Skipping serialization of .* unserializable key. memory",
)


def pytest_configure(config: pytest.Config) -> None:
    for warning in THIRD_PARTY_WARNINGS:
        config.addinivalue_line("filterwarnings", warning)


@pytest.fixture(autouse=True)
def no_event_loop_of_its_own() -> None:
    """Keep LlamaIndex from creating an event loop for the main thread, which it never closes."""
    asyncio.set_event_loop(None)


class RecordingLLM(CustomLLM):
    """Records every prompt, calls `on_prompt`, and answers with the same words."""

    context_window: int = 100_000
    num_output: int = 64
    is_chat_model: bool = False
    answer: str = "It is so."
    prompts: list[str] = Field(default_factory=list)
    failures: int = 0
    on_prompt: Callable[[], object] = Field(default=lambda: None, exclude=True)

    @property
    def metadata(self) -> LLMMetadata:
        return LLMMetadata(
            context_window=self.context_window, num_output=self.num_output, is_chat_model=self.is_chat_model
        )

    @llm_completion_callback()
    def complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponse:
        self.prompts.append(prompt)
        self.on_prompt()
        if self.failures > 0:
            self.failures -= 1
            raise ConnectionError("the model is not there")
        return CompletionResponse(text=self.answer)

    @llm_completion_callback()
    def stream_complete(self, prompt: str, formatted: bool = False, **kwargs: Any) -> CompletionResponseGen:
        whole = self.complete(prompt).text
        answered = ""
        for word in whole.split(" "):
            answered += word + " "
            yield CompletionResponse(text=answered, delta=word + " ")


@pytest.fixture(scope="session")
def recording_llm() -> Callable[..., RecordingLLM]:
    return RecordingLLM


@asynccontextmanager
async def _open_model(engine: Any) -> AsyncIterator[Any]:
    model: Any = OpenAILike
    with DefaultHttpxClient() as client:
        async with DefaultAsyncHttpxClient() as async_client:
            yield model(
                model=engine.model,
                api_base=engine.base_url,
                api_key="none",
                is_chat_model=True,
                is_function_calling_model=True,
                context_window=100_000,
                max_retries=0,
                http_client=client,
                async_http_client=async_client,
            )


@pytest.fixture
def open_model() -> Callable[[Any], AbstractAsyncContextManager[Any]]:
    """Open a real client of an engine; it closes its connections."""
    return _open_model


class GivenRetriever(BaseRetriever):
    """Retriever that finds its `nodes`, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.nodes: list[NodeWithScore] = []

    def _retrieve(self, query_bundle: QueryBundle) -> list[NodeWithScore]:
        return list(self.nodes)


@pytest.fixture
def retriever() -> GivenRetriever:
    return GivenRetriever()


def _nodes(passages: Sequence[ContextBlock | str]) -> list[NodeWithScore]:
    blocks = [ContextBlock(p, id=f"Doc_{i}") if isinstance(p, str) else p for i, p in enumerate(passages)]
    return [
        NodeWithScore(node=TextNode(text=block.text, id_=block.id or "", metadata={}), score=1 - rank / 100)
        for rank, block in enumerate(blocks)
    ]


@pytest.fixture(scope="session")
def make_nodes() -> Callable[[Sequence[ContextBlock | str]], list[NodeWithScore]]:
    """Nodes for passages, best first."""
    return _nodes


NOTE = re.compile(r"Please read the context in the following priority order: (.*?) and answer the question\.")
QUOTES = re.compile(r'Most relevant above: the passage with (".*?")\.')


def _read_note(prompt: str, passages: Sequence[str]) -> list[str]:
    notes, quotes = list(NOTE.finditer(prompt)), list(QUOTES.finditer(prompt))
    assert len(notes) + len(quotes) <= 1, "one prompt, one note"
    if quotes:
        above = prompt[: quotes[0].start()]
        assert all(text in above for text in passages), "a passage behind the note"
        named = quotes[0][1].strip('"').split('" > "')
        holders = [[i for i, text in enumerate(passages) if quote in text] for quote in named]
        assert all(len(holder) == 1 for holder in holders), "a quote that stands in no passage, or in several"
        return [f"Doc_{holder[0]}" for holder in holders]
    if not notes:
        assert "Please read the context in the following" not in prompt, "a note that was cut off"
        assert "Most relevant above" not in prompt, "a note that was cut off"
        return []
    labels = notes[0][1].strip("[]").split("] > [")
    for label in labels:
        assert f"[{label}] " in prompt[: notes[0].start()], f"the note names {label}, which stands nowhere before it"
    return labels


@pytest.fixture(scope="session")
def read_note() -> Callable[[str, Sequence[str]], list[str]]:
    """The passages that a prompt's note names, as `Doc_0` and so on, each shown before it; empty if it has none."""
    return _read_note


@pytest.fixture(scope="session")
def reordering() -> Callable[..., ContextReusePostprocessor]:
    """Make postprocessors that reorder short passages too, whatever a note costs."""
    return lambda **options: ContextReusePostprocessor(planner=ContextPlanner(policy="oracle"), **options)
