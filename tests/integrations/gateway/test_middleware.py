"""The middleware in a Starlette application, and what arrives behind it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.testclient import TestClient

from warmprefix.dedup import restored
from warmprefix_gateway import ReferencesMiddleware
from warmprefix_gateway.body_encodings import zstd

SEA = "The sea is 3,688 metres deep on average. " * 9
CHAT = "/v1/chat/completions"


def body(**fields: Any) -> bytes:
    messages: list[Any] = [{"role": "user", "content": "How deep?"}]
    for id in "ab":
        call = {"id": id, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
        messages.append({"role": "tool", "tool_call_id": id, "content": SEA})
    return json.dumps({"messages": messages, **fields}).encode()


def client_of(**options: Any) -> TestClient:
    async def echo(request: Request) -> Response:
        assert request.headers["content-length"] == str(len(await request.body()))
        encoding = request.headers.get("content-encoding", "plain")
        return Response(await request.body(), headers={"x-encoding": encoding})

    routes = [Route(path, echo, methods=["POST"]) for path in (CHAT, "/v1/messages", "/other")]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(ReferencesMiddleware, **options)]))


def test_repeated_results_become_references() -> None:
    arrived = client_of().post(CHAT, content=body(seed=1.50)).content
    assert arrived.count(b"3,688") == 9
    assert b"[Word for word the result of the earlier call read({}).]" in arrived
    assert restored("chat", json.loads(arrived)) == json.loads(body(seed=1.50))


@pytest.mark.parametrize(("encoding", "pack"), [("gzip", gzip.compress), ("zstd", zstd.compress)])
def test_compressed_bodies_are_read(encoding: str, pack: Callable[[bytes], bytes]) -> None:
    client, header = client_of(max_body_bytes=10_000), {"content-encoding": encoding}
    arrived = client.post(CHAT, content=pack(body()), headers=header)
    assert restored("chat", json.loads(arrived.content)) == json.loads(body())
    assert arrived.headers["x-encoding"] == "plain"
    for content in (pack(body(truncation="auto")), pack(body())[:-1], pack(bytes(10_001)), b"", body()):
        passed = client.post(CHAT, content=content, headers=header)
        assert (passed.content, passed.headers["x-encoding"]) == (content, encoding)


@pytest.mark.parametrize(
    ("path", "content", "options"),
    [
        ("/other", body(), {}),
        (CHAT, body(truncation="auto"), {}),
        (CHAT, body(), {"keep_tools": ["read"]}),
        (CHAT, body(), {"max_body_bytes": 100}),
        (CHAT, b"{", {}),
        (CHAT, b"", {}),
        ("/v1/messages", body(), {}),
    ],
)
def test_everything_else_passes_as_it_came(path: str, content: bytes, options: dict[str, Any]) -> None:
    assert client_of(**options).post(path, content=content).content == content
