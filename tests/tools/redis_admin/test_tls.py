"""`rediss://`, with a real handshake and real certificates.

No server binary that tests can rely on speaks TLS itself, so what ends it stands in front of a real server, as stunnel
does.
"""

from __future__ import annotations

import asyncio
import ssl
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from redis_servers import Server
from warmprefix import ContextPlanner
from warmprefix.stores import Conversation, Prepare
from warmprefix_redis import RedisSeenStore
from warmprefix_redis.settings import SharedSettings

CERTIFICATES = Path(__file__).parent / "tls"
AUTHORITY = CERTIFICATES / "authority.pem"
CHAT = Conversation("acme", "chat-42")
ADA = "Ada Lovelace wrote the first published algorithm."


class TlsFront:
    """Ends TLS on a port of its own, and passes what is in it on to a server. Its certificate is for 127.0.0.1."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(CERTIFICATES / "server.pem")
        self._server = self._do(asyncio.start_server(self._serve, "127.0.0.1", 0, ssl=context))
        self.port = int(self._server.sockets[0].getsockname()[1])
        self.handshakes = 0

    def close(self) -> None:
        self._do(self._end())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _do(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _end(self) -> None:
        self._server.close()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await asyncio.sleep(0.05)  # transports are closed a turn of the loop later

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.handshakes += 1
        back, forth = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            await asyncio.wait(
                [asyncio.ensure_future(_pass_on(*ends)) for ends in ((reader, forth), (back, writer))],
                return_when=asyncio.FIRST_COMPLETED,
            )
        finally:
            writer.transport.abort()
            forth.transport.abort()


async def _pass_on(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
    while data := await source.read(65_536):
        target.write(data)
        await target.drain()


@pytest.fixture
def front(server: Server) -> Iterator[TlsFront]:
    front = TlsFront(server.port)
    yield front
    front.close()


def test_a_planner_speaks_tls(front: TlsFront, server: Server) -> None:
    url = f"rediss://127.0.0.1:{front.port}/0?ssl_ca_certs={AUTHORITY}&ssl_check_hostname=true"
    with ContextPlanner.from_url(settings=SharedSettings(redis_url=url, store_budget=10.0)) as planner:
        with planner.planning(
            ["Ada Lovelace wrote the first published algorithm."],
            conversation="chat-42",
            placement="tail",
            tenant="acme",
        ):
            pass
        assert planner.stats().store_errors == 0
    assert front.handshakes > 0
    store = RedisSeenStore(server.url, timeout=10)
    snapshot = store.inspect(CHAT)
    store.close()
    assert snapshot is not None
    assert len(snapshot.blocks) == 1


async def test_tasks_speak_tls(front: TlsFront) -> None:
    url = f"rediss://127.0.0.1:{front.port}?ssl_ca_certs={AUTHORITY}&ssl_check_hostname=true"
    async with ContextPlanner.from_url(settings=SharedSettings(redis_url=url, store_budget=10.0)) as planner:
        async with planner.planning(
            ["Ada Lovelace wrote the first published algorithm."],
            conversation="chat-42",
            placement="tail",
            tenant="acme",
        ):
            pass
        assert planner.stats().store_errors == 0
    assert front.handshakes > 0


@pytest.mark.parametrize(
    ("host", "options"),
    [("127.0.0.1", ""), ("localhost", f"?ssl_ca_certs={AUTHORITY}&ssl_check_hostname=true")],
    ids=["by an unknown authority", "for another name"],
)
def test_wrong_certificate_is_refused(front: TlsFront, host: str, options: str, run: Callable[..., Any]) -> None:
    url = f"rediss://{host}:{front.port}{options}"
    store = RedisSeenStore(url, timeout=10)
    with pytest.raises(redis.ConnectionError, match=r"certificate verify failed|CERTIFICATE_VERIFY_FAILED"):
        store.execute(Prepare(CHAT, "plan", {}))
    store.close()
    done = run("stats", "--url", url)
    assert (done.returncode, done.stdout) == (2, "")
    assert len(done.stderr.splitlines()) == 1
    assert front.handshakes == 0


def test_plain_connection_to_tls_and_back_is_refused(front: TlsFront, server: Server) -> None:
    for url in (f"redis://127.0.0.1:{front.port}", f"rediss://127.0.0.1:{server.port}?ssl_ca_certs={AUTHORITY}"):
        store = RedisSeenStore(url, timeout=2)
        with pytest.raises(redis.RedisError):
            store.execute(Prepare(CHAT, "plan", {}))
        store.close()


def test_the_command_speaks_tls(front: TlsFront, fill: Callable[..., Any], server: Server, ask: Any) -> None:
    fill(server.url).turns(CHAT)
    url = f"rediss://127.0.0.1:{front.port}?ssl_ca_certs={AUTHORITY}"
    assert ask("stats", url)[1]["conversations"] == 1
