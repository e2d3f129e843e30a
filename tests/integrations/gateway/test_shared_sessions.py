"""Several gateways that agree over Redis or Valkey: sessions, heads and load, with faults, and tenants apart."""

from __future__ import annotations

import asyncio
import json
import random
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from tests.integrations.gateway.conftest import INSTANT, metric, send

from redis_servers import Cluster, SentinelSetup, Server, binaries, wait_until
from warmprefix_gateway import GatewayOptions, GatewayServer
from warmprefix_gateway.metrics import GatewayMetrics
from warmprefix_gateway.sessions import SessionBook, prompt_parts
from warmprefix_gateway.shared_sessions import SharedSessions
from warmprefix_gateway.upstreams import Upstreams
from warmprefix_redis import RedisTables
from warmprefix_tools.emulator import EmulatorServer

Make = Callable[..., GatewayServer]
SALT_KEY = b"a secret of all gateways"
SESSIONS, TURNS = 24, 8


@pytest.fixture(params=list(binaries()) or ["redis"])
def redis_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("WARMPREFIX_STORE_BUDGET", "5")  # a busy machine is no fault
    server = Server(request.param)
    yield server
    server.close()


@pytest.fixture
def engines() -> Iterator[list[EmulatorServer]]:
    with ExitStack() as running:
        yield [running.enter_context(EmulatorServer(INSTANT)) for _ in range(3)]


class Balancer:
    """Clients whose requests go to a gateway drawn by chance."""

    def __init__(self, gateways: list[GatewayServer], seed: int = 1, *, names: bool = False) -> None:
        self.gateways = gateways
        self.names = names
        self.histories: dict[str, list[dict[str, str]]] = {}
        self.computed = 0
        self._rng = random.Random(seed)

    def turn(self, session: str, key: str | None = None) -> None:
        """Ask the next turn of a session, and count what was computed for it."""
        history = self.histories.setdefault(session, [system(session)])
        history.append({"role": "user", "content": f"Question {len(history)} of {session}. " * 4})
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        if self.names:
            headers["x-session-id"] = session
        body = json.dumps({"model": INSTANT.model, "messages": history, "max_tokens": 4}).encode()
        gateway = self._rng.choice(self.gateways)
        reply = send(gateway, "POST", "/v1/chat/completions", body, **headers)
        assert reply.status == 200, reply.body
        wait_for_writes(gateway)
        usage = reply.json["usage"]
        self.computed += usage["prompt_tokens"] - ((usage["prompt_tokens_details"] or {}).get("cached_tokens") or 0)
        history.append({"role": "assistant", "content": reply.json["choices"][0]["message"]["content"]})

    def turns(self, count: int = TURNS, sessions: int = SESSIONS) -> int:
        """Ask turns of all sessions, one after the other; return the tokens computed for them."""
        before = self.computed
        for _ in range(count):
            for session in range(sessions):
                self.turn(f"s{session}")
        return self.computed - before


def wait_for_writes(gateway: GatewayServer) -> None:
    """Wait for a gateway's round trips: on a busy machine an engine without weights is quicker than Redis."""
    shared = gateway.gateway._office.shared
    wait_until(lambda: shared is None or not shared.is_busy, "the gateway has written to Redis")


def system(session: str) -> dict[str, str]:
    return {"role": "system", "content": f"You are assistant {session}. " * 20}


def computed(make: Make, count: int, *, names: bool = False, **options: Any) -> int:
    """Return the tokens that new engines compute behind new gateways."""
    with ExitStack() as running:
        bases = [running.enter_context(EmulatorServer(INSTANT)).base_url for _ in range(3)]
        return Balancer([make(*bases, **options) for _ in range(count)], names=names).turns()


def shared(redis: Server, **options: Any) -> dict[str, Any]:
    return {"redis_url": redis.url, "salt_key": SALT_KEY, **options}


def causes(*gateways: GatewayServer) -> dict[str, float]:
    names = ("first", "new", "front", "cut", "lost")
    return {name: sum(metric(each, "uncached_tokens_total", cause=name) for each in gateways) for name in names}


def looked_up(gateway: GatewayServer, *outcomes: str) -> float:
    return sum(metric(gateway, "shared_sessions_total", outcome=outcome) for outcome in outcomes)


@pytest.mark.parametrize("count", [2, 4])
@pytest.mark.parametrize("names", [False, True], ids=["unnamed", "named"])
def test_gateways_that_agree_compute_what_one_computes(
    gateway_of: Make, redis_server: Server, names: bool, count: int
) -> None:
    one = computed(gateway_of, 1, names=names)
    assert computed(gateway_of, count, names=names, **shared(redis_server)) <= 1.05 * one


def test_gateways_that_share_nothing_compute_more(gateway_of: Make) -> None:
    assert computed(gateway_of, 4) > 1.5 * computed(gateway_of, 1)


def test_no_gateway_counts_a_session_of_another_one_as_new(
    gateway_of: Make, engines: list[EmulatorServer], redis_server: Server
) -> None:
    bases = [engine.base_url for engine in engines]
    one = gateway_of(*bases)
    Balancer([one]).turns(3, 5)
    for engine in engines:
        send_reset(engine)
    several = [gateway_of(*bases, **shared(redis_server)) for _ in range(3)]
    Balancer(several).turns(3, 5)
    assert causes(*several) == causes(one)
    assert min(causes(one)["first"], causes(one)["new"]) > 0
    pages = [send(gateway, "GET", "/").body.decode() for gateway in several]
    answered = [int(metric(gateway, "requests_total", route="chat", status="200")) for gateway in several]
    shown = [page.partition("<h2>Latest sessions")[2].count('<th scope="row">') for page in pages]
    assert all(0 < rows <= requests for rows, requests in zip(shown, answered, strict=True))


def send_reset(engine: EmulatorServer) -> None:
    request = urllib.request.Request(f"{engine.base_url.removesuffix('/v1')}/reset_prefix_cache", method="POST")
    with urllib.request.urlopen(request, timeout=10) as answer:
        assert answer.status == 200


def test_gateways_go_on_without_redis_and_agree_again_with_it(
    gateway_of: Make, engines: list[EmulatorServer], redis_server: Server
) -> None:
    one = computed(gateway_of, 1)
    gateways = [gateway_of(*[engine.base_url for engine in engines], **shared(redis_server)) for _ in range(4)]
    balancer = Balancer(gateways)
    balancer.turns(TURNS // 2)
    redis_server.kill()
    balancer.turns(TURNS // 2)
    assert balancer.computed <= 2.1 * one
    assert all(looked_up(gateway, "missed") for gateway in gateways)
    redis_server.restart()
    for gateway in gateways:
        before = looked_up(gateway, "found", "unknown")
        alone = Balancer([gateway])

        def answers(gateway: GatewayServer = gateway, alone: Balancer = alone, before: float = before) -> bool:
            alone.turn("ping")
            return looked_up(gateway, "found", "unknown") > before

        wait_until(answers, "Redis is asked again")
    balancer.turns(2)  # the gateway that has a session's latest turn writes it
    lost = causes(*gateways)
    balancer.turns(2)
    assert {name: causes(*gateways)[name] - lost[name] for name in ("first", "cut", "lost")} == {
        "first": 0,
        "cut": 0,
        "lost": 0,
    }


def test_a_redis_server_that_hangs_costs_hits_only(
    gateway_of: Make, engines: list[EmulatorServer], redis_server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WARMPREFIX_STORE_BUDGET", "0.005")
    gateways = [gateway_of(*[engine.base_url for engine in engines], **shared(redis_server)) for _ in range(2)]
    balancer = Balancer(gateways)
    balancer.turns(1, 4)
    redis_server.pause()
    try:
        balancer.turns(2, 4)
    finally:
        redis_server.resume()
    assert all(looked_up(gateway, "missed") for gateway in gateways)
    balancer.turns(1, 4)


@pytest.mark.parametrize("fault", ["flushed", "read-only", "another type", "overwritten", "swapped", "another key"])
def test_what_is_wrong_in_redis_counts_as_missing(
    gateway_of: Make, engines: list[EmulatorServer], redis_server: Server, fault: str
) -> None:
    options = shared(redis_server)
    bases = [engine.base_url for engine in engines]
    gateways = [gateway_of(*bases, **options), gateway_of(*bases, **options)]
    balancer = Balancer(gateways)
    balancer.turns(2, 4)
    with redis_server.client() as client:
        for key in client.keys("*"):
            cells: Any = client.hgetall(key)
            if fault == "flushed":
                client.delete(key)
            elif fault == "another type":
                client.delete(key)
                client.rpush(key, "x")
            elif fault == "overwritten":
                client.hset(key, mapping=dict.fromkeys(cells, b"\x01" + b"x" * 300))
            elif fault == "swapped":
                values = list(cells.values())
                client.hset(key, mapping=dict(zip(cells, values[1:] + values[:1], strict=True)))
        if fault == "read-only":
            client.replicaof("127.0.0.1", 1)
    if fault == "another key":
        gateways[1] = gateway_of(*bases, **{**options, "salt_key": b"another"})
    balancer.turns(2, 4)
    if fault == "read-only":
        with redis_server.client() as client:
            client.replicaof("NO", "ONE")
        balancer.turns(1, 4)


NAMES = ["}{chat}", "{}", "s\u00e9ance", "a:b|c=d", "x" * 3_000, "*?[", "\x01"]


def test_any_session_id_can_be_shared(gateway_of: Make, engines: list[EmulatorServer], redis_server: Server) -> None:
    bases = [engine.base_url for engine in engines]
    gateways = [gateway_of(*bases, **shared(redis_server)) for _ in range(2)]
    for number, name in enumerate(NAMES):
        messages = [{"role": "system", "content": f"{number}. " * 60}]
        for turn, gateway in enumerate(gateways * 2):
            messages.append({"role": "user", "content": f"Question {turn}. " * 30})
            body = json.dumps({"model": INSTANT.model, "messages": messages, "prompt_cache_key": name, "max_tokens": 1})
            reply = send(gateway, "POST", "/v1/chat/completions", body.encode())
            assert reply.status == 200
            wait_for_writes(gateway)
            messages.append(reply.json["choices"][0]["message"])
    assert causes(*gateways)["lost"] == 0
    assert sum(looked_up(gateway, "unknown") for gateway in gateways) == len(NAMES)
    with redis_server.client() as client:
        cells: list[Any] = [text for key in client.keys("*") for cell in client.hgetall(key).items() for text in cell]
        assert not any(word in b" ".join(cells) for word in (b"chat", b"127.0.0.1", b"xxxx", b"Question"))
        assert all(0 < client.ttl(key) <= 86_400 for key in client.keys("*"))


def test_tenants_share_nothing(
    gateway_of: Make, engines: list[EmulatorServer], redis_server: Server, tmp_path: Path
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("".join([f"{name} {sha256(f'key-{name}'.encode()).hexdigest()}\n" for name in ("ann", "bob")]))
    bases = [engine.base_url for engine in engines]
    gateways = [gateway_of(*bases, **shared(redis_server), keys=keys, engine="vllm") for _ in range(2)]
    ann, bob = (Balancer(gateways, names=True) for _ in range(2))
    for _ in range(4):
        ann.turn("one", "key-ann")
    found = sum(looked_up(gateway, "found") for gateway in gateways)
    bob.turn("one", "key-bob")  # the same name, and the same texts
    assert sum(looked_up(gateway, "found") for gateway in gateways) == found
    with redis_server.client() as client:
        tables: Any = client.keys("wp:*:sessions")
        assert len(tables) == 2
        assert not any(word in key for key in tables for word in (b"ann", b"bob"))
        contents: list[Any] = [client.hgetall(table) for table in tables]
        one, other = contents
        client.hset(tables[0], mapping=other)  # as one who may write to Redis would
        client.hset(tables[1], mapping=one)
    bob.turn("one", "key-bob")
    ann.turn("one", "key-ann")
    assert causes(*gateways)["lost"] == 0


def test_the_parent_of_a_sub_agent_may_be_a_session_of_another_gateway(
    gateway_of: Make, engines: list[EmulatorServer], redis_server: Server
) -> None:
    gateways = [gateway_of(*[engine.base_url for engine in engines], **shared(redis_server)) for _ in range(2)]
    messages = [system("one"), {"role": "user", "content": "Matter. " * 200}]
    task = [*messages, {"role": "assistant", "content": "Well."}, {"role": "user", "content": "Look into it."}]
    for gateway, body, headers in zip(
        gateways,
        (messages, task),
        ({"x-session-id": "p"}, {"x-session-id": "c", "x-parent-session-id": "p"}),
        strict=True,
    ):
        content = json.dumps({"model": INSTANT.model, "messages": body, "max_tokens": 1}).encode()
        assert send(gateway, "POST", "/v1/chat/completions", content, **headers).status == 200
        wait_for_writes(gateway)
    child, parent = gateways[1].gateway._office.ledger.sessions
    assert (child.key, child.parent, parent.key) == ("c", "p", "p")
    assert parent.upstream == child.upstream
    assert looked_up(gateways[1], "unknown") == 1


def test_upstreams_of_another_gateway_are_left_out(
    gateway_of: Make, engines: list[EmulatorServer], redis_server: Server
) -> None:
    bases = [engine.base_url for engine in engines]
    one = gateway_of(*bases)
    Balancer([one]).turns(4, 6)
    for engine in engines:
        send_reset(engine)
    gateways = [gateway_of(*each, **shared(redis_server)) for each in (bases[:2], bases[1:], bases)]
    Balancer(gateways).turns(4, 6)
    assert causes(*gateways)["first"] <= causes(one)["first"]


def test_the_load_of_a_gateway_that_is_gone_is_forgotten(redis_server: Server) -> None:
    now = 0.0
    options = GatewayOptions(("http://one/v1", "http://two/v1"))
    parts = prompt_parts("chat", {"messages": [system("one")]})
    session = SessionBook().find(None, "one", parts)

    def gateway() -> tuple[Upstreams, SharedSessions]:
        metrics = GatewayMetrics()
        upstreams, tables = Upstreams(options, metrics), RedisTables(redis_server.url, patience=5)
        return upstreams, SharedSessions(tables, SALT_KEY, SessionBook(), upstreams, metrics, fail, lambda: now)

    async def look(*several: SharedSessions) -> None:
        nonlocal now
        now += 2
        for sessions in several:
            await sessions.look_up(None, "other", parts)
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})

    async def run() -> None:
        (busy, one), (idle, other) = gateway(), gateway()
        idle.abandon(idle.route(session, parts, 10))
        home = busy.route(session, parts, 400_000).replica

        def chosen() -> str:
            route = idle.route(session, parts, 10_000)
            idle.abandon(route)
            return route.replica

        assert chosen() == home
        await look(one, other)  # the first look of `one` comes before its tenant has a load
        await look(one, other)
        assert chosen() != home
        for _ in range(4):
            await look(other)
        assert chosen() != home
        for _ in range(2):
            await look(other)
        assert chosen() == home
        for sessions in (one, other):
            await sessions.aclose()

    asyncio.run(run())
    with redis_server.client() as client:
        assert [client.hlen(key) for key in client.keys("wp:*:load")] == [1]


def test_nothing_is_asked_after_the_end(redis_server: Server) -> None:
    async def run() -> None:
        tables = RedisTables(redis_server.url, patience=5)
        tables.write("one:sessions", {b"a": b"1"})
        assert await tables.read("one:sessions", [b"a"]) == [b"1"]
        await tables.aclose()
        tables.write("one:sessions", {b"a": b"2"})  # by a request that ends later than the gateway
        assert await tables.read("one:sessions", [b"a"]) is None
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())
    with redis_server.client() as client:
        assert client.hgetall("wp:{one}:sessions") == {b"a": b"1"}
        assert len(client.client_list()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Cluster", "Sentinel"])
def test_a_replica_takes_over(kind: str) -> None:
    async def run(servers: Cluster | SentinelSetup) -> None:
        tables = RedisTables(servers.url, patience=5)

        async def answers() -> bool:
            tables.write("one:sessions", {b"a": b"1"})
            return await tables.read("one:sessions", [b"a"]) == [b"1"]

        assert await answers()
        (servers.owner("wp:{one}:sessions") if isinstance(servers, Cluster) else servers.master).kill()
        assert not await answers()
        while not await answers():
            await asyncio.sleep(0.02)
        await tables.aclose()

    with Cluster(replicas=1) if kind == "Cluster" else SentinelSetup() as servers:
        asyncio.run(asyncio.wait_for(run(servers), 60))


def test_the_end_leaves_no_task_and_no_connection(redis_server: Server) -> None:
    parts = prompt_parts("chat", {"messages": [system("one"), {"role": "user", "content": "Hi"}]})
    options, metrics = GatewayOptions(("http://one/v1",)), GatewayMetrics()

    async def run(steps: int) -> None:
        upstreams, tables = Upstreams(options, metrics), RedisTables(redis_server.url, patience=1e-9)
        sessions = SharedSessions(tables, SALT_KEY, SessionBook(), upstreams, metrics, fail)
        looking = asyncio.create_task(sessions.look_up("ann", "one", parts))
        for _ in range(steps):  # it connects, or asks
            await asyncio.sleep(0)
        looking.cancel()
        await asyncio.wait([looking])
        await sessions.aclose()
        assert asyncio.all_tasks() == {asyncio.current_task()}

    for steps in range(24):
        asyncio.run(run(steps))
    with redis_server.client() as client:
        wait_until(lambda: len(client.client_list()) == 1, "all connections are closed")


def fail(what: str, error: Exception) -> None:
    raise AssertionError(what) from error
