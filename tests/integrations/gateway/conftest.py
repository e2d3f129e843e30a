"""Gateways in front of scripted upstreams, which can fail at any byte, and of emulated engines."""

from __future__ import annotations

import asyncio
import http.client
import json
import math
import threading
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, fields
from typing import Any

import pytest

from warmprefix_gateway import GatewayBounds, GatewayOptions, GatewayServer
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

INSTANT = EmulatorConfig(kv_blocks=8_000, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)


@dataclass
class SeenRequest:
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes

    def header(self, name: str) -> str | None:
        return next((value for key, value in self.headers if key.lower() == name), None)


Handler = Callable[[SeenRequest, asyncio.StreamWriter], Awaitable[None]]


def answer(body: bytes, status: str = "200 OK", kind: str = "application/json", *more: str) -> Handler:
    """Return a handler that sends this answer."""

    async def handle(_: SeenRequest, writer: asyncio.StreamWriter) -> None:
        lines = [f"HTTP/1.1 {status}", f"content-type: {kind}", f"content-length: {len(body)}", *more]
        writer.write("\r\n".join([*lines, "", ""]).encode("latin-1") + body)
        await writer.drain()

    return handle


def chat_answer(cached: int = 0) -> bytes:
    usage = {"prompt_tokens": 100, "completion_tokens": 1, "prompt_tokens_details": {"cached_tokens": cached}}
    message = {"role": "assistant", "content": "Water."}
    return json.dumps({"choices": [{"index": 0, "message": message, "finish_reason": "stop"}], "usage": usage}).encode()


@dataclass
class ScriptedUpstream:
    """An HTTP server on raw sockets, so that it can break its answers anywhere."""

    handler: Handler = field(default_factory=lambda: answer(chat_answer()))
    requests: list[SeenRequest] = field(default_factory=list)
    checks: list[SeenRequest] = field(default_factory=list)
    """Requests by which gateways look whether it answers."""
    left: threading.Event = field(default_factory=threading.Event)
    """Set when a connection was closed by the other side while its answer was open."""
    port: int = 0
    _server: asyncio.Server = field(init=False)

    def __enter__(self) -> ScriptedUpstream:
        self._loop = asyncio.new_event_loop()
        started = threading.Event()

        async def start() -> None:
            self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
            self.port = self._server.sockets[0].getsockname()[1]
            started.set()

        def run() -> None:
            asyncio.set_event_loop(self._loop)
            self._loop.run_until_complete(start())
            self._loop.run_forever()
            self._server.close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

        self._thread = threading.Thread(target=run, daemon=True)
        self._thread.start()
        assert started.wait(10)
        return self

    def __exit__(self, *exception: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    @property
    def base_url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def prompts(self) -> list[SeenRequest]:
        return [request for request in self.requests if request.method == "POST"]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                request = await _read_request(reader)
                if request is None:
                    return
                (self.checks if request.target == "/health" else self.requests).append(request)
                handling = asyncio.ensure_future(self.handler(request, writer))
                watching = asyncio.ensure_future(reader.read(1))
                done, _ = await asyncio.wait({handling, watching}, return_when=asyncio.FIRST_COMPLETED)
                if watching in done and not handling.done():
                    self.left.set()
                    handling.cancel()
                    return
                watching.cancel()
                await asyncio.gather(watching, return_exceptions=True)
                handling.result()
                if writer.is_closing():
                    return
        except (OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()


async def _read_request(reader: asyncio.StreamReader) -> SeenRequest | None:
    try:
        head = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError:
        return None
    first, *lines = head.decode("latin-1").split("\r\n")[:-2]
    method, target, _ = first.split(" ", 2)
    headers = [(name, value.strip()) for name, _, value in (line.partition(":") for line in lines)]
    request = SeenRequest(method, target, headers, b"")
    if request.header("content-length"):
        request.body = await reader.readexactly(int(request.header("content-length") or 0))
    elif request.header("transfer-encoding"):
        while size := int(await reader.readline(), 16):
            request.body += await reader.readexactly(size)
            await reader.readline()
        await reader.readline()
    return request


@pytest.fixture
def upstream() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture
def other() -> Iterator[ScriptedUpstream]:
    with ScriptedUpstream() as upstream:
        yield upstream


@pytest.fixture
def gateway_of() -> Iterator[Callable[..., GatewayServer]]:
    """Return a factory of gateways in front of upstreams, which are given by their base URLs."""
    running: list[GatewayServer] = []

    def make(*upstreams: str, **options: Any) -> GatewayServer:
        bounds = {each.name: options.pop(each.name) for each in fields(GatewayBounds) if each.name in options}
        server = GatewayServer(GatewayOptions(upstreams, port=0, bounds=GatewayBounds(**bounds), **options))
        running.append(server.__enter__())
        return server

    yield make
    for server in running:
        server.__exit__(None, None, None)


@pytest.fixture
def emulators() -> Iterator[list[EmulatorServer]]:
    with EmulatorServer(INSTANT) as one, EmulatorServer(INSTANT) as two:
        yield [one, two]


class Reply:
    def __init__(self, response: http.client.HTTPResponse) -> None:
        self.status = response.status
        self.headers = {name.lower(): value for name, value in response.getheaders()}
        self.body = response.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)


def send(server: GatewayServer, method: str, target: str, body: bytes | None = None, **headers: str) -> Reply:
    """Send one request as it is, without any client's manners."""
    host, _, port = server.url.removeprefix("http://").rpartition(":")
    connection = http.client.HTTPConnection(host, int(port), timeout=20)
    try:
        sent = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, target, body, sent)
        return Reply(connection.getresponse())
    finally:
        connection.close()


def metric(server: GatewayServer, name: str, **labels: str) -> float:
    """Return the value of one of the gateway's metrics; 0 without one."""
    lines = send(server, "GET", "/metrics").body.decode().splitlines()
    inside = ",".join(f'{key}="{value}"' for key, value in labels.items())
    head = f"warmprefix_gateway_{name}{'{' + inside + '}' if inside else ''} "
    return next((float(line.removeprefix(head)) for line in lines if line.startswith(head)), 0.0)
