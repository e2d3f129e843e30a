"""Real servers for the stores' tests, each started once; and the kits of the contract that every store keeps."""

from __future__ import annotations

import asyncio
import itertools
import re
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, Protocol, TypeVar

import pytest
import redis
from hypothesis import settings

from redis_servers import Clock, Cluster, SentinelSetup, Server, binaries
from warmprefix.stores import Conversation, MemorySeenStore, Operation, RecordBounds, SeenStore, Snapshot
from warmprefix_redis import RedisSeenStore

T = TypeVar("T")
PAGE = (Path(__file__).parents[2] / "docs/operations.md").read_text(encoding="utf-8")
(ACL_RULE,) = re.findall(r"^ACL SETUSER warmprefix reset on >PASSWORD (.*)$", PAGE, re.MULTILINE)
ACL_OF_CLEAR = "+scan"  # documented on the same page
FLAVOURS = list(binaries(clock=True))
NEWEST = FLAVOURS[-1] if FLAVOURS else None
NETWORKED = [*(FLAVOURS or ["redis"]), "cluster", "sentinel", "minimal-acl", "awaited"]


class Reachable(Protocol):
    """One server, or several that appear as one."""

    @property
    def url(self) -> str: ...

    def jump(self, seconds: float) -> None: ...


def with_bounds(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of a store, with those that bound its records in one value."""
    bounds = {name: options[name] for name in RecordBounds.__slots__ if name in options}
    others = {name: value for name, value in options.items() if name not in bounds}
    return {**others, "bounds": RecordBounds(**bounds)} if bounds else others


class MemoryKits:
    """Kits of stores in this process, with a clock that moves when `wait` is called."""

    examples = settings().max_examples

    def __call__(self) -> MemoryKit:
        return MemoryKit()


class MemoryKit:
    def __init__(self) -> None:
        self.now = 1_000.0

    def store(self, **bounds: float) -> SeenStore:
        return MemorySeenStore(clock=lambda: self.now, **with_bounds(bounds))

    def wait(self, seconds: float) -> None:
        self.now += seconds


class RedisKits:
    """Kits of stores in one running server, each with its own keys; time passes when the server's clock jumps."""

    examples = settings().max_examples // 5
    _numbers = itertools.count()

    def __init__(self, server: Reachable, url: str) -> None:
        self.server = server
        self.url = url
        self._stores: list[RedisSeenStore] = []

    def __call__(self) -> RedisKit:
        return RedisKit(self, f"wp:{next(self._numbers)}")

    def open(self, **options: Any) -> SeenStore:
        store = RedisSeenStore(self.url, timeout=10, **with_bounds(options))
        self._stores.append(store)
        return store

    def close(self) -> None:
        for store in self._stores:
            store.close()


class AwaitedKits(RedisKits):
    """The same kits, through the asynchronous methods."""

    def __init__(self, server: Reachable, url: str) -> None:
        super().__init__(server, url)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()

    def open(self, **options: Any) -> SeenStore:
        super().open(**options)
        return Awaiting(self._stores[-1], self._loop)

    def close(self) -> None:
        for store in self._stores:
            asyncio.run_coroutine_threadsafe(store.aclose(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Awaiting:
    """A store whose methods are awaited, in another thread's event loop."""

    def __init__(self, store: RedisSeenStore, loop: asyncio.AbstractEventLoop) -> None:
        self._store = store
        self._loop = loop

    def execute(self, operation: Operation[T]) -> T:
        return self._result(self._store.aexecute(operation))

    def inspect(self, conversation: Conversation) -> Snapshot | None:
        return self._result(self._store.ainspect(conversation))

    def clear(self) -> None:
        self._store.clear()

    def _result(self, call: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(call, self._loop).result()


class RedisKit:
    def __init__(self, kits: RedisKits, prefix: str) -> None:
        self._kits = kits
        self._prefix = prefix

    def store(self, **bounds: float) -> SeenStore:
        return self._kits.open(prefix=self._prefix, **bounds)

    def wait(self, seconds: float) -> None:
        self._kits.server.jump(seconds)


@pytest.fixture(scope="session")
def running() -> Iterator[Callable[[str], tuple[Reachable, str]]]:
    """Servers by name, with the URL to reach them by; started when first asked for, and stopped in the end."""
    started: dict[str, tuple[Any, Clock, str]] = {}

    def get(name: str) -> tuple[Reachable, str]:
        if name not in started:
            clock = Clock()
            try:
                server, url = _start(name, clock)
            except BaseException:
                clock.close()
                raise
            started[name] = server, clock, url
            clock.freeze()  # or on a slow machine more time would pass than the test expects
        server, _, url = started[name]
        return server, url

    yield get
    for server, clock, _ in started.values():
        server.close()
        clock.close()


def _start(name: str, clock: Clock) -> tuple[Reachable, str]:
    if name == "cluster":
        cluster = Cluster(NEWEST, clock=clock)
        return cluster, cluster.url
    if name == "sentinel":
        sentinels = SentinelSetup(NEWEST, clock=clock)
        return sentinels, sentinels.url
    if name == "minimal-acl":
        server = Server(clock=clock, user=f"worker on >secret {ACL_RULE} {ACL_OF_CLEAR}")
        return server, f"redis://worker:secret@{server.address}"
    server = Server(name if name in FLAVOURS else NEWEST, clock=clock)
    return server, server.url


@pytest.fixture(params=["memory", *NETWORKED])
def kits(request: pytest.FixtureRequest) -> Iterator[MemoryKits | RedisKits]:
    if request.param == "memory":
        yield MemoryKits()
        return
    running = request.getfixturevalue("running")
    kind = AwaitedKits if request.param == "awaited" else RedisKits
    kits = kind(*running(request.param))
    yield kits
    kits.close()


@pytest.fixture(params=FLAVOURS or ["redis"])
def flavour(request: pytest.FixtureRequest) -> str:
    """Return each installed server flavour."""
    name: str = request.param
    return name


@pytest.fixture
def server(flavour: str, running: Callable[[str], tuple[Server, str]]) -> Server:
    """Return a running server of that flavour, with a frozen clock."""
    return running(flavour)[0]


@pytest.fixture
def admin(server: Server) -> Iterator[redis.Redis]:
    """Return a client without restrictions, on an empty server."""
    with server.client() as client:
        client.flushall()
        yield client


@pytest.fixture
def open_store(server: Server, admin: redis.Redis) -> Iterator[Callable[..., RedisSeenStore]]:
    """Return a function that opens stores in that server."""
    stores: list[RedisSeenStore] = []

    def open_store(**options: Any) -> RedisSeenStore:
        stores.append(RedisSeenStore(server.url, **{"timeout": 10, **with_bounds(options)}))
        return stores[-1]

    yield open_store
    for store in stores:
        store.close()


@pytest.fixture
def listener() -> Iterator[Callable[[], tuple[str, Callable[[], int]]]]:
    """Return ports that close every connection, each as its URL and a count of connections."""
    opened: list[tuple[socket.socket, threading.Thread]] = []

    def listen() -> tuple[str, Callable[[], int]]:
        count = itertools.count()
        at = [next(count)]
        listening = socket.create_server(("127.0.0.1", 0))

        def serve() -> None:
            while True:
                try:
                    connection, _ = listening.accept()
                except OSError:
                    return
                at[0] = next(count)
                connection.close()

        thread = threading.Thread(target=serve)
        thread.start()
        opened.append((listening, thread))
        return f"redis://127.0.0.1:{listening.getsockname()[1]}", lambda: at[0]

    yield listen
    for listening, thread in opened:
        listening.shutdown(socket.SHUT_RDWR)
        listening.close()
        thread.join()
