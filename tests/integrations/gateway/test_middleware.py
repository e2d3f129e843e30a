"""The middleware in a Starlette application, and what arrives behind it."""

from __future__ import annotations

import asyncio
import gzip
import json
import threading
from collections.abc import Callable
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.testclient import TestClient

from warmprefix_gateway import ReferencesMiddleware
from warmprefix_gateway.body_encodings import zstd
from warmprefix_gateway.gateway_options import EchoHandling
from warmprefix_gateway.preparation import AbandonedWorkError
from warmprefix_requests import restored

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


@pytest.mark.parametrize("user", ["u", "u" * 300_000])
def test_repeated_results_become_references(user: str) -> None:
    arrived = client_of().post(CHAT, content=body(seed=1.50, user=user)).content
    assert arrived.count(b"3,688") == 9
    assert b"[Word for word the result of the earlier call read({}).]" in arrived
    assert restored("chat", json.loads(arrived)) == json.loads(body(seed=1.50, user=user))


async def test_a_large_body_is_read_in_a_thread_until_it_is_not_wanted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, ended = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def endless(*_: object, check: Callable[[], None], **__: object) -> None:
        loop.call_soon_threadsafe(begun.set)
        try:
            while True:
                check()
        except AbandonedWorkError:
            ended.set()
            raise

    async def app(*_: object) -> None:
        raise AssertionError

    async def receive() -> Any:
        return {"type": "http.request", "body": body(user="u" * 300_000)}

    monkeypatch.setattr("warmprefix_requests.outgoing.rewrite", endless)
    scope = {"type": "http", "method": "POST", "path": CHAT, "headers": []}
    running = asyncio.ensure_future(ReferencesMiddleware(app)(scope, receive, None))
    await begun.wait()
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await asyncio.to_thread(ended.wait, 20)


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


WRITE = {"path": "copy.txt", "content": "[Word for word the result of the earlier call read({}).]"}
MEANT = {**WRITE, "content": SEA}


def answering(content: bytes, kind: str, **options: Any) -> TestClient:
    async def respond(request: Request) -> Response:
        if kind == "application/json":
            return Response(content, media_type=kind)
        return StreamingResponse((content[at : at + 50] for at in range(0, len(content), 50)), media_type=kind)

    routes = [Route(CHAT, respond, methods=["POST"])]
    return TestClient(Starlette(routes=routes, middleware=[Middleware(ReferencesMiddleware, **options)]))


def test_an_echo_becomes_the_text() -> None:
    function = {"name": "write", "arguments": json.dumps(WRITE)}
    whole = json.dumps({"choices": [{"message": {"tool_calls": [{"function": function}]}}]}).encode()
    json_type, stream_type = "application/json", "text/event-stream"
    found = answering(whole, json_type).post(CHAT, content=body()).json()
    assert json.loads(found["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == MEANT
    text = function["arguments"]
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    deltas = [{"tool_calls": [{"index": 0, "function": {"arguments": piece}}]} for piece in pieces]
    events = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]} for delta in deltas]
    stream = "".join([*[f"data: {json.dumps(event)}\n\n" for event in events], "data: [DONE]\n\n"]).encode()
    lines = answering(stream, stream_type).post(CHAT, content=body()).text.split("\n\n")
    seen = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
    calls = [event["choices"][0]["delta"]["tool_calls"][0]["function"]["arguments"] for event in seen]
    assert json.loads("".join(calls)) == MEANT
    assert lines[-2:] == ["data: [DONE]", ""]
    for content, kind in ((whole, json_type), (stream, stream_type)):
        assert answering(content, kind, echoes="pass").post(CHAT, content=body()).content == content
        assert answering(content, kind).post(CHAT, content=body(truncation="auto")).content == content
        refused = answering(content, kind, echoes="refuse").post(CHAT, content=body())
        assert refused.status_code == (502 if kind == json_type else 200)
        assert "copied a reference" in refused.text
        assert "DONE" not in refused.text


def test_answers_are_not_compressed_on_the_way() -> None:
    function = {"name": "write", "arguments": json.dumps(WRITE)}
    whole = json.dumps({"choices": [{"message": {"tool_calls": [{"function": function}]}}]}).encode()

    async def respond(request: Request) -> Response:
        if request.url.query:  # an application that compresses without being asked
            return Response(gzip.compress(whole), int(request.url.query), {"content-encoding": "gzip"})
        return Response(whole, media_type="application/json", headers={"x-asked": request.headers["accept-encoding"]})

    def client_of(echoes: EchoHandling) -> TestClient:
        behind = [Middleware(ReferencesMiddleware, echoes=echoes), Middleware(GZipMiddleware, minimum_size=1)]
        return TestClient(Starlette(routes=[Route(CHAT, respond, methods=["POST"])], middleware=behind))

    header = {"accept-encoding": "gzip"}
    found = client_of("restore").post(CHAT, content=body(), headers=header)
    assert json.loads(found.json()["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) == MEANT
    passed: list[tuple[EchoHandling, bytes]] = [("pass", body()), ("restore", body(truncation="auto"))]
    for echoes, content in passed:
        same = client_of(echoes).post(CHAT, content=content, headers=header)
        assert (same.content, same.headers["content-encoding"], same.headers["x-asked"]) == (whole, "gzip", "gzip")
    kinds: list[tuple[EchoHandling, int, int]] = [("restore", 200, 200), ("refuse", 200, 502), ("refuse", 500, 500)]
    for echoes, asked, status in kinds:
        reply = client_of(echoes).post(f"{CHAT}?{asked}", content=body(), headers=header)
        assert reply.status_code == status
        assert (reply.content == whole) == (status != 502)
