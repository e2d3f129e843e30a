"""What clients may send before the application sees a request: real sockets, and bytes that no library would send."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, SeenRequest, chat_answer, metric, send
from tests.integrations.gateway.test_hostile_requests import HEAD, SECOND, exchanged

from warmprefix_gateway import GatewayServer, edge

Make = Callable[..., GatewayServer]
CHUNKED = HEAD + b"Transfer-Encoding: chunked\r\n\r\n"


def connected(server: GatewayServer) -> socket.socket:
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20)


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while piece := connection.recv(65_536):
            received += piece
    except ConnectionError:
        pass
    return received


def is_well(server: GatewayServer) -> bool:
    return send(server, "POST", "/v1/chat/completions", b"{}").body == chat_answer()


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (HEAD + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND, 400),
        (HEAD + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n" + SECOND, 400),
        (HEAD + b"Content-Length: 2\r\nContent-Length: 2\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: +2\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 2, 2\r\n\r\n{}", 400),
        (HEAD + b"Content-Length: 99999999999999999999\r\n\r\n{}", 400),
        (HEAD + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n" + SECOND, 400),
        (HEAD + b"Transfer-Encoding: identity\r\n\r\n" + SECOND, 400),
        (HEAD.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + SECOND, 400),
        (HEAD.replace(b"1.1", b"2.0") + b"Content-Length: 2\r\n\r\n{}", 505),
        (b"POST /v1/chat/completions\r\n\r\n", 505),
        (b"CONNECT example.org:80 HTTP/1.1\r\nHost: gateway\r\n\r\n", 400),
        (HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: %d\r\n\r\n" % len(SECOND) + SECOND, 400),
        (HEAD + b"X: y\r\n" * 300 + b"\r\n", 431),
        (HEAD + b"X: " + b"y" * 70_000, 431),
        (HEAD + b"x" * 100_000, 431),
        (b"POST /" + b"x" * 100_000, 431),
        (CHUNKED + b"2;" + b"x" * 100_000, 431),
        (CHUNKED + b"2\r\n{}\r\n0\r\nX: " + b"y" * 100_000, 431),
        (CHUNKED + b"2\r\n{}\r\n0\r\n" + b"X: y\r\n" * 20_000, 431),
        (CHUNKED + b"1\r\n{\r\n" * 100_000, 400),
        (CHUNKED + b"fffffffffffffffff\r\n", 400),
        (HEAD.replace(b"/v1", "/é".encode()) + b"\r\n", 400),
        (b"OPTIONS * HTTP/1.1\r\nConnection: close\r\n\r\n", 400),
    ],
)
def test_a_request_that_is_ambiguous_or_without_bound_is_refused(
    upstream: ScriptedUpstream, gateway_of: Make, data: bytes, status: int
) -> None:
    gateway = gateway_of(upstream.base_url)
    with connected(gateway) as connection:
        connection.sendall(data)
        received = until_closed(connection)
    assert received.startswith(b"HTTP/1.1 %d " % status)
    assert received.count(b"HTTP/1.1 ") == 1
    assert json.loads(received.partition(b"\r\n\r\n")[2])["error"]["code"] == status
    assert upstream.requests == []
    assert metric(gateway, "in_flight") == 0
    assert is_well(gateway)


def test_what_is_refused_on_a_route_of_anthropic_has_its_shape(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    data = CHUNKED.replace(b"/chat/completions", b"/messages") + b"zz\r\n"
    assert json.loads(exchanged(gateway, data).partition(b"\r\n\r\n")[2])["type"] == "error"


def test_headers_without_an_end_are_not_kept(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url)
    with connected(gateway) as connection, pytest.raises(ConnectionError):
        connection.sendall(b"GET /v1/models HTTP/1.1\r\n" + b"x-abcdefgh: y\r\n" * 1_000_000)
    assert metric(gateway, "refused_total", reason="headers") == 1
    assert is_well(gateway)


@pytest.mark.parametrize("trailer", [b"X-Tenant: other", b"X-Session-Id: other"])
def test_a_trailer_is_no_header(upstream: ScriptedUpstream, gateway_of: Make, trailer: bytes) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    chunked = HEAD + b"Connection: close\r\nX-Tenant: one \r\nTransfer-Encoding: chunked\r\n\r\n"
    chunked += b'7\r\n{"a":1}\r\n0\r\n'
    for end in (b"\r\n", trailer + b"\r\n\r\n"):
        assert b"200 OK" in exchanged(gateway, chunked + end)
    first, second = upstream.prompts
    assert (first.headers, first.body) == (second.headers, second.body)


def test_white_space_around_a_value_is_no_part_of_it(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    for name in (b"one", b"one \t", b"  one"):
        exchanged(gateway, HEAD + b"X-Tenant: " + name + b'\r\nConnection: close\r\nContent-Length: 7 \r\n\r\n{"a":1}')
    assert len({request.body for request in upstream.prompts}) == 1
    assert len(upstream.prompts) == 3


@pytest.mark.parametrize("data", [b"GET", HEAD, HEAD + b"Content-Length: 9\r\n\r\n{", CHUNKED + b"2\r\n{"])
def test_a_request_that_never_ends_is_ended(
    upstream: ScriptedUpstream, gateway_of: Make, monkeypatch: pytest.MonkeyPatch, data: bytes
) -> None:
    monkeypatch.setattr(edge, "_HEAD_SECONDS", 0.05)
    monkeypatch.setattr(edge, "_BODY_SECONDS", 0.05)
    gateway = gateway_of(upstream.base_url)
    with connected(gateway) as connection:
        connection.sendall(data)
        received = until_closed(connection)
    assert received.startswith(b"HTTP/1.1 408 ") == (data != b"GET")
    assert metric(gateway, "in_flight") == 0
    assert is_well(gateway)


def test_a_slow_upload_passes_as_long_as_it_goes_on(
    upstream: ScriptedUpstream, gateway_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "_BODY_BYTES", 1)
    monkeypatch.setattr(edge, "_BODY_SECONDS", 0.2)
    gateway = gateway_of(upstream.base_url)
    body = b'{"model": "m", "padding": "%s"}' % (b"x" * 1_000_000)
    with connected(gateway) as connection:
        connection.sendall(HEAD + b"Content-Length: %d\r\nConnection: close\r\n\r\n" % len(body))
        for start in range(0, len(body), 10_000):
            connection.sendall(body[start : start + 10_000])
        assert until_closed(connection).startswith(b"HTTP/1.1 200")
    assert upstream.prompts[0].body == body


def test_a_client_may_wait_until_it_may_send_its_body(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    gateway = gateway_of(upstream.base_url, max_body_bytes=100)
    with connected(gateway) as connection:
        connection.sendall(HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 100 ")
        connection.sendall(b"{}")
        assert connection.recv(65_536).startswith(b"HTTP/1.1 200 ")
    refused = exchanged(gateway, HEAD + b"Connection: close\r\nContent-Length: 101\r\nExpect: 100-continue\r\n\r\n")
    assert refused.startswith(b"HTTP/1.1 413 ")
    old = HEAD.replace(b"1.1", b"1.0") + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n{}"
    assert exchanged(gateway, old).startswith(b"HTTP/1.1 200 ")


def test_a_client_of_http_1_0_gets_a_stream_without_chunks(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    async def stream(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        writer.write(head + b"9\r\ndata: 1\n\n\r\n9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        await writer.drain()

    gateway = gateway_of(upstream.base_url)
    old = HEAD.replace(b"1.1", b"1.0") + b"Connection: keep-alive\r\nContent-Length: 2\r\n\r\n{}"
    assert b"content-length: " in exchanged(gateway, old)
    upstream.handler = stream
    head, _, body = exchanged(gateway, old).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head
    assert body == b"data: 1\n\ndata: 2\n\n"


def test_pipelined_requests_are_answered_in_their_order_up_to_a_few(
    upstream: ScriptedUpstream, gateway_of: Make
) -> None:
    gateway = gateway_of(upstream.base_url)
    request = HEAD + b"Content-Length: 2\r\n\r\n{}"
    last = request.replace(b"Host", b"Connection: close\r\nHost")
    assert exchanged(gateway, request * 4 + last).count(b"200 OK") == 5
    with connected(gateway) as connection:
        connection.sendall(request * 100)
        assert until_closed(connection).count(b"200 OK") < 100
    assert len(upstream.prompts) < 20
    assert is_well(gateway)


def test_a_client_that_leaves_ends_all_of_its_pipelined_requests(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    async def answer_never(_: SeenRequest, __: asyncio.StreamWriter) -> None:
        await asyncio.sleep(30)

    upstream.handler = answer_never
    gateway = gateway_of(upstream.base_url)
    deadline = time.monotonic() + 20
    with connected(gateway) as connection:
        connection.sendall((HEAD + b"Content-Length: 2\r\n\r\n{}") * 5)
        while not upstream.prompts:
            assert time.monotonic() < deadline
    while metric(gateway, "in_flight") or not upstream.left.is_set():
        assert time.monotonic() < deadline
    assert metric(gateway, "failures_total") == 0


def test_idle_connections_make_room_and_none_with_a_request_does(
    upstream: ScriptedUpstream, gateway_of: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(edge, "_MAX_WAITING", 10)
    gateway = gateway_of(upstream.base_url)
    with connected(gateway) as working:
        working.sendall(HEAD + b"Content-Length: 2\r\nExpect: 100-continue\r\n\r\n")
        assert working.recv(65_536).startswith(b"HTTP/1.1 100 ")
        idle = [connected(gateway) for _ in range(50)]
        try:
            for connection in idle[:40]:
                assert until_closed(connection) == b""
            working.sendall(b"{}")
            assert working.recv(65_536).startswith(b"HTTP/1.1 200 ")
        finally:
            for connection in idle:
                connection.close()
    assert metric(gateway, "refused_total", reason="connections") >= 40
