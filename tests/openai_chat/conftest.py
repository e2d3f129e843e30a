"""Engines over loopback HTTP, a planner that records its calls, and callers of every kind."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

import httpx
import openai
import pytest

from warmprefix import ContextBlock, ContextPlan, ContextPlanner
from warmprefix.residency import EngineReport
from warmprefix_openai import EngineLink
from warmprefix_tools.emulator import EmulatorConfig, EmulatorServer

Json = dict[str, Any]

INSTANT = EmulatorConfig(kv_blocks=8_192, prefill_rate=math.inf, base_ttft_ms=0, decode_rate=math.inf)

CUT = object()
"""A piece of a reply that ends the connection."""


class Seen(NamedTuple):
    """A request as it came over the wire."""

    path: str
    headers: dict[str, str]
    content: bytes

    @property
    def body(self) -> Json:
        body: Json = json.loads(self.content)
        return body


class Reply(NamedTuple):
    """A scripted engine's answer: each piece is a write of its own, or an event to wait for, or `CUT`."""

    pieces: list[Any]
    status: int = 200
    content_type: str = "application/json"
    headers: tuple[tuple[str, str], ...] = ()


class ScriptedEngine:
    """Gives the scripted replies, one after the other; the last one for ever."""

    def __init__(self) -> None:
        self.seen: list[Seen] = []
        self.script: deque[Reply] = deque()
        engine = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                content = self.rfile.read(int(self.headers["content-length"]))
                engine.seen.append(Seen(self.path, {k.lower(): v for k, v in self.headers.items()}, content))
                reply = engine.script.popleft() if len(engine.script) > 1 else engine.script[0]
                try:
                    self._give(reply)
                except OSError:  # the client has left
                    self.close_connection = True

            def _give(self, reply: Reply) -> None:
                if reply.pieces[:1] == [CUT]:
                    return self._cut()
                waits = [piece for piece in reply.pieces if isinstance(piece, threading.Event)]
                if reply.pieces and reply.pieces[0] in waits:
                    reply.pieces[0].wait(30)
                self.send_response(reply.status)
                self.send_header("content-type", reply.content_type)
                for name, value in reply.headers:
                    self.send_header(name, value)
                self.send_header("transfer-encoding", "chunked")
                self.end_headers()
                for piece in reply.pieces:
                    if piece is CUT:
                        return self._cut()
                    if isinstance(piece, threading.Event):
                        piece.wait(30)
                    elif piece:
                        self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.write(b"0\r\n\r\n")
                return None

            def _cut(self) -> None:
                self.close_connection = True
                self.connection.shutdown(socket.SHUT_RDWR)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
                pass

        self._server = _Server(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    def __enter__(self) -> ScriptedEngine:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):  # of a client that has left, as tests have them do
            super().handle_error(request, client_address)


class RecordingPlanner(ContextPlanner):
    """Records the commits and abandonments of its plans."""

    def __init__(self, **options: Any) -> None:
        super().__init__(salt_key=b"secret", **options)
        self.outcomes: list[tuple[str, str, EngineReport | None]] = []
        self.turns: list[str | None] = []

    def commit(
        self,
        plan: ContextPlan,
        cached_tokens: int | None = None,
        *,
        report: EngineReport | None = None,
        turn_id: str | None = None,
    ) -> bool:
        self.outcomes.append((plan.id, "commit", report))
        self.turns.append(turn_id)
        return super().commit(plan, cached_tokens, report=report, turn_id=turn_id)

    async def acommit(
        self,
        plan: ContextPlan,
        cached_tokens: int | None = None,
        *,
        report: EngineReport | None = None,
        turn_id: str | None = None,
    ) -> bool:
        self.outcomes.append((plan.id, "commit", report))
        self.turns.append(turn_id)
        await asyncio.sleep(0)
        return await super().acommit(plan, cached_tokens, report=report, turn_id=turn_id)

    def abandon(self, plan: ContextPlan) -> bool:
        self.outcomes.append((plan.id, "abandon", None))
        return super().abandon(plan)

    async def aabandon(self, plan: ContextPlan) -> bool:
        self.outcomes.append((plan.id, "abandon", None))
        await asyncio.sleep(0)
        return await super().aabandon(plan)

    @property
    def fates(self) -> list[str]:
        return [fate for _, fate, _ in self.outcomes]

    @property
    def last_report(self) -> EngineReport:
        """The report of the last commit."""
        report = next(report for _, fate, report in reversed(self.outcomes) if fate == "commit")
        assert report is not None
        return report


class Caller:
    """The SDK as an application uses it: blocking or in a task, on the SDK's own HTTP stack or on the older one."""

    def __init__(self, link: EngineLink, base_url: str, *, is_async: bool, own_kind: bool) -> None:
        self.link = link
        self.is_async = is_async
        self._own_kind = own_kind
        self._options: Json = {"base_url": base_url, "api_key": "none", "max_retries": 0}

    @contextmanager
    def client(self, **options: Any) -> Iterator[openai.OpenAI]:
        http: Any = self.link.http_client(httpx.Client) if self._own_kind else self.link.http_client()
        with openai.OpenAI(http_client=http, **{**self._options, **options}) as client:
            yield client

    @asynccontextmanager
    async def async_client(self, **options: Any) -> AsyncIterator[openai.AsyncOpenAI]:
        http: Any = self.link.async_http_client(httpx.AsyncClient) if self._own_kind else self.link.async_http_client()
        async with openai.AsyncOpenAI(http_client=http, **{**self._options, **options}) as client:
            yield client

    def run(
        self,
        blocking: Callable[[openai.OpenAI], Any],
        awaited: Callable[[openai.AsyncOpenAI], Coroutine[Any, Any, Any]],
        **options: Any,
    ) -> Any:
        """Run one of the two, with a client of this kind."""
        if not self.is_async:
            with self.client(**options) as client:
                return blocking(client)

        async def within() -> Any:
            async with self.async_client(**options) as client:
                return await awaited(client)

        return asyncio.run(within())

    def ask(self, *, sdk: Json | None = None, **call: Any) -> Any:
        """Ask for a chat completion; return the answer, or the list of its chunks."""
        call = {"model": INSTANT.model, "messages": [{"role": "user", "content": "Q?"}], "max_tokens": 8, **call}

        def blocking(client: openai.OpenAI) -> Any:
            answer = client.chat.completions.create(**call)
            return list(answer) if call.get("stream") else answer

        async def awaited(client: openai.AsyncOpenAI) -> Any:
            answer = await client.chat.completions.create(**call)
            return [chunk async for chunk in answer] if call.get("stream") else answer

        return self.run(blocking, awaited, **(sdk or {}))


@pytest.fixture
def scripted() -> Iterator[ScriptedEngine]:
    with ScriptedEngine() as engine:
        yield engine


@pytest.fixture(scope="session")
def emulator() -> Iterator[EmulatorServer]:
    with EmulatorServer(INSTANT) as server:
        yield server


@pytest.fixture
def planner() -> RecordingPlanner:
    return RecordingPlanner()


@pytest.fixture
def link(planner: RecordingPlanner) -> Iterator[EngineLink]:
    with EngineLink(planner) as link:
        yield link


@pytest.fixture(params=["blocking", "async"])
def is_async(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "async")


@pytest.fixture(params=["default kind", "own kind"])
def own_kind(request: pytest.FixtureRequest) -> bool:
    return bool(request.param == "own kind")


@pytest.fixture
def caller(link: EngineLink, scripted: ScriptedEngine, is_async: bool, own_kind: bool) -> Caller:
    """Asks the scripted engine."""
    return Caller(link, scripted.base_url, is_async=is_async, own_kind=own_kind)


@pytest.fixture
def emulated(link: EngineLink, emulator: EmulatorServer, is_async: bool, own_kind: bool) -> Caller:
    """Asks the emulator."""
    return Caller(link, emulator.base_url, is_async=is_async, own_kind=own_kind)


@pytest.fixture
def blocks() -> list[ContextBlock]:
    return [ContextBlock(f"Passage {n} is about subject {n}. " * 12, id=f"p{n}") for n in range(4)]


@pytest.fixture
def reply() -> type[Reply]:
    return Reply


@pytest.fixture
def cut() -> object:
    return CUT


@pytest.fixture
def sse() -> Callable[..., list[bytes]]:
    """A chat's chunks as events: a role, words, a reason, the usage unless None, and the end."""

    def sse(*words: str, usage: Json | None = None, end: str = "\n\n", done: bool = True) -> list[bytes]:
        def event(choices: list[Json], usage: Json | None = None) -> bytes:
            chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m", "choices": choices}
            return f"data: {json.dumps({**chunk, 'usage': usage}, ensure_ascii=False)}{end}".encode()

        deltas: list[tuple[Json, str | None]] = [({"role": "assistant", "content": ""}, None)]
        deltas += [({"content": word}, None) for word in words]
        if done:
            deltas.append(({}, "stop"))
        events = [event([{"index": 0, "delta": delta, "finish_reason": reason}]) for delta, reason in deltas]
        if usage is not None:
            events.append(event([], usage))
        return [*events, f"data: [DONE]{end}".encode()] if done else events

    return sse


@pytest.fixture
def usage() -> Json:
    return {
        "prompt_tokens": 100,
        "completion_tokens": 2,
        "total_tokens": 102,
        "prompt_tokens_details": {"cached_tokens": 64},
    }


@pytest.fixture
def completion(usage: Json) -> Json:
    message = {"role": "assistant", "content": "It is."}
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": "stop"}
    frame = {"id": "c", "object": "chat.completion", "created": 1, "model": "m"}
    return {**frame, "choices": [choice], "usage": usage}
