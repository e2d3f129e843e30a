"""What a client sends arrives, and what the upstream answers comes back, byte for byte."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.integrations.gateway.conftest import ScriptedUpstream, SeenRequest, answer, chat_answer, metric, send

from warmprefix.cache_profiles import PROFILES
from warmprefix.plan import tenant_salt
from warmprefix_gateway import GatewayServer
from warmprefix_gateway.outgoing import Rules, outgoing
from warmprefix_gateway.tenant_bodies import BodyRefusedError
from warmprefix_requests import read_call

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
BODY = b'{"model": "m",  "messages": [{"role": "user", "content": "Why?"}]}'
NO_RULES = Rules("exact", frozenset(), PROFILES["full-attention"], None)


@pytest.mark.parametrize(
    "body",
    [
        BODY,
        b'{"model": "m", "messages": [], "model": "n"}',
        b'{"messages": [{"role": "user", "content": "\\ud800"}], "temperature": NaN, "top_p": 1.0000}',
        b'{"messages": [{"role": "user", "content": "\xff"}]}',
        b"{",
        b"",
        b"null",
        b"[" * 50_000,
        pytest.param(gzip.compress(BODY), id="gzip"),
        b'{"messages": [{"role": "user", "content": "' + b"x" * 1_000_000 + b'"}]}',
    ],
)
def test_a_body_arrives_as_it_was_sent(upstream: ScriptedUpstream, gateway_of: Make, body: bytes) -> None:
    gateway = gateway_of(upstream.base_url)
    reply = send(gateway, "POST", CHAT, body, content_type="application/json", x_custom="a, b")
    assert (reply.status, reply.body) == (200, chat_answer())
    (request,) = upstream.requests
    assert (request.method, request.target, request.body) == ("POST", CHAT, body)
    assert request.header("x-custom") == "a, b"
    assert request.header("host") == f"127.0.0.1:{upstream.port}"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters()),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.fixed_dictionaries(
    {"messages": st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": JSON}))},
    optional={"stream": st.booleans(), "stream_options": JSON, "cache_salt": JSON, "metadata": JSON, "tools": JSON},
)


@given(
    body=BODIES,
    is_ascii=st.booleans(),
    salt=st.none() | st.just("salt"),
    path=st.sampled_from(["chat/completions", "responses", "messages"]),
)
def test_additions_stand_at_the_end_of_the_clients_bytes(
    body: dict[str, Any], is_ascii: bool, salt: str | None, path: str
) -> None:
    content = json.dumps(body, ensure_ascii=is_ascii).encode("utf-8", "surrogatepass")
    call = read_call("POST", f"/v1/{path}", {}, content)
    if call is None:
        return
    try:
        sent, _ = outgoing(call, NO_RULES, tenant=salt, salt_key=b"key")
    except BodyRefusedError:
        assert salt is not None
        assert body["cache_salt"] is not None
        return
    if "stream_options" not in body and "cache_salt" not in body:
        assert sent.content == content or sent.content.startswith(content[:-1] + b",")
    received = json.loads(sent.content)
    for name in body:
        if name not in ("stream_options", "cache_salt"):
            assert json.dumps(received[name]) == json.dumps(json.loads(content)[name])
    assert received.keys() - body.keys() <= {"cache_salt", "stream_options"}
    written = (sent.plain or sent).encode()
    plain = json.loads(written)
    if salt is None:
        assert written == content
        assert plain.get("cache_salt") == body.get("cache_salt") or body["cache_salt"] != body["cache_salt"]
    else:
        own = "" if body.get("cache_salt") is None else f"\0{body['cache_salt']}"
        assert plain["cache_salt"] == received["cache_salt"] == tenant_salt(b"key", f"{salt}{own}")


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("/v1/models?limit=2&x=%2F", "/v1/models?limit=2&x=%2F"),
        ("/v1/files/a%2Fb/content", "/v1/files/a%2Fb/content"),
        ("/version", "/version"),
        ("/api/tags", "/api/tags"),
        ("/v1/../admin", "/v1/../admin"),
        ("//example.org/v1/models", "//example.org/v1/models"),
    ],
)
def test_other_paths_reach_the_same_upstream(
    upstream: ScriptedUpstream, gateway_of: Make, target: str, expected: str
) -> None:
    upstream.handler = answer(b"plain", "404 Not Found", "text/plain", "x-a: 1", "x-a: 2")
    reply = send(gateway_of(upstream.base_url), "GET", target)
    assert (reply.status, reply.body, reply.headers["content-type"]) == (404, b"plain", "text/plain")
    assert [request.target for request in upstream.requests] == [expected]


def test_uploads_and_other_methods_pass(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, max_body_bytes=1_000)
    body = bytes(range(256)) * 400
    for method in ("POST", "PUT", "PATCH", "DELETE"):
        assert send(gateway, method, "/v1/files", body).status == 200
    assert [(request.method, request.body == body) for request in upstream.requests] == [
        (method, True) for method in ("POST", "PUT", "PATCH", "DELETE")
    ]


def test_redirects_are_passed_on_and_not_followed(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    upstream.handler = answer(b"", "302 Found", "text/plain", "location: http://127.0.0.1:1/secret")
    reply = send(gateway_of(upstream.base_url), "POST", CHAT, BODY)
    assert (reply.status, reply.headers["location"]) == (302, "http://127.0.0.1:1/secret")
    assert len(upstream.requests) == 1


def test_headers_of_one_connection_stay_there(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    upstream.handler = answer(chat_answer(), "200 OK", "application/json", "connection: keep-alive", "x-kept: yes")
    reply = send(
        gateway_of(upstream.base_url),
        "POST",
        CHAT,
        BODY,
        connection="x-hop, keep-alive",
        x_hop="1",
        te="trailers",
        proxy_authorization="secret",
        authorization="Bearer mine",
    )
    (request,) = upstream.requests
    for name in ("x-hop", "te", "proxy-authorization"):
        assert request.header(name) is None
    assert request.header("authorization") == "Bearer mine"
    assert reply.headers["x-kept"] == "yes"
    assert "server" not in reply.headers


def events(*payloads: object) -> bytes:
    return b"".join([f"data: {json.dumps(payload)}\n\n".encode() for payload in payloads]) + b"data: [DONE]\n\n"


CHUNK = {"choices": [{"index": 0, "delta": {"content": "Water"}, "finish_reason": None}]}
USAGE = {"choices": [], "usage": {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 64}}}


def test_a_stream_comes_back_without_the_usage_that_only_we_asked_for(
    upstream: ScriptedUpstream, gateway_of: Make
) -> None:
    upstream.handler = answer(events(CHUNK, USAGE), "200 OK", "text/event-stream")
    gateway = gateway_of(upstream.base_url)
    streamed = {**json.loads(BODY), "stream": True}
    assert send(gateway, "POST", CHAT, json.dumps(streamed).encode()).body == events(CHUNK)
    assert json.loads(upstream.prompts[0].body)["stream_options"] == {"include_usage": True}
    asked = {**streamed, "stream_options": {"include_usage": True}}
    assert send(gateway, "POST", CHAT, json.dumps(asked).encode()).body == events(CHUNK, USAGE)
    assert upstream.prompts[1].body == json.dumps(asked).encode()
    assert metric(gateway, "cached_tokens_total") == 128


def test_each_piece_of_a_stream_passes_at_once(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    pieces = [f"event: x\ndata: {number}\n\n".encode() for number in range(5)]
    arrived: list[float] = []

    async def handle(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.close()

    upstream.handler = handle
    gateway = gateway_of(upstream.base_url)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/v1/messages", BODY)
    response = connection.getresponse()
    got = b""
    while piece := response.read1(65_536):
        got += piece
        arrived.append(time.monotonic())
    connection.close()
    assert got == b"".join(pieces)
    assert len(arrived) >= 4
    assert arrived[-1] - arrived[0] > 0.2


# -- failures ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [CHAT, "/v1/messages"])
def test_an_upstream_that_is_not_there_is_a_502_in_the_shape_of_the_route(gateway_of: Make, path: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    reply = send(gateway_of(f"http://127.0.0.1:{port}/v1"), "POST", path, BODY)
    assert reply.status == 502
    error = reply.json["error"]
    assert (error["message"], error["type"]) == ("no upstream answers", "api_error")
    assert (reply.json.get("type") == "error") == (path == "/v1/messages")


def test_a_silent_upstream_is_a_504(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    async def wait(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    upstream.handler = wait
    assert send(gateway_of(upstream.base_url, silent_seconds=0.3), "POST", CHAT, BODY).status == 504


def test_an_upstream_that_closes_before_the_first_byte_is_asked_once_more(
    upstream: ScriptedUpstream, gateway_of: Make
) -> None:
    async def close_once(request: SeenRequest, writer: asyncio.StreamWriter) -> None:
        if len(upstream.requests) == 1:
            writer.close()
        else:
            await answer(chat_answer())(request, writer)

    upstream.handler = close_once
    assert send(gateway_of(upstream.base_url), "POST", CHAT, BODY).status == 200
    assert [request.body for request in upstream.requests] == [BODY, BODY]


def test_a_stream_that_breaks_is_broken_for_the_client_too(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    async def breaks(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        writer.write(b"9\r\ndata: 1\n\n\r\n")
        await writer.drain()
        writer.close()

    upstream.handler = breaks
    gateway = gateway_of(upstream.base_url)
    with pytest.raises(http.client.IncompleteRead):
        send(gateway, "POST", "/v1/messages", BODY)
    assert len(upstream.requests) == 1
    assert metric(gateway, "upstream_errors_total", reason="broken") == 1


def test_another_upstream_is_asked_if_one_fails_before_the_first_byte(
    upstream: ScriptedUpstream, other: ScriptedUpstream, gateway_of: Make
) -> None:
    async def close(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        writer.close()

    gateway = gateway_of(upstream.base_url, other.base_url, health_seconds=60)
    while not (upstream.checks and other.checks):
        pass
    upstream.handler = close
    for number in range(8):
        assert send(gateway, "POST", CHAT, BODY, x_session_id=str(number)).status == 200
    assert len(other.prompts) == 8
    assert metric(gateway, "upstreams") == (1 if upstream.prompts else 2)


def test_an_upstream_that_answers_again_is_used_again(
    upstream: ScriptedUpstream, other: ScriptedUpstream, gateway_of: Make
) -> None:
    upstream.handler = answer(b"", "503 Service Unavailable")
    gateway = gateway_of(upstream.base_url, other.base_url, health_seconds=0.05)
    deadline = time.monotonic() + 10
    while metric(gateway, "upstreams") != 1:
        assert time.monotonic() < deadline
    assert send(gateway, "GET", "/health").status == 200
    upstream.handler = answer(chat_answer())
    while metric(gateway, "upstreams") != 2:
        assert time.monotonic() < deadline
    other.handler = answer(b"", "503 Service Unavailable")
    while send(gateway, "POST", CHAT, BODY).status != 200 or not upstream.prompts:
        assert time.monotonic() < deadline


def test_a_client_that_leaves_cancels_its_request_upstream(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    async def stream_slowly(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\ndata: 1\n\n")
        await writer.drain()
        await asyncio.sleep(30)

    upstream.handler = stream_slowly
    gateway = gateway_of(upstream.base_url)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=20)
    connection.request("POST", "/v1/messages", BODY)
    response = connection.getresponse()
    assert response.read1(9)
    began = time.monotonic()
    response.close()
    connection.close()
    assert upstream.left.wait(5)
    assert time.monotonic() - began < 0.5
    while metric(gateway, "in_flight") != 0:  # the upstream may notice first
        assert time.monotonic() - began < 10
    assert metric(gateway, "disconnects_total") == 1


def test_a_client_that_leaves_before_the_answer_cancels_its_request(
    upstream: ScriptedUpstream, gateway_of: Make
) -> None:
    async def wait(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    upstream.handler = wait
    gateway = gateway_of(upstream.base_url)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=20)
    connection.request("POST", CHAT, BODY)
    deadline = time.monotonic() + 10
    while not upstream.requests:
        assert time.monotonic() < deadline
    connection.close()
    assert upstream.left.wait(5)


STREAMED = b'{"model": "m", "messages": [], "stream": true}'


@pytest.mark.parametrize("status", ["400 Bad Request", "422 Unprocessable Entity"])
def test_a_field_that_is_refused_is_left_out_from_then_on_but_never_the_salt(
    upstream: ScriptedUpstream, gateway_of: Make, status: str
) -> None:
    async def refuse(request: SeenRequest, writer: asyncio.StreamWriter) -> None:
        is_added = b"stream_options" in request.body
        await (answer(b'{"error": "stream_options"}', status) if is_added else answer(chat_answer()))(request, writer)

    upstream.handler = refuse
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    for number in range(3):
        body = json.dumps({**json.loads(STREAMED), "seed": number}).encode()
        assert send(gateway, "POST", CHAT, body, x_tenant="acme").status == 200
    tried = [b"stream_options" in request.body for request in upstream.prompts]
    assert tried == [True, False, True, False, False]  # two requests show that it is not one of them alone
    assert all(b"cache_salt" in request.body for request in upstream.prompts)
    send(gateway, "POST", CHAT, STREAMED, x_tenant="initech")
    assert b"stream_options" in upstream.prompts[5].body  # another tenant's requests are not affected


def test_a_salt_that_is_refused_is_the_operators_to_repair(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    upstream.handler = answer(b'{"error": "cache_salt"}', "400 Bad Request")
    reply = send(gateway_of(upstream.base_url, tenant_header="x-tenant"), "POST", CHAT, BODY, x_tenant="acme")
    assert (reply.status, reply.body) == (400, b'{"error": "cache_salt"}')
    assert len(upstream.prompts) == 1


def test_the_clients_own_mistake_comes_back(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    upstream.handler = answer(b'{"error": "max_tokens"}', "400 Bad Request")
    assert send(gateway, "POST", CHAT, STREAMED).body == b'{"error": "max_tokens"}'
    assert [b"stream_options" in request.body for request in upstream.requests] == [True, False]
    upstream.handler = answer(chat_answer())
    assert send(gateway, "POST", CHAT, STREAMED).status == 200
    upstream.handler = answer(b'{"error": "max_tokens"}', "400 Bad Request")
    assert send(gateway, "POST", CHAT, STREAMED).status == 400
    assert len(upstream.requests) == 4  # once our fields were accepted, a refusal is the client's own


def test_an_upstream_that_is_busy_is_asked_once(
    upstream: ScriptedUpstream, other: ScriptedUpstream, gateway_of: Make
) -> None:
    async def busy(request: SeenRequest, writer: asyncio.StreamWriter) -> None:
        status = "200 OK" if request.target == "/health" else "503 Service Unavailable"
        await answer(b"busy", status)(request, writer)

    gateway = gateway_of(upstream.base_url, other.base_url, health_seconds=60)
    upstream.handler = busy
    for number in range(6):
        assert send(gateway, "POST", CHAT, BODY, x_session_id=str(number)).status == 200
    assert len(upstream.prompts) <= 6
    other.handler = busy
    assert send(gateway, "POST", CHAT, BODY).status == 503


@pytest.mark.parametrize("path", [CHAT, "/v1/messages", "/v1/responses", "/v1/completions"])
@pytest.mark.parametrize("model", [[], {}, 7, None, "m" * 100_000])
def test_any_model_passes(upstream: ScriptedUpstream, gateway_of: Make, path: str, model: object) -> None:
    content = json.dumps(
        {"model": model, "messages": [1, None, "x", {"role": []}], "input": {}, "metadata": []}
    ).encode()
    assert send(gateway_of(upstream.base_url), "POST", path, content).status == 200
    assert upstream.requests[0].body == content


def test_bodies_beyond_the_room_for_all_are_refused(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, max_buffered_bytes=100)
    assert send(gateway, "POST", CHAT, b"x" * 101).status == 429
    for _ in range(3):
        assert send(gateway, "POST", CHAT, b"x" * 99).status == 200


def test_a_body_that_is_too_large_is_refused(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, max_body_bytes=100)
    assert send(gateway, "POST", CHAT, b"x" * 101).status == 413
    assert send(gateway, "POST", "/v1/messages", b"x" * 101).json["error"]["type"] == "request_too_large"
    assert upstream.requests == []


def test_too_many_requests_at_one_time_are_refused(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    async def wait(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    upstream.handler = wait
    gateway = gateway_of(upstream.base_url, max_in_flight=1)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=20)
    connection.request("POST", CHAT, BODY)
    deadline = time.monotonic() + 10
    while not upstream.requests:
        assert time.monotonic() < deadline
    assert send(gateway, "POST", CHAT, BODY).status == 429
    connection.close()
