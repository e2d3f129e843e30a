"""Agents on emulators over HTTP, servers that fail on demand, and checks of prompts."""

from __future__ import annotations

import json
import re
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from openai import AsyncOpenAI, OpenAI

from warmprefix import ContextBlock
from warmprefix_chain_of_agents import ChainOfAgents, Manager, Worker
from warmprefix_openai import Retries

Json = dict[str, Any]

_NOTE = re.compile(r"Please also use the context labelled \[(.+)\] above in this conversation\.")


def _referred(text: str) -> list[str]:
    return [label for note in _NOTE.finditer(text) for label in note[1].split("], [")]


class Team:
    """A chain whose agents each have an engine of their own."""

    def __init__(self, chain: ChainOfAgents, engines: dict[str, Any]) -> None:
        self.chain = chain
        self.engines = engines
        """By the agents' names; the manager's is `manager`."""

    @property
    def workers(self) -> dict[str, Any]:
        """The engines of the workers."""
        return {name: engine for name, engine in self.engines.items() if name != "manager"}

    def kill(self, name: str) -> None:
        """Stop an agent's server: connections are refused."""
        self.engines[name].__exit__()

    def bodies(self) -> dict[str, list[Json]]:
        """Every request that was answered, by agent."""
        return {name: [answered.body for answered in engine.answered] for name, engine in self.engines.items()}


@pytest.fixture
def start_team(start_engine: Callable[[], Any]) -> Iterator[Callable[..., Team]]:
    """Start a chain with this many workers and a manager, asked through blocking clients."""
    with ExitStack() as stack:

        def start(workers: int = 3, **options: Any) -> Team:
            return _team(
                workers, start_engine, lambda url: stack.enter_context(OpenAI(base_url=url, api_key="none")), options
            )

        yield start


@pytest.fixture
async def start_async_team(start_engine: Callable[[], Any]) -> AsyncIterator[Callable[..., Team]]:
    """`start_team`, with clients that can."""
    async with AsyncExitStack() as stack:

        def start(workers: int = 3, **options: Any) -> Team:
            def connect(url: str) -> AsyncOpenAI:
                client = AsyncOpenAI(base_url=url, api_key="none")
                stack.push_async_callback(client.close)
                return client

            return _team(workers, start_engine, connect, options)

        yield start


def _team(
    workers: int, start_engine: Callable[[], Any], connect: Callable[[str], OpenAI | AsyncOpenAI], options: Json
) -> Team:
    names = [f"w{number}" for number in range(workers)]
    engines = {name: start_engine() for name in (*names, "manager")}
    options.setdefault("retries", Retries(count=1, longest=0.0))
    chain = ChainOfAgents(
        [Worker(name, connect(engines[name].base_url), engines[name].model) for name in names],
        Manager(connect(engines["manager"].base_url), engines["manager"].model),
        **options,
    )
    return Team(chain, engines)


Behaviour = Callable[[BaseHTTPRequestHandler], None]


class Faulty:
    """A server that answers each request by the next of its behaviours; the last goes on for ever."""

    def __init__(self, behaviours: Sequence[Behaviour], owner: str | None = None) -> None:
        self.bodies: list[Json] = []
        self.owner = owner
        """The engine that the server names itself; None if it does not."""
        self.left = threading.Event()
        """Set when a client has left in the middle of an answer."""
        waiting = list(behaviours)
        lock = threading.Lock()
        faulty = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                length = int(self.headers["content-length"])
                with lock:
                    faulty.bodies.append(json.loads(self.rfile.read(length)))
                    behaviour = waiting.pop(0) if len(waiting) > 1 else waiting[0]
                try:
                    behaviour(self)
                except OSError:
                    faulty.left.set()
                self.close_connection = True

            def do_GET(self) -> None:
                models = {"data": [{"id": "m", "owned_by": faulty.owner}]}
                content = json.dumps({"version": "0.33.0"} if self.path == "/version" else models).encode()
                self.send_response(404 if faulty.owner is None else 200)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the name that it has to have
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.base_url = f"http://127.0.0.1:{self._server.server_address[1]}/v1"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def __enter__(self) -> Faulty:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


class Faults:
    """The ways in which a server can behave."""

    def status(self, status: int, headers: Json | None = None) -> Behaviour:
        """Refuse."""

        def refuse(handler: BaseHTTPRequestHandler) -> None:
            body = json.dumps({"error": {"message": f"refused with {status}", "code": status}}).encode()
            handler.send_response(status)
            for name, value in {**(headers or {}), "content-length": len(body), "connection": "close"}.items():
                handler.send_header(name, str(value))
            handler.end_headers()
            handler.wfile.write(body)

        return refuse

    def deltas(self, *deltas: Json, end: str | None = "stop") -> Behaviour:
        """Stream these, then the end; `None` breaks off instead."""

        def stream(handler: BaseHTTPRequestHandler) -> None:
            self._headers(handler)
            for delta in deltas:
                self._chunk(handler, delta, None)
            if end is not None:
                self._chunk(handler, {}, end)
                handler.wfile.write(b"data: [DONE]\n\n")

        return stream

    def text(self, text: str) -> Behaviour:
        """Answer."""
        return self.deltas({"role": "assistant", "content": text})

    def raw(self, lines: bytes) -> Behaviour:
        """Stream these bytes."""

        def stream(handler: BaseHTTPRequestHandler) -> None:
            self._headers(handler)
            handler.wfile.write(lines)

        return stream

    def hang(self, until: threading.Event, *, after: int = 0) -> Behaviour:
        """Stream this many deltas, then nothing until the event is set."""

        def stream(handler: BaseHTTPRequestHandler) -> None:
            if after:
                self._headers(handler)
            for number in range(after):
                self._chunk(handler, {"content": f"{number} "}, None)
            until.wait(30)

        return stream

    def drip(self, until: threading.Event, every: float = 0.02) -> Behaviour:
        """Stream delta after delta, until the event is set or the client leaves."""

        def stream(handler: BaseHTTPRequestHandler) -> None:
            self._headers(handler)
            while not until.wait(every):
                self._chunk(handler, {"content": "word "}, None)

        return stream

    def _headers(self, handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("connection", "close")
        handler.end_headers()

    def _chunk(self, handler: BaseHTTPRequestHandler, delta: Json, reason: str | None) -> None:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        chunk = {"id": "c", "object": "chat.completion.chunk", "created": 0, "model": "m", "choices": [choice]}
        handler.wfile.write(f"data: {json.dumps(chunk)}\n\n".encode())
        handler.wfile.flush()


@pytest.fixture
def faults() -> Faults:
    """The ways in which a server can behave."""
    return Faults()


@pytest.fixture
def start_faulty() -> Iterator[Callable[..., Faulty]]:
    """Start servers, each with its behaviours."""
    with ExitStack() as stack:
        yield lambda *behaviours, owner=None: stack.enter_context(Faulty(behaviours, owner))


class ClosedPort:
    """An address that is taken, and where no server listens."""

    def __init__(self, bound: socket.socket) -> None:
        bound.bind(("127.0.0.1", 0))
        self.base_url = f"http://127.0.0.1:{bound.getsockname()[1]}/v1"


@pytest.fixture
def closed_port() -> Iterator[ClosedPort]:
    """Refuses every connection."""
    with socket.socket() as bound:
        yield ClosedPort(bound)


@pytest.fixture
def connect() -> Iterator[Callable[[Any], OpenAI]]:
    """A client for a server."""
    with ExitStack() as stack:
        yield lambda server: stack.enter_context(OpenAI(base_url=server.base_url, api_key="none"))


@pytest.fixture
async def connect_async() -> AsyncIterator[Callable[[Any], AsyncOpenAI]]:
    """A client for a server, to be awaited."""
    async with AsyncExitStack() as stack:

        def connect_one(server: Any) -> AsyncOpenAI:
            client = AsyncOpenAI(base_url=server.base_url, api_key="none")
            stack.push_async_callback(client.close)
            return client

        yield connect_one


@pytest.fixture
def dangling() -> Callable[[Json, Iterable[ContextBlock]], list[str]]:
    """The references of a request that no message of its own, in front of them, shows in full.

    Documents must have ids of their own, which are then their labels.
    """

    def dangling(body: Json, documents: Iterable[ContextBlock]) -> list[str]:
        texts = {document.id: document.text for document in documents}
        before, found = "", []
        for message in body["messages"]:
            referred = _referred(message["content"])
            found += [label for label in referred if f"\n[{label}] {texts[label]}\n" not in before]
            before += f"\n{message['content']}\n"
        return found

    return dangling


@pytest.fixture
def shown() -> Callable[[Json, Iterable[ContextBlock]], list[str]]:
    """The ids of the documents that the last message of a request shows, in full or by reference."""

    def shown(body: Json, documents: Iterable[ContextBlock]) -> list[str]:
        last = body["messages"][-1]["content"]
        referred = set(_referred(last))
        lines = f"\n{last}\n"
        return [
            document.id
            for document in documents
            if document.id is not None and (document.id in referred or f"\n[{document.id}] {document.text}\n" in lines)
        ]

    return shown


@pytest.fixture
def documents() -> Callable[[int], list[ContextBlock]]:
    """Make this many documents, the same ones on every run, with ids of their own."""

    def make(count: int, first: int = 0) -> list[ContextBlock]:
        return [
            ContextBlock(f"Document {number}. " + f"Fact {number} is worth a mention. " * 12, id=f"d{number}")
            for number in range(first, first + count)
        ]

    return make
