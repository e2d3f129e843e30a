"""Bodies that are compressed, in both directions."""

from __future__ import annotations

import asyncio
import gzip
import http.client
import json
import random
import threading
import zlib
from collections.abc import Callable

import pytest
from tests.integrations.gateway.conftest import ScriptedUpstream, SeenRequest, answer, chat_answer, metric, send
from tests.integrations.gateway.test_passing import CHUNK, USAGE, events

from warmprefix_gateway import GatewayServer
from warmprefix_gateway.body_encodings import BodyDecoder, zstd

Make = Callable[..., GatewayServer]
CHAT = "/v1/chat/completions"
RESULT = "The sea is 3,688 metres deep on average. " * 9


def _raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-zlib.MAX_WBITS)
    return packer.compress(data) + packer.flush()


PACKED: list[tuple[str, Callable[[bytes], bytes]]] = [
    ("gzip", gzip.compress),
    (" X-GZip", gzip.compress),
    ("deflate", zlib.compress),
    ("deflate", _raw_deflate),
    ("zstd", zstd.compress),
]


def body() -> bytes:
    messages: list[object] = [{"role": "user", "content": "Why?"}]
    for number in ("1", "2"):
        call = {"id": number, "type": "function", "function": {"name": "read", "arguments": "{}"}}
        messages += [{"role": "assistant", "tool_calls": [call]}]
        messages += [{"role": "tool", "tool_call_id": number, "content": RESULT}]
    return json.dumps({"model": "m", "messages": messages}).encode()


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
@pytest.mark.parametrize("tenant", [{}, {"x_tenant": "acme"}])
def test_a_compressed_request_is_read_and_goes_out_plain(
    upstream: ScriptedUpstream,
    gateway_of: Make,
    encoding: str,
    pack: Callable[[bytes], bytes],
    tenant: dict[str, str],
) -> None:
    upstream.handler = answer(chat_answer(cached=64))
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant" if tenant else None)
    assert send(gateway, "POST", CHAT, pack(body()), content_encoding=encoding, **tenant).status == 200
    (request,) = upstream.prompts
    assert request.header("content-encoding") is None
    received = json.loads(request.body)
    assert received["messages"][:3] == json.loads(body())["messages"][:3]
    assert "Word for word" in received["messages"][4]["content"]
    assert ("cache_salt" in received) == bool(tenant)
    assert (metric(gateway, "cached_tokens_total"), metric(gateway, "references_total")) == (64, 1)


BROKEN = [
    ("br", b"x"),
    ("gzip, gzip", gzip.compress(gzip.compress(body()))),
    ("gzip", gzip.compress(body())[:-1]),
    ("gzip", body()),
    ("gzip", b""),
    ("zstd", gzip.compress(body())),
    ("deflate", zlib.compress(body()) + b"x"),
    ("gzip", gzip.compress(b"") * 40),
    ("zstd", zstd.compress(bytes(1 << 28), options={zstd.CompressionParameter.window_log: 27})),
]


@pytest.mark.parametrize(("encoding", "content"), BROKEN)
def test_what_cannot_be_read_passes_untouched_without_tenants_and_is_refused_with(
    upstream: ScriptedUpstream, gateway_of: Make, encoding: str, content: bytes
) -> None:
    assert send(gateway_of(upstream.base_url), "POST", CHAT, content, content_encoding=encoding).status == 200
    (request,) = upstream.requests
    assert (request.body, request.header("content-encoding")) == (content, encoding)
    gateway = gateway_of(upstream.base_url, tenant_header="x-tenant")
    reply = send(gateway, "POST", CHAT, content, content_encoding=encoding, x_tenant="acme")
    assert reply.status == 415
    assert len(upstream.requests) == 1


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
def test_a_bomb_stays_small(
    upstream: ScriptedUpstream, gateway_of: Make, encoding: str, pack: Callable[[bytes], bytes]
) -> None:
    bomb = pack(bytes(50_000_000))
    pieces = BodyDecoder(encoding).feed(bomb)
    assert len(next(pieces)) <= 256 * 1_024
    for options, status in (({"max_body_bytes": 1_000_000}, 413), ({"max_buffered_bytes": 1_000_000}, 429)):
        gateway = gateway_of(upstream.base_url, **options)
        assert send(gateway, "POST", CHAT, bomb, content_encoding=encoding).status == status
        assert send(gateway, "POST", CHAT, b"{}").status == 200  # the room is free again
    assert [request.body for request in upstream.requests] == [b"{}", b"{}"]


def test_pieces_of_any_size_decompress_to_the_same() -> None:
    seeded = random.Random(1)
    for size in (0, 1, 262_144, 262_145, 900_000):
        data = seeded.randbytes(size)
        for encoding, pack in PACKED:
            packed = pack(data) if "deflate" in encoding else pack(data[:9]) + pack(data[9:])
            decoder = BodyDecoder(encoding)
            found, at = b"", 0
            while at < len(packed):
                step = seeded.randrange(1, 99_999)
                found += b"".join(decoder.feed(packed[at : at + step]))
                at += step
            assert (found, decoder.is_complete) == (data, True)


# -- answers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("encoding", "pack"), PACKED)
@pytest.mark.parametrize("streams", [False, True])
def test_a_compressed_answer_passes_as_it_is_and_is_read(
    upstream: ScriptedUpstream, gateway_of: Make, encoding: str, pack: Callable[[bytes], bytes], streams: bool
) -> None:
    content = pack(events(CHUNK, USAGE) if streams else chat_answer(cached=64))
    kind = "text/event-stream" if streams else "application/json"
    upstream.handler = answer(content, "200 OK", kind, f"content-encoding: {encoding}")
    gateway = gateway_of(upstream.base_url)
    reply = send(gateway, "POST", CHAT, json.dumps({"messages": [], "stream": streams}).encode())
    assert (reply.body, reply.headers["content-encoding"]) == (content, encoding.strip())
    assert metric(gateway, "cached_tokens_total") == 64


@pytest.mark.parametrize(
    ("encoding", "content"), [("gzip", b"no gzip"), ("br", b"x"), ("zstd", zstd.compress(bytes(90_000_000)))]
)
def test_an_answer_that_cannot_be_read_passes_too(
    upstream: ScriptedUpstream, gateway_of: Make, encoding: str, content: bytes
) -> None:
    upstream.handler = answer(content, "200 OK", "application/json", f"content-encoding: {encoding}")
    gateway = gateway_of(upstream.base_url)
    assert send(gateway, "POST", CHAT, b'{"messages": []}').body == content
    assert metric(gateway, "failures_total") == 0


def test_pieces_of_a_compressed_stream_pass_at_once(upstream: ScriptedUpstream, gateway_of: Make) -> None:
    packer = zlib.compressobj(wbits=16 + zlib.MAX_WBITS)
    first = packer.compress(events(CHUNK)) + packer.flush(zlib.Z_SYNC_FLUSH)
    came = threading.Event()

    async def handle(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-encoding: gzip\r\n"
        writer.write(head + b"connection: close\r\n\r\n" + first)
        await writer.drain()
        while not came.is_set():
            await asyncio.sleep(0.01)
        writer.write(packer.flush())
        writer.close()

    upstream.handler = handle
    gateway = gateway_of(upstream.base_url)
    connection = http.client.HTTPConnection(gateway.url.removeprefix("http://"), timeout=20)
    connection.request("POST", CHAT, b'{"messages": [], "stream": true}')
    response = connection.getresponse()
    assert zlib.decompressobj(16 + zlib.MAX_WBITS).decompress(response.read1(65_536)) == events(CHUNK)
    came.set()
    response.read()
    connection.close()
