"""What a connection may cost before the application sees a request: bytes, seconds, a place. For uvicorn, httptools."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Callable
from typing import Any

from warmprefix.errors import MissingExtraError
from warmprefix.fair_lru import FairLru
from warmprefix_gateway.http_messages import error_body
from warmprefix_gateway.metrics import GatewayMetrics

try:
    from uvicorn import Config
    from uvicorn._types import ASGISendEvent
    from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle
    from uvicorn.server import ServerState
except ImportError as exc:
    raise MissingExtraError("serve", "httptools") from exc

__all__ = ["IDLE_SECONDS", "EdgeProtocol", "WaitingRoom"]

IDLE_SECONDS = 20
"""Time without a request after which a connection is closed; clients close theirs earlier (httpx 5 s, aiohttp 15 s)."""
_HEAD_SECONDS = 10.0
"""Time for the headers of a request. They fit into a few packets, so a slow line needs no more."""
_BODY_SECONDS, _BODY_BYTES = 20.0, 20_000
"""A body must bring as many bytes in each such time, or end: 1 kB/s, slower than any line that can be worked with."""
_WRITE_SECONDS = 60.0
"""Time for a client to take what fills its buffers."""
_LINGER_SECONDS = 2.0
"""Time for a client to read why its request is refused: closed at once, it could find a broken connection only."""
_MAX_HEADER_BYTES, _MAX_HEADERS = 64 * 1_024, 200
_MAX_FRAMING_BYTES = 256 * 1_024
"""Bytes of chunk sizes and extensions that a body may have on top of its own size: single bytes as chunks cost more to
parse than they carry."""
_MAX_PIPELINED = 8
"""Requests that wait on one connection."""
_MAX_WAITING = 1_000
"""Connections on which no request is answered: new ones, unfinished headers, idle ones."""
_SMALL_BYTES, _MAX_SMALL, _SMALL_SECONDS = 4_096, 8, 0.0005
"""Bytes of a small piece, how many of them a request may have at once, and the time between two further ones of all
connections. The kernel collects what comes meanwhile, so that an honest upload has larger pieces then."""
_SLICE = 16 * 1_024
"""Bytes that are parsed at one time, so that the bounds are checked before the parser has read much more."""


class WaitingRoom:
    """The connections on which no request is answered. Others need a place, which the application gives.

    When there are too many, one that waits longest is closed, of the client address that has the most.
    """

    def __init__(self, metrics: GatewayMetrics) -> None:
        self._metrics = metrics
        self._connections: FairLru[EdgeProtocol, EdgeProtocol] = FairLru()
        self.paused = 0
        """Connections from which nothing is read for a moment, because they bring small pieces."""

    def enter(self, connection: EdgeProtocol) -> None:
        self._connections.put(connection, connection, connection.address)
        if len(self._connections) > _MAX_WAITING:
            self.refused("connections")
            self._connections.evict()[0].transport.abort()

    def leave(self, connection: EdgeProtocol) -> None:
        self._connections.pop(connection)

    def refused(self, reason: str) -> None:
        self._metrics.refused.labels(reason).inc()


class _RefusedError(Exception):
    """Ends the parser's work on a request."""


class EdgeProtocol(HttpToolsProtocol):
    """A connection whose requests are bounded before the application sees them.

    A server has a subclass of its own, with its `room`. Trailers are dropped, so that nothing can come as a header that
    a proxy in front would have removed.
    """

    room: WaitingRoom

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self.address = ""
        """The client's address; of IPv6 the part that a network shares."""
        self._reading = ""
        """The part of a request that is being read: "head", "body", or none."""
        self._is_over = False
        """True if nothing more is read from this connection."""
        self._refusal: tuple[int, str, str] | None = None
        self._cycles: list[RequestResponseCycle] = []
        """Requests that are not answered yet, of which uvicorn has the first or the last one only."""
        self._timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._head_bytes = self._silent_bytes = self._wire_bytes = self._body_bytes = self._body_before = 0
        self._small = 0

    # -- connection

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = _network(self.client[0]) if self.client else ""
        self.room.enter(self)
        self._start_timer(_HEAD_SECONDS, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_over = True
        self.room.leave(self)
        self._stop_timer()
        self.resume_writing()
        super().connection_lost(exc)
        for cycle in self._cycles:
            cycle.disconnected = True
            cycle.message_event.set()
        self._cycles.clear()

    def data_received(self, data: bytes) -> None:
        if self._is_over:
            if not self._is_answering:  # a client that sends on after a refusal does not read it either
                self.transport.abort()
            return
        if not self._reading and not self._is_answering:  # may be line ends in front of a request
            self._begin_head()
        view: Any = memoryview(data)  # so that nothing is copied
        for start in range(0, len(data), _SLICE):
            if self._is_over or self.transport.is_closing():
                return
            piece = view[start : start + _SLICE]
            super().data_received(piece)
            if self._reading:
                self._count(len(piece))
        if self._reading and len(data) < _SMALL_BYTES:
            self._small += 1
            if self._small > _MAX_SMALL and not self._is_over:
                self.transport.pause_reading()
                self.room.paused += 1
                self.loop.call_later(_SMALL_SECONDS * self.room.paused, self._read_on)

    def _read_on(self) -> None:
        self.room.paused -= 1
        if not self.flow.read_paused and not self.transport.is_closing():
            self.transport.resume_reading()

    def _count(self, size: int) -> None:
        self._silent_bytes += size
        self._wire_bytes += size
        if self._silent_bytes > _MAX_HEADER_BYTES:  # of a line without an end
            self._end(431, "headers", "the headers are too large")
        elif self._wire_bytes - self._body_bytes > _MAX_FRAMING_BYTES + self._body_bytes:
            self._end(400, "framing", "the chunks are too small")

    @property
    def _is_answering(self) -> bool:
        return bool(self._cycles)

    # -- time

    def _start_timer(self, seconds: float, ends: Callable[[], object]) -> None:
        self._stop_timer()
        self._timer = self.loop.call_later(seconds, ends)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin_head(self) -> None:
        self._reading = "head"
        self._head_bytes = self._silent_bytes = self._wire_bytes = self._body_bytes = self._body_before = 0
        self._small = 0
        self._start_timer(_HEAD_SECONDS, self._head_is_late)

    def _head_is_late(self) -> None:
        if self._head_bytes or self._is_answering:
            self._end(408, "timeout", "the headers did not come in time")
        else:
            self.transport.close()  # nothing was asked

    def _check_body(self) -> None:
        if self.flow.read_paused or self._body_bytes - self._body_before >= _BODY_BYTES:
            self._body_before = self._body_bytes
            self._start_timer(_BODY_SECONDS, self._check_body)
        else:
            self._end(408, "timeout", "the body did not come in time")

    def pause_writing(self) -> None:
        super().pause_writing()
        self._write_timer = self.loop.call_later(_WRITE_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
        super().resume_writing()

    # -- refusals

    def _refuse(self, status: int, reason: str, message: str) -> None:
        """Make the parser stop, which makes uvicorn call `send_400_response`."""
        self._refusal = status, reason, message
        raise _RefusedError

    def send_400_response(self, msg: str) -> None:
        self._end(*self._refusal or (400, "framing", "the request is not valid HTTP/1.1"))

    def _end(self, status: int, reason: str, message: str) -> None:
        """Refuse what is being read, and close the connection; an answer that has begun stays without its end."""
        if self._is_over:
            return
        self._is_over = True
        self.room.refused(reason)
        is_behind = len(self._cycles) > (self._reading == "body")
        has_answer = self._reading == "body" and self.cycle.response_started
        if is_behind or has_answer:
            self.transport.abort()
            return
        path = ""
        if self._reading == "body":
            path = self.scope["path"]
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self.room.enter(self)
        body = error_body(path, status, message)
        about = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
        self.transport.write(STATUS_LINE[status] + about + body)
        self.transport.write_eof()
        self._start_timer(_LINGER_SECONDS, self.transport.abort)

    # -- parser

    def on_message_begin(self) -> None:
        if self._reading != "head":
            self._begin_head()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._add_to_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._add_to_head(len(name) + len(value) + 4)
        if self._reading == "head":
            super().on_header(name, value.rstrip(b" \t"))

    def _add_to_head(self, size: int) -> None:
        self._head_bytes += size
        if self._head_bytes > _MAX_HEADER_BYTES or len(self.headers) >= _MAX_HEADERS:
            self._refuse(431, "headers", "the headers are too large")

    def on_headers_complete(self) -> None:
        parser: Any = self.parser
        version = parser.get_http_version()
        codings = [value.lower() for name, value in self.headers if name == b"transfer-encoding"]
        if version not in ("1.0", "1.1"):
            self._refuse(505, "framing", "the version of HTTP is not 1.0 or 1.1")
        if codings and (version == "1.0" or codings != [b"chunked"]):  # with a length, httptools refuses it
            self._refuse(400, "framing", "the transfer coding is not chunked")
        has_upgrade = parser.should_upgrade()
        if has_upgrade and (
            parser.get_method() == b"CONNECT"
            or codings
            or any(name == b"content-length" and value != b"0" for name, value in self.headers)
        ):  # httptools would take the body for another protocol's
            self._refuse(400, "framing", "a request with a body must not ask for another protocol")
        if len(self.pipeline) >= _MAX_PIPELINED:
            self._refuse(400, "pipeline", "too many requests at one time")
        if version == "1.0":
            self.expect_100_continue = False  # its clients do not understand that answer
        super().on_headers_complete()
        self._cycles.append(self.cycle)
        self.flow.resume_reading()  # uvicorn pauses for a request that waits, and then misses that the client leaves
        self.room.leave(self)
        if has_upgrade:
            self.cycle.keep_alive = False
        if version == "1.0":
            _end_with_connection(self.cycle)
        self._reading = "body"
        self._start_timer(_BODY_SECONDS, self._check_body)

    def on_body(self, body: bytes) -> None:
        self._silent_bytes = 0
        self._body_bytes += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._reading = ""
        self._stop_timer()
        super().on_message_complete()
        parser: Any = self.parser
        if parser.should_upgrade():
            self._is_over = True
        elif not self._is_answering:  # the rest of a refused body was read
            self._start_timer(IDLE_SECONDS, self.transport.close)

    # -- answers

    def on_response_complete(self) -> None:
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        super().on_response_complete()
        if self.transport.is_closing():
            self._start_timer(_WRITE_SECONDS, self.transport.abort)
        elif not self._is_answering:
            self.room.enter(self)
            if self._reading == "body":
                self._start_timer(_LINGER_SECONDS, self.transport.abort)


def _end_with_connection(cycle: RequestResponseCycle) -> None:
    """Let an answer without a length end with its connection: clients of HTTP/1.0 do not understand chunks."""
    send, has_length = cycle.send, False

    async def send_unchunked(message: ASGISendEvent) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            has_length = any(name.lower() == b"content-length" for name, _ in message.get("headers", ()))
            cycle.chunked_encoding = None if has_length else False
        elif message["type"] == "http.response.body" and not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_unchunked  # type: ignore[method-assign]


def _network(address: str) -> str:
    """Return the address of IPv4, and of IPv6 the network, of which one client has all addresses."""
    if ":" not in address:
        return address
    return str(ipaddress.ip_network((address.partition("%")[0], 64), strict=False))
