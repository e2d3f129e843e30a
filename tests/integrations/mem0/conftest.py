"""Unmodified Mem0 with Qdrant in memory and hashed words as embedding, and its hosted API over HTTP."""

from __future__ import annotations

import inspect
import math
import os
import re
import socket
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import wraps
from itertools import count
from typing import Any

os.environ["MEM0_TELEMETRY"] = "False"  # both are read when Mem0 is imported
os.environ["MEM0_DIR"] = tempfile.mkdtemp(prefix="mem0-")

import pytest
import uvicorn
from mem0 import Memory
from mem0.embeddings.base import EmbeddingBase
from qdrant_client import QdrantClient
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

DIMENSIONS = 256


class HashedWords(EmbeddingBase):
    """Embedding by hashed word counts: texts that share more words are nearer."""

    def embed(self, text: str, memory_action: str | None = None) -> Any:
        vector = [0.0] * DIMENSIONS
        for word in re.findall(r"\w{3,}", text.lower()):
            vector[zlib.crc32(word.encode()) % DIMENSIONS] += 1.0
        length = math.sqrt(sum(x * x for x in vector)) or 1.0
        return [x / length for x in vector]


_collections = count(1)


@pytest.fixture
def open_memory() -> Iterator[Callable[..., Any]]:
    """Make a Mem0 `Memory`, or an `AsyncMemory`, each with a store of its own."""
    with ExitStack() as stack:

        def open_one(kind: type[Any] = Memory, **config: Any) -> Any:
            memory = kind.from_config(_config() | config)
            memory.embedding_model = HashedWords()
            stack.callback(memory.close)
            return memory

        yield open_one


def _config() -> dict[str, Any]:
    never_called = {"provider": "openai", "config": {"api_key": "none"}}
    store = {
        "client": QdrantClient(":memory:"),
        "collection_name": f"memories-{next(_collections)}",
        "embedding_model_dims": DIMENSIONS,
    }
    return {
        "vector_store": {"provider": "qdrant", "config": store},
        "embedder": never_called,
        "llm": never_called,
        "history_db_path": ":memory:",
    }


@pytest.fixture
def memory(open_memory: Callable[..., Any]) -> Any:
    """One `Memory`."""
    return open_memory()


@pytest.fixture
def remember() -> Callable[..., list[str]]:
    """Store texts unchanged for the owner in the keywords; returns their ids."""

    def remember(memory: Any, *texts: str, **owner: str) -> list[str]:
        return [memory.add(text, infer=False, **owner)["results"][0]["id"] for text in texts]

    return remember


@pytest.fixture
def log_searches(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[dict[str, Any]]]:
    """Copy each result of a memory's own `search`: in a second search, Qdrant's scores differ in the last bit."""

    def log_searches(memory: Any) -> list[dict[str, Any]]:
        results: list[dict[str, Any]] = []
        search = memory.search

        @wraps(search)
        def recorded(*args: Any, **kwargs: Any) -> dict[str, Any]:
            results.append(deepcopy(search(*args, **kwargs)))
            return deepcopy(results[-1])

        @wraps(search)
        async def recorded_async(*args: Any, **kwargs: Any) -> dict[str, Any]:
            results.append(deepcopy(await search(*args, **kwargs)))
            return deepcopy(results[-1])

        is_async = inspect.iscoroutinefunction(inspect.unwrap(search))
        monkeypatch.setattr(memory, "search", recorded_async if is_async else recorded)
        return results

    return log_searches


@pytest.fixture(autouse=True)
def loopback_only(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Fail on connections to other hosts: Mem0 swallows the errors of its notices and telemetry."""
    elsewhere: list[Any] = []
    connect = socket.socket.connect

    def connect_here(self: socket.socket, address: Any) -> None:
        if self.family in (socket.AF_INET, socket.AF_INET6) and address[0] not in ("127.0.0.1", "::1"):
            elsewhere.append(address)
            raise OSError(f"not on loopback: {address}")
        connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", connect_here)
    yield
    assert not elsewhere


class HostedApi:
    """The part of Mem0's hosted API that a search needs, backed by a `Memory`."""

    def __init__(self, memory: Any) -> None:
        self.memory = memory
        self.key = "m0-key"
        self.searches: list[dict[str, Any]] = []
        """The bodies of the searches."""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.host = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        app = Starlette(
            routes=[
                Route("/v1/ping/", self._ping),
                Route("/v3/memories/search/", self._search, methods=["POST"]),
                Route("/v1/memories/{id}/", self._get),
            ]
        )
        self._server = uvicorn.Server(
            uvicorn.Config(app, interface="asgi3", lifespan="off", ws="none", log_config=None)
        )
        self._thread = threading.Thread(target=self._server.run, args=([self._listener],), daemon=True)

    def __enter__(self) -> HostedApi:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.should_exit = True
        self._thread.join()
        self._listener.close()

    async def _ping(self, request: Request) -> JSONResponse:
        if request.headers["authorization"] != f"Token {self.key}":
            return JSONResponse({"detail": "Invalid API key"}, 401)
        return JSONResponse({"status": "ok", "org_id": "org", "project_id": "project", "user_email": "a@example.com"})

    async def _search(self, request: Request) -> JSONResponse:
        body = await request.json()
        self.searches.append(body)
        filters = body.get("filters", {})
        flat = {key: value for condition in filters.get("AND", [filters]) for key, value in condition.items()}
        try:
            found = await run_in_threadpool(
                self.memory.search, body["query"], filters=flat, top_k=body.get("top_k", 10), threshold=0.0
            )
        except ValueError as error:
            return JSONResponse({"detail": str(error)}, 400)
        return JSONResponse({"results": [{**entry, "categories": None} for entry in found["results"]]})

    async def _get(self, request: Request) -> JSONResponse:
        return JSONResponse(await run_in_threadpool(self.memory.get, request.path_params["id"]))


@pytest.fixture
def hosted(memory: Any) -> Iterator[HostedApi]:
    """The hosted API over HTTP, with the memories of its `memory`."""
    with HostedApi(memory) as api:
        yield api
