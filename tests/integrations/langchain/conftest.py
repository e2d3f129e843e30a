"""Retrievers with given results, a planner whose requests are recorded, and a chat model over HTTP."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import pytest
from langchain_core.callbacks import AsyncCallbackManagerForRetrieverRun, CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_openai import ChatOpenAI
from pydantic import Field, SecretStr

from warmprefix import ContextBlock, ContextPlanner


def pytest_configure(config: pytest.Config) -> None:
    # langchain-core 1.0 keeps Pydantic's first interface alive, which warns on Python 3.14.
    config.addinivalue_line("filterwarnings", "ignore:Core Pydantic V1 functionality:UserWarning")


@pytest.fixture(autouse=True)
def _no_tracing_service(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LANGSMITH_TRACING", "LANGSMITH_TRACING_V2", "LANGCHAIN_TRACING", "LANGCHAIN_TRACING_V2"):
        monkeypatch.delenv(name, raising=False)


class Shelf(BaseRetriever):
    """Retriever with given documents per question; records whether each call was sync or async."""

    found: dict[str, list[Document]]
    asked: list[str] = Field(default_factory=list)

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        self.asked.append("sync")
        return self.found[query]

    async def _aget_relevant_documents(
        self, query: str, *, run_manager: AsyncCallbackManagerForRetrieverRun
    ) -> list[Document]:
        self.asked.append("async")
        return self.found[query]


@pytest.fixture(scope="session")
def shelf() -> Callable[[Mapping[str, Sequence[Document]]], Shelf]:
    return lambda found: Shelf(found={question: list(documents) for question, documents in found.items()})


class RequestLog:
    """Recorder that keeps each request."""

    def __init__(self) -> None:
        self._requests: list[tuple[str | None, str | None, list[str]]] = []

    def record(
        self,
        blocks: Sequence[ContextBlock],
        *,
        conversation: str | None = None,
        tenant: str | None = None,
        model: str | None = None,
        preamble: str | None = None,
        **choice: str | int | None,
    ) -> None:
        # One `append` per request, because threads record at the same time.
        self._requests.append((conversation, tenant, [block.text for block in blocks]))

    @property
    def conversations(self) -> list[str | None]:
        return [conversation for conversation, _, _ in self._requests]

    @property
    def tenants(self) -> list[str | None]:
        return [tenant for _, tenant, _ in self._requests]

    @property
    def texts(self) -> list[list[str]]:
        return [texts for _, _, texts in self._requests]


@pytest.fixture
def request_log() -> RequestLog:
    return RequestLog()


@pytest.fixture
def planner(request_log: RequestLog) -> ContextPlanner:
    """A planner that records every request in `request_log`, and reorders whatever a note costs."""
    return ContextPlanner(policy="oracle", recorder=request_log)


@pytest.fixture(scope="session")
def named() -> Callable[[str], list[Document]]:
    """`named("ab")`: documents with the ids a and b."""
    return lambda names: [Document(f"The text of {name}.", id=name, metadata={"source": name}) for name in names]


@pytest.fixture(scope="session")
def ids() -> Callable[[Iterable[Document]], str]:
    """The ids of documents, joined."""
    return lambda documents: "".join(str(document.id) for document in documents)


@pytest.fixture(scope="session")
def chat_model() -> Callable[[Any], ChatOpenAI]:
    """A real client of an engine, without retries of its own."""
    return lambda engine: ChatOpenAI(
        base_url=engine.base_url, api_key=SecretStr("none"), model=engine.model, max_retries=0
    )
