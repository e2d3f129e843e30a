"""A TCP proxy on loopback that breaks connections on command, with real sockets; repeatable by its seed.

>>> with FaultProxy(server.port) as proxy:                                            # doctest: +SKIP
...     client = redis.Redis(port=proxy.port)
...     with proxy.breaking(replies=Swallow()):
...         client.incr("executed, although the client gets no reply")
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import socket
import struct
import threading
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, TypeVar

__all__ = ["Delay", "Dribble", "Fault", "FaultProxy", "Reorder", "Stall", "Swallow", "Truncate"]

Way = Literal["requests", "replies"]
T = TypeVar("T")


@dataclass(frozen=True)
class Stall:
    """A fault that holds bytes back and delivers them when it ends, even if their sender has given up."""


@dataclass(frozen=True)
class Swallow:
    """A fault that accepts bytes and never delivers them.

    For replies: the request is executed, and its client gets no reply.
    """


@dataclass(frozen=True)
class Truncate:
    """A fault that delivers only the next `after` bytes of a connection, then resets it."""

    after: int


@dataclass(frozen=True)
class Dribble:
    """A fault that delivers single bytes, with `pause` seconds between two."""

    pause: float = 0.0


@dataclass(frozen=True)
class Delay:
    """A fault that delivers bytes `seconds` later, in the same order."""

    seconds: float


@dataclass(frozen=True)
class Reorder:
    """A fault that cuts the bytes of one read into pieces and delivers these in another order.

    Pieces have `segment` bytes. With `swaps`, only that many pairs of neighbours change places, so that most of a
    message stays as it was.
    """

    segment: int = 1
    swaps: int | None = None


Fault = Stall | Swallow | Truncate | Dribble | Delay | Reorder


class FaultProxy:
    """A proxy between clients and the server at `127.0.0.1:port`, in a thread of its own, until closed.

    A command returns once it applies to every byte that arrives from then on.

    Args:
        port: The server's port. The server may stop and start again.
        seed: Decides, with the number of the connection, on every new order of bytes.
    """

    def __init__(self, port: int, seed: int = 0) -> None:
        self.hits: Counter[str] = Counter()
        """Number of times that each fault met bytes or a connection, by its name in lower case."""
        self.upstream = port
        """Port of the server behind new connections."""
        self._seed = seed
        self._faults: dict[Way, Fault | None] = {"requests": None, "replies": None}
        self._links: set[asyncio.Task[None]] = set()
        self._accepted = 0
        self._hit = threading.Condition()
        self._listener: socket.socket | None = None
        self._keeper = _bound(0)  # never listens; keeps the port while connections are refused
        self.port: int = self._keeper.getsockname()[1]
        self._loop = asyncio.new_event_loop()
        self._changed = asyncio.Event()
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self._do(self._listen())

    # -- commands ----------------------------------------------------------------------------------------------

    def set(self, requests: Fault | None = None, replies: Fault | None = None) -> None:
        """Set the faults of both directions; None for no fault."""
        self._do(self._set(requests, replies))

    def heal(self) -> None:
        """End all faults, deliver stalled bytes, and accept connections."""
        self._do(self._listen())
        self._do(self._set(None, None))

    def drop(self) -> int:
        """Reset every connection, with all bytes under way in it; return their number."""
        return self._do(self._drop())

    def refuse(self) -> None:
        """Refuse new connections; open ones continue."""
        self._do(self._refuse())

    @contextlib.contextmanager
    def breaking(self, requests: Fault | None = None, replies: Fault | None = None) -> Iterator[None]:
        """Call `set` for the length of a block, then `heal`."""
        self.set(requests, replies)
        try:
            yield
        finally:
            self.heal()

    def wait_for_hit(self, name: str, count: int = 1, timeout: float = 10.0) -> None:
        """Return once a fault has struck `count` times since the proxy was started.

        Raises:
            TimeoutError: It has not within `timeout` seconds.
        """
        with self._hit:
            if not self._hit.wait_for(lambda: self.hits[name] >= count, timeout):
                raise TimeoutError(f"{name} has struck {self.hits[name]} times, not {count}, in {timeout} s")

    def close(self) -> None:
        """Reset every connection and end the thread. Idempotent."""
        if self._loop.is_closed():
            return
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
        self._keeper.close()

    def __enter__(self) -> FaultProxy:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    # -- in the proxy's thread ---------------------------------------------------------------------------------

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _listen(self) -> None:
        if self._listener is None:
            self._listener = _bound(self.port)
            self._listener.listen(100)
            self._loop.add_reader(self._listener, self._accept, self._listener)

    async def _refuse(self) -> None:
        if self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    async def _set(self, requests: Fault | None, replies: Fault | None) -> None:
        self._faults = {"requests": requests, "replies": replies}
        self._changed.set()
        self._changed = asyncio.Event()

    async def _drop(self) -> int:
        links = list(self._links)
        for task in links:
            task.cancel()
        await asyncio.gather(*links, return_exceptions=True)
        self._count("drop", len(links))
        return len(links)

    async def _end(self) -> None:
        await self._refuse()
        await self._drop()

    def _count(self, name: str, times: int = 1) -> None:
        with self._hit:
            self.hits[name] += times
            self._hit.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client, _ = listener.accept()
        except OSError:  # the client has already disconnected
            return
        self._accepted += 1
        task = self._loop.create_task(self._serve(self._accepted, client))
        self._links.add(task)
        task.add_done_callback(self._links.discard)
        task.add_done_callback(lambda task: _reset(client))  # not in the task, which may be cancelled before it begins

    async def _serve(self, number: int, client: socket.socket) -> None:
        """Carry both directions until both have ended or one is broken."""
        pumps: list[asyncio.Task[None]] = []
        with _socket() as server:
            try:
                await self._loop.sock_connect(server, ("127.0.0.1", self.upstream))
                ways: tuple[tuple[Way, socket.socket, socket.socket], ...] = (
                    ("requests", client, server),
                    ("replies", server, client),
                )
                for way, source, sink in ways:
                    sink.setblocking(False)
                    sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    rng = random.Random(f"{self._seed} {number} {way}")
                    pumps.append(self._loop.create_task(self._pump(way, source, sink, rng)))
                await asyncio.gather(*pumps)
            except OSError:  # broken connections are the purpose of this proxy
                pass
            finally:
                for pump in pumps:
                    pump.cancel()
                await asyncio.gather(*pumps, return_exceptions=True)
                _reset(server)

    async def _pump(self, way: Way, source: socket.socket, sink: socket.socket, rng: random.Random) -> None:
        send = self._loop.sock_sendall
        truncating: Truncate | None = None
        left = 0
        while data := await self._loop.sock_recv(source, 1 << 16):
            while isinstance(self._faults[way], Stall):
                self._count("stall")
                await self._changed.wait()
            fault = self._faults[way]
            if fault is not None:
                self._count(type(fault).__name__.lower())
            if isinstance(fault, Truncate):
                if fault is not truncating:
                    truncating, left = fault, fault.after
                await send(sink, data[:left])
                left -= len(data)
                if left < 0:
                    raise ConnectionResetError
            elif isinstance(fault, Dribble):
                for i in range(len(data)):
                    await send(sink, data[i : i + 1])
                    await asyncio.sleep(fault.pause)
            elif not isinstance(fault, Swallow):
                if isinstance(fault, Delay):
                    await asyncio.sleep(fault.seconds)
                await send(sink, _reordered(data, fault, rng) if isinstance(fault, Reorder) else data)
        sink.shutdown(socket.SHUT_WR)


def _bound(port: int) -> socket.socket:
    bound = _socket()
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    bound.bind(("127.0.0.1", port))
    return bound


def _socket() -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


def _reset(end: socket.socket) -> None:
    """Close with RST, as a host would answer after a crash."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def _reordered(data: bytes, fault: Reorder, rng: random.Random) -> bytes:
    """Return the pieces in another order: never the same bytes, unless all pieces are equal."""
    pieces = [data[i : i + fault.segment] for i in range(0, len(data), fault.segment)]
    if len(pieces) < 2:
        return data
    shuffled = list(pieces)
    if fault.swaps is None:
        rng.shuffle(shuffled)
    for _ in range(fault.swaps or 0):
        i = rng.randrange(1, len(pieces))
        shuffled[i - 1], shuffled[i] = shuffled[i], shuffled[i - 1]
    if shuffled == pieces:
        shuffled = [*pieces[1:], *pieces[:1]]
    return b"".join(shuffled)
