"""The proxy that the fault tests trust: each fault does what it claims, on real sockets."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from fault_proxy import Delay, Dribble, FaultProxy, Reorder, Stall, Swallow, Truncate
from redis_servers import free_port

MESSAGE = bytes(range(64))


class Echo:
    """A server that sends received bytes back, and remembers them."""

    def __init__(self) -> None:
        self.received = b""
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._served: list[tuple[threading.Thread, socket.socket]] = []
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            thread = threading.Thread(target=self._echo, args=(connection,))
            thread.start()
            self._served.append((thread, connection))

    def _echo(self, connection: socket.socket) -> None:
        with connection:
            try:
                while data := connection.recv(1 << 16):
                    self.received += data
                    connection.sendall(data)
            except OSError:
                pass

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join()
        for thread, connection in self._served:
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            thread.join()


@pytest.fixture
def echo() -> Iterator[Echo]:
    server = Echo()
    yield server
    server.close()


@pytest.fixture
def proxy(echo: Echo) -> Iterator[FaultProxy]:
    with FaultProxy(echo.port, seed=1) as running:
        yield running


@pytest.fixture
def client(proxy: FaultProxy) -> Iterator[socket.socket]:
    with connect(proxy) as connection:
        assert exchange(connection, b"hello") == b"hello"
        yield connection


def connect(proxy: FaultProxy) -> socket.socket:
    return socket.create_connection(("127.0.0.1", proxy.port), timeout=5)


def exchange(connection: socket.socket, data: bytes) -> bytes:
    connection.sendall(data)
    return receive(connection, len(data))


def receive(connection: socket.socket, size: int) -> bytes:
    """Return `size` bytes, or those before the end of the connection."""
    received = b""
    try:
        while len(received) < size and (data := connection.recv(1 << 16)):
            received += data
    except ConnectionResetError:
        pass
    return received


def receives_nothing(connection: socket.socket) -> bool:
    connection.settimeout(0.1)
    try:
        connection.recv(1)
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)
    return False


def test_passes_bytes_and_closes(client: socket.socket) -> None:
    message = MESSAGE * 10_000
    sending = threading.Thread(target=client.sendall, args=(message,))
    sending.start()
    assert receive(client, len(message)) == message
    sending.join()
    client.shutdown(socket.SHUT_WR)
    assert client.recv(1) == b""


@pytest.mark.parametrize("way", ["requests", "replies"])
def test_a_stall_holds_bytes_and_delivers_them_late(
    echo: Echo, proxy: FaultProxy, client: socket.socket, way: str
) -> None:
    proxy.set(**{way: Stall()})
    client.sendall(MESSAGE)
    proxy.wait_for_hit("stall")
    assert receives_nothing(client)
    assert echo.received.endswith(MESSAGE) == (way == "replies")
    proxy.heal()
    assert receive(client, len(MESSAGE)) == MESSAGE


def test_stalled_bytes_arrive_after_their_sender_closed(echo: Echo, proxy: FaultProxy, client: socket.socket) -> None:
    with proxy.breaking(requests=Stall()):
        client.sendall(MESSAGE)
        proxy.wait_for_hit("stall")
        client.close()
    deadline = time.monotonic() + 5
    while not echo.received.endswith(MESSAGE):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_swallowed_replies_belong_to_executed_requests(echo: Echo, proxy: FaultProxy, client: socket.socket) -> None:
    with proxy.breaking(replies=Swallow()):
        client.sendall(MESSAGE)
        proxy.wait_for_hit("swallow")
    assert echo.received.endswith(MESSAGE)
    assert receives_nothing(client)
    assert exchange(client, b"and then") == b"and then"


def test_swallowed_requests_never_arrive(echo: Echo, proxy: FaultProxy, client: socket.socket) -> None:
    with proxy.breaking(requests=Swallow()):
        client.sendall(MESSAGE)
        proxy.wait_for_hit("swallow")
    assert echo.received == b"hello"


@pytest.mark.parametrize("after", [0, 1, 63])
@pytest.mark.parametrize("way", ["requests", "replies"])
def test_truncates_after_the_given_number_of_bytes(
    echo: Echo, proxy: FaultProxy, client: socket.socket, way: str, after: int
) -> None:
    proxy.set(**{way: Truncate(after)})
    received = exchange(client, MESSAGE)
    if way == "replies":
        assert received == MESSAGE[:after]
    else:
        deadline = time.monotonic() + 5
        while echo.received != b"hello" + MESSAGE[:after]:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    proxy.heal()
    with connect(proxy) as again:
        assert exchange(again, MESSAGE) == MESSAGE


def test_dribbles_every_byte(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.set(replies=Dribble(pause=0.002))
    client.sendall(MESSAGE)
    pieces: list[bytes] = []
    while len(b"".join(pieces)) < len(MESSAGE):
        pieces.append(client.recv(1 << 16))
    assert b"".join(pieces) == MESSAGE
    assert len(pieces) > 8


def test_delays_and_keeps_the_order(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.set(requests=Delay(0.1))
    before = time.monotonic()
    assert exchange(client, b"one") + exchange(client, b"two") == b"onetwo"
    assert time.monotonic() - before >= 0.2


@pytest.mark.parametrize("segment", [1, 7, 40])
def test_a_seed_repeats_the_same_order(echo: Echo, segment: int) -> None:
    seen = []
    for _ in range(2):
        with FaultProxy(echo.port, seed=5) as proxy, connect(proxy) as client:
            proxy.set(replies=Reorder(segment))
            seen.append(exchange(client, MESSAGE))
    assert seen[0] == seen[1] != MESSAGE
    assert sorted(seen[0]) == sorted(MESSAGE)
    assert MESSAGE[:segment] in seen[0]


def test_drops_every_connection_and_takes_new_ones(proxy: FaultProxy, client: socket.socket) -> None:
    with connect(proxy) as other:
        exchange(other, b"there")
        assert proxy.drop() == 2
        assert receive(client, 1) == receive(other, 1) == b""
    with connect(proxy) as again:
        assert exchange(again, MESSAGE) == MESSAGE


def test_refuses_connections_and_takes_them_again_at_the_same_port(proxy: FaultProxy, client: socket.socket) -> None:
    proxy.refuse()
    with pytest.raises(ConnectionRefusedError):
        connect(proxy)
    assert exchange(client, MESSAGE) == MESSAGE
    proxy.heal()
    with connect(proxy) as again:
        assert exchange(again, MESSAGE) == MESSAGE


def test_disconnects_without_a_server() -> None:
    # On a busy machine the reset may come before the client sees that it was connected.
    with FaultProxy(free_port()) as proxy, contextlib.suppress(ConnectionResetError), connect(proxy) as client:
        assert receive(client, 1) == b""


@pytest.mark.parametrize("segment", [1, 8])
def test_swaps_neighbours(echo: Echo, segment: int) -> None:
    with FaultProxy(echo.port, seed=5) as proxy, connect(proxy) as client:
        proxy.set(replies=Reorder(segment, swaps=1))
        received = exchange(client, MESSAGE)
    assert sorted(received) == sorted(MESSAGE)
    assert sum(a != b for a, b in zip(received, MESSAGE, strict=True)) == 2 * segment


def test_leaves_no_thread_behind(echo: Echo) -> None:
    before = threading.active_count()
    proxy = FaultProxy(echo.port)
    proxy.close()
    proxy.close()
    assert threading.active_count() == before
