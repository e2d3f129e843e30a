"""Requests that no client sends by mistake."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, MutableMapping
from typing import Any

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, answer, chat_answer, metric, send

from warmprefix_gateway import Gateway, GatewayOptions, GatewayServer

Make = Callable[..., GatewayServer]
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\n"
SECOND = b"GET /v1/secret HTTP/1.1\r\nHost: gateway\r\n\r\n"


def exchanged(server: GatewayServer, data: bytes) -> bytes:
    """Send bytes as they are; return all bytes that come back until the server closes, or is silent for a second."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    received = b""
    with socket.create_connection((host, int(port)), timeout=1) as connection:
        try:
            connection.sendall(data)
            while piece := connection.recv(65_536):
                received += piece
        except (TimeoutError, ConnectionError):
            pass
    return received


@pytest.mark.parametrize(
    "data",
    [
        HEAD + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND,
        HEAD + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}" + SECOND,
        HEAD + b"Content-Length: -1\r\n\r\n{}" + SECOND,
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n" + SECOND,
        HEAD + b"Bad Header: 1\r\nContent-Length: 2\r\n\r\n{}",
        b"GET /\x00 HTTP/1.1\r\nHost: gateway\r\n\r\n",
        b"NONSENSE\r\n\r\n",
    ],
)
def test_a_request_that_can_be_read_in_two_ways_hides_no_other(
    upstream: ScriptedUpstream, gateway_of: Make, data: bytes
) -> None:
    gateway = gateway_of(upstream.base_url)
    exchanged(gateway, data)
    assert all(request.target != "/v1/secret" or request.body == b"" for request in upstream.requests)
    assert len(upstream.requests) <= 1 + data.count(SECOND)
    for request in upstream.prompts:
        assert b"secret" not in request.body
        lengths = [value for name, value in request.headers if name.lower() == "content-length"]
        assert lengths == [str(len(request.body))]
    assert send(gateway, "POST", "/v1/chat/completions", b"{}").body == chat_answer()


def test_an_absolute_target_stays_at_the_upstream(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    exchanged(gateway, b"GET http://example.org:1/v1/models HTTP/1.1\r\nHost: example.org\r\n\r\n")
    assert [request.target for request in upstream.requests] in ([], ["/v1/models"])
    assert all(request.header("host") == f"127.0.0.1:{upstream.port}" for request in upstream.requests)


def test_headers_that_are_too_large_are_refused(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    answer = exchanged(gateway, HEAD + b"X-Large: " + b"x" * 70_000 + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 431")
    exchanged(gateway, HEAD + b"X-Large: " + b"x" * 5_000_000 + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert upstream.requests == []
    assert metric(gateway, "in_flight") == 0


def test_no_key_opens_what_a_key_closes(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    answers = exchanged(gateway, HEAD + b"X-Tenant:\r\nx-tenant : acme\r\nContent-Length: 2\r\n\r\n{}")
    assert upstream.requests == []
    assert answers.startswith((b"HTTP/1.1 400", b"HTTP/1.1 401"))


@pytest.mark.parametrize("value", ["Jürgen".encode(), b"\xe2\x80\xa8", b"a\tb", b""])
def test_header_values_arrive_as_they_were_sent(upstream: ScriptedUpstream, gateway_of: Make, value: bytes) -> None:
    gateway = gateway_of(upstream.base_url)
    exchanged(gateway, HEAD + b"X-User: " + value + b"\r\nContent-Length: 2\r\n\r\n{}")
    (request,) = upstream.requests
    assert (request.header("x-user") or "").encode("latin-1") == value


def test_a_header_value_in_latin_1_is_encoded_once(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    exchanged(gateway, HEAD + b"X-User: J\xfcrgen\r\nContent-Length: 2\r\n\r\n{}")
    assert (upstream.requests[0].header("x-user") or "").encode("latin-1") == "Jürgen".encode()


@pytest.mark.parametrize("value", [b"a\x00b", b"a\x0bb", b"a\rx-more: 1", b"a\x7f"])
def test_no_header_value_holds_another_header(upstream: ScriptedUpstream, gateway_of: Make, value: bytes) -> None:
    gateway = gateway_of(upstream.base_url)
    answer = exchanged(gateway, HEAD + b"X-User: " + value + b"\r\nContent-Length: 2\r\n\r\n{}")
    assert answer.startswith(b"HTTP/1.1 400")
    assert upstream.requests == []


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/files"])
@pytest.mark.parametrize(
    "head", ["600 X", "999 ", "099 X", "101 Switching Protocols", "200 OK\r\nx-odd: a\x01b", "twenty OK", "200"]
)
def test_an_answer_that_no_server_can_send_is_a_502(
    upstream: ScriptedUpstream, gateway_of: Make, head: str, path: str
) -> None:
    upstream.handler = answer(b"hi", head)
    reply = send(gateway_of(upstream.base_url), "POST", path, b'{"messages": []}')
    assert reply.status in ((502, 200) if head.startswith("200") else (502,))
    assert reply.status == 502 or reply.body == b"hi"


@pytest.mark.parametrize("reason", ["", "Très bien", "OK " * 99])
def test_any_reason_phrase_passes(upstream: ScriptedUpstream, gateway_of: Make, reason: str) -> None:
    upstream.handler = answer(b"hi", f"299 {reason}")
    reply = send(gateway_of(upstream.base_url), "GET", "/v1/models")
    assert (reply.status, reply.body) == (299, b"hi")


@pytest.mark.parametrize("path", ["/", "/metrics", "/health"])
async def test_a_client_that_does_not_read_its_page_keeps_no_other_from_theirs(path: str) -> None:
    gateway = Gateway(GatewayOptions(("http://127.0.0.1:9",)))
    is_sending = asyncio.Event()
    sent: list[int] = []

    async def receive() -> MutableMapping[str, Any]:
        raise AssertionError

    async def stay(_: MutableMapping[str, Any]) -> None:
        is_sending.set()
        await asyncio.Event().wait()

    async def take(message: MutableMapping[str, Any]) -> None:
        sent.append(message.get("status", 0))

    scope = {"type": "http", "method": "GET", "path": path, "headers": []}
    reading = asyncio.ensure_future(gateway(scope, receive, stay))
    await is_sending.wait()
    await asyncio.wait_for(gateway(scope, receive, take), 20)
    reading.cancel()
    assert sent[0] in (200, 503)
