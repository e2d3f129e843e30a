"""Routers of the same agents that share their assignments through a real server."""

from __future__ import annotations

import itertools
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fault_proxy import FaultProxy, Stall, Truncate
from redis_servers import HOST, Server, binaries, free_port, wait_until
from warmprefix import ContextBlock, EngineReport
from warmprefix.order_sharing import MAX_BLOCKS, MAX_TOKENS, LearnedOrder, NoSharing
from warmprefix_redis.order_codec import encode, stream_key
from warmprefix_redis.order_sharing import RedisOrderSharing
from warmprefix_redis.settings import SharedSettings
from warmprefix_routing import Agent, AgentBounds, AgentRouter, Assignment
from warmprefix_routing.segments import Segment, name_digest, read_segment, routing_scope, write_segment

AGENTS = ["agent-a", "agent-b", "agent-c"]
_prefixes = map("routing-{}".format, itertools.count())


@pytest.fixture(scope="module", params=sorted(binaries()))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    with Server(request.param) as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[Server]:
    """One that may be killed."""
    with Server() as running:
        yield running


@pytest.fixture
def prefix() -> str:
    return next(_prefixes)


NewRouter = Callable[..., AgentRouter]


@pytest.fixture
def new_router(prefix: str) -> Iterator[NewRouter]:
    """Create routers that share with all others of the test; close them, and check that their threads end."""
    before = set(threading.enumerate())
    made: list[AgentRouter] = []

    def make(url: str, agents: Any = AGENTS, budget: float = 0.020, **bounds: Any) -> AgentRouter:
        settings = SharedSettings(redis_url=url, key_prefix=prefix, store_budget=budget)
        # So that nothing spills, and holders get all their blocks.
        numbers = AgentBounds(**{"free_tokens": 10**9, "prompt_tokens": 0, **bounds})
        made.append(AgentRouter.from_url(agents=agents, settings=settings, bounds=numbers))
        return made[-1]

    yield make
    for router in made:
        router.close()
        router.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "no thread is left")


def blocks(*names: object, tokens: int = 100) -> list[ContextBlock]:
    return [ContextBlock(f"secret text of {name}", id=f"secret id of {name}", tokens=tokens) for name in names]


def read(router: AgentRouter, given: list[ContextBlock], **options: Any) -> Assignment:
    assignment = router.assign(given, **options)
    assert router.commit(assignment)
    return assignment


def follow(router: AgentRouter, tenant: str | None = None) -> None:
    """Let the router use a tenant, and wait until it has learned the earlier assignments."""
    router.assign([], tenant=tenant)
    sharing = router._sharing
    assert isinstance(sharing, RedisOrderSharing)
    wait_until(lambda: sharing.has_caught_up(routing_scope(tenant)), "it has caught up")


def learned(router: AgentRouter, count: int) -> None:
    wait_until(lambda: router.stats().learned >= count, f"{count} blocks are learned")
    assert router.stats().learned == count


def published(router: AgentRouter, count: int) -> None:
    wait_until(lambda: router._sharing.stats().published >= count, f"{count} orders are sent")


def readers(assignment: Assignment) -> dict[str, str]:
    return {assigned.block.text: assigned.agent for assigned in assignment.blocks}


def pin(router: AgentRouter, name: object, agent: str, **options: Any) -> None:
    """Have a block read by this agent."""
    read(router, blocks(name), agents=[agent], **options)


def test_routers_share_assignments(server: Server, new_router: NewRouter) -> None:
    one, two = new_router(server.url), new_router(server.url)
    for router in (one, two):
        follow(router, "acme")
    for number in range(30):
        pin(one, number, AGENTS[number % 3], tenant="acme")
    learned(two, 30)
    found = two.assign(blocks(*range(30)), tenant="acme")
    assert [assigned.agent for assigned in found.blocks] == [AGENTS[number % 3] for number in range(30)]
    assert {assigned.held for assigned in found.blocks} == {"cache"}
    assert one.stats().learned == 0, "nothing of its own"
    two.commit(found)
    learned(one, 30)
    assert sum(two.load("acme").values()) == pytest.approx(6_000, rel=0.1), "the other's requests are load too"


def test_late_router_learns_earlier_assignments(server: Server, new_router: NewRouter) -> None:
    one = new_router(server.url)
    for number in range(30):
        pin(one, number, AGENTS[number % 3])
    published(one, 30)
    late = new_router(server.url)
    follow(late)
    learned(late, 30)
    found = late.assign(blocks(*range(30)))
    assert [assigned.agent for assigned in found.blocks] == [AGENTS[number % 3] for number in range(30)]


def test_a_restarted_router_starts_with_the_latest_assignments(server: Server, new_router: NewRouter) -> None:
    """Its first request finds them; older ones are learned as if they had come first."""
    one = new_router(server.url)
    for number in range(300):
        pin(one, number, AGENTS[number % 3], conversation=f"chat {number % 2}", tenant="acme")
    published(one, 300)
    one.close()
    # All fit: while older ones are learned again, in their turn, they would push out the newest of a full cache.
    agents = [Agent(name, capacity_tokens=12_000) for name in AGENTS]
    late = new_router(server.url, agents, budget=10.0)
    newest = range(44, 300)
    found = late.assign(blocks(*newest), conversation="chat 0", tenant="acme")
    assert [assigned.agent for assigned in found.blocks] == [AGENTS[number % 3] for number in newest]
    assert {assigned.held for assigned in found.blocks[::2]} == {"conversation"}
    late.abandon(found)
    follow(late, "acme")
    learned(late, 556)
    for number, view in enumerate(late._tenants.states["acme"].agents.values()):
        expected = [block.fingerprint for block in blocks(*range(number, 300, 3))]
        assert list(view.cache.blocks) == expected


def test_many_tenants_that_are_new_at_once_share_a_round(server: Server, new_router: NewRouter) -> None:
    """Each begins with its latest assignments; no round reads more than a few thousand entries."""
    one = new_router(server.url)
    tenants = [f"tenant {number}" for number in range(40)]
    for tenant in tenants:
        for number in range(30):
            pin(one, number, AGENTS[number % 3], tenant=tenant)
    published(one, 30 * len(tenants))
    late = new_router(server.url)
    late._patience = 0.0
    for tenant in tenants:
        late.assign([], tenant=tenant)
    for tenant in tenants:
        follow(late, tenant)
        found = late.assign(blocks(*range(30)), tenant=tenant)
        assert [assigned.agent for assigned in found.blocks] == [AGENTS[number % 3] for number in range(30)]


def test_a_report_corrects_what_a_restarted_router_learned(server: Server, new_router: NewRouter) -> None:
    """The engine has lost its cache too: one report shows it, as in the process that gave out the blocks."""
    one, alone = new_router(server.url), AgentRouter(AGENTS, bounds=AgentBounds(free_tokens=10**9, prompt_tokens=0))
    for router in (one, alone):
        for number in range(6):
            pin(router, number, AGENTS[1])
    published(one, 6)
    one.close()
    for router in (new_router(server.url, budget=10.0), alone):
        again = router.assign(blocks(4))
        assert again.blocks[0].held == "cache"
        router.commit(again, report=EngineReport(cached_tokens=0, prompt_tokens=140))
        assert router.stats().stale == 5
        assert [each.held for each in router.assign(blocks(*range(6))).blocks] == [None] * 4 + ["cache"] * 2


def test_a_router_that_is_the_first_waits_for_nothing(server: Server, new_router: NewRouter) -> None:
    router = new_router(server.url, budget=1_000.0)
    for tenant in (None, "acme"):
        assert [assigned.held for assigned in read(router, blocks(1), tenant=tenant).blocks] == [None]
    assert not router._arrivals


def test_conversation_continues_at_another_router(server: Server, new_router: NewRouter) -> None:
    one, two = new_router(server.url), new_router(server.url)
    for router in (one, two):
        follow(router)
    first = read(one, blocks(*range(6)), conversation="chat", together=True)
    learned(two, 6)
    again = two.assign(blocks(*range(6)), conversation="chat", together=True)
    assert readers(again) == readers(first)
    assert {assigned.held for assigned in again.blocks} == {"conversation"}
    assert {assigned.held for assigned in two.assign(blocks(*range(6)), conversation="other").blocks} == {"cache"}


def test_only_committed_blocks_are_shared(server: Server, new_router: NewRouter) -> None:
    one, two = new_router(server.url), new_router(server.url)
    follow(two)
    one.abandon(one.assign(blocks("abandoned")))
    one.assign(blocks("on its way"))
    pin(one, "read", AGENTS[0])
    learned(two, 1)
    held = [assigned.held for assigned in two.assign(blocks("abandoned", "on its way", "read")).blocks]
    assert held == [None, None, "cache"]


def test_router_ignores_segments_of_unregistered_agents(server: Server, new_router: NewRouter) -> None:
    """It learns nothing about agents that it lacks, or that failed here."""
    one, two = new_router(server.url), new_router(server.url, [AGENTS[1], Agent("other"), AGENTS[2]])
    follow(two)
    two.fail(AGENTS[2])
    for number, agent in enumerate(AGENTS):
        pin(one, number, agent)
    pin(one, "last", AGENTS[1])
    learned(two, 2)
    held = {assigned.block.id: assigned.agent for assigned in two.assign(blocks(0, 1, 2)).blocks if assigned.held}
    assert held == {"secret id of 1": AGENTS[1]}


def test_each_tenant_has_its_own_stream(server: Server, new_router: NewRouter, prefix: str) -> None:
    one, two = new_router(server.url), new_router(server.url)
    tenants = [None, "acme", "", "acme}", "\ud800", "evil"]
    for number, tenant in enumerate(tenants):
        follow(two, tenant)
        pin(one, number, AGENTS[number % 3], tenant=tenant)
    learned(two, len(tenants))
    for number, tenant in enumerate(tenants):
        found = two.assign(blocks(*range(len(tenants))), tenant=tenant)
        assert [assigned.held for assigned in found.blocks] == [
            "cache" if other == number else None for other in range(len(tenants))
        ]
    with server.client() as client:
        keys = set(client.keys(f"{prefix}:*"))
    assert keys == {stream_key(prefix, routing_scope(tenant)) for tenant in tenants}
    assert len(keys) == len(tenants)


def test_redis_receives_no_text_and_no_name(own_server: Server, new_router: NewRouter) -> None:
    one = new_router(own_server.url)
    read(one, blocks(*range(20)), conversation="secret conversation", tenant="secret tenant")
    published(one, 3)
    with own_server.client() as client:
        keys: Any = client.keys("*")
        streams: dict[bytes, Any] = {key: client.xrange(key) for key in keys}
    everything = b"".join(streams)
    for entries in streams.values():
        for id, fields in entries:
            everything += id + b"".join(fields) + b"".join(fields.values())
    assert len(everything) > 20 * 22
    for secret in (b"secret", b"text", b"agent", b"tenant", b"conversation"):
        assert secret not in everything


def test_a_long_segment_survives(server: Server, new_router: NewRouter) -> None:
    one, two = new_router(server.url), new_router(server.url)
    follow(two)
    many = blocks(*range(2_500), tokens=1)
    first = read(one, many, agents=[AGENTS[1]], conversation="chat")
    learned(two, 2_500)
    again = two.assign(many, conversation="chat")
    assert {assigned.agent for assigned in again.blocks} == {AGENTS[1]}
    assert {assigned.held for assigned in again.blocks} == {"conversation"}
    assert len(first.blocks) == 2_500


def test_malformed_stream_entries_do_no_harm(server: Server, new_router: NewRouter, prefix: str) -> None:
    one, two = new_router(server.url), new_router(server.url)
    follow(two)
    key = stream_key(prefix, routing_scope(None))
    agent, block = name_digest("agent", AGENTS[0]), bytes(16)
    orders = [
        LearnedOrder([block], [5], [0]),  # a planner's: no agent
        LearnedOrder([agent], [0], [0xFFFF]),  # no block
        LearnedOrder([agent, block], [0, 5], [0xFFFE, 0]),  # a conversation, but no agent
        LearnedOrder([b"\7" * 16, block], [0, 5], [0xFFFF, 0]),  # an agent that is not registered
        LearnedOrder([agent, block], [0, MAX_TOKENS], [0xFFFF, 7]),  # as good as any
    ]
    payloads = [encode(b"sender 1", order) for order in orders]
    with server.client() as client:
        for payload in (b"", b"\1", payloads[4][:-3], payloads[4][:-1] + b"\xff", *payloads):
            client.xadd(key, {b"o": payload})
        client.xadd(key, {b"something": b"else"})
    pin(one, "x", AGENTS[1])
    learned(two, 2)
    assert two._sharing.stats().malformed == 5
    assert two.assign(blocks("x")).blocks[0].agent == AGENTS[1]
    assert len(two._tenants.states[None].holders) == 2


def test_segments_survive_being_written() -> None:
    agent, conversation = name_digest("agent", "a"), name_digest("conversation", "a")
    assert len({agent, conversation, name_digest("agent", "\ud800")}) == 3
    keys = [number.to_bytes(16, "big") for number in range(3_000)]
    for chat in (None, conversation):
        for count in (1, 1_022, 1_023, 1_024, 3_000):
            given = [(key, i * 10_000) for i, key in enumerate(keys[:count])]
            back: list[tuple[bytes, int]] = []
            for order in write_segment(Segment(agent, chat, given)):
                assert len(order.keys) <= MAX_BLOCKS
                assert encode(b"sender 1", order)
                segment = read_segment(order)
                assert segment is not None
                assert (segment.agent, segment.conversation) == (agent, chat)
                back += segment.blocks
            assert back == [(key, min(tokens, MAX_TOKENS)) for key, tokens in given]
    assert not list(write_segment(Segment(agent, conversation, [])))


# -- when Redis is away ------------------------------------------------------------------------------------------------


def test_redis_is_killed_and_comes_back(own_server: Server, new_router: NewRouter) -> None:
    one, two = new_router(own_server.url), new_router(own_server.url)
    follow(two)
    pin(one, "before", AGENTS[0])
    learned(two, 1)
    own_server.kill()
    for number in range(50):
        pin(one, number, AGENTS[1])
        read(two, blocks(f"other {number}"))
    assert {assigned.agent for assigned in one.assign(blocks(*range(50))).blocks} == {AGENTS[1]}
    assert two.assign(blocks("before")).blocks[0].agent == AGENTS[0]
    own_server.start()

    def again() -> bool:
        pin(one, "after", AGENTS[2])
        return two.assign(blocks("after")).blocks[0].held is not None

    wait_until(again, "what is read then is shared again")


def test_redis_hangs(own_server: Server, new_router: NewRouter) -> None:
    """No call waits for the server, which resumes only after all calls have returned."""
    one, two = new_router(own_server.url), new_router(own_server.url)
    follow(two)
    pin(one, "before", AGENTS[0])
    learned(two, 1)
    done = threading.Event()

    def use() -> None:
        for number in range(300):
            read(one, blocks(number), tenant=f"tenant {number % 3}", conversation="chat")
        one.abandon(one.assign(blocks("x")))
        one.reset()
        done.set()

    own_server.pause()
    thread = threading.Thread(target=use, daemon=True)
    thread.start()
    try:
        assert done.wait(30)
    finally:
        own_server.resume()
    thread.join()


def test_a_server_that_hangs_delays_one_request(own_server: Server, new_router: NewRouter) -> None:
    router = new_router(own_server.url)
    own_server.pause()
    try:
        router.assign(blocks(1), tenant="one")
        assert not router._sharing_answers
        router._patience = 1_000.0  # no other request waits
        router.assign(blocks(1), tenant="two")
        router.assign(blocks(1), tenant="one")
    finally:
        own_server.resume()
    wait_until(lambda: router._sharing_answers, "it answers again")
    router.assign(blocks(1), tenant="three")
    assert router._sharing_answers


@pytest.mark.parametrize("ruin", ["flushed", "garbage", "another version", "read-only"])
def test_what_the_server_lost_is_learned_again(
    own_server: Server, new_router: NewRouter, prefix: str, ruin: str
) -> None:
    one = new_router(own_server.url, budget=10.0)
    pin(one, "before", AGENTS[1], tenant="acme")
    published(one, 1)
    key = stream_key(prefix, routing_scope("acme"))
    with own_server.client() as client:
        if ruin == "flushed":
            client.flushall()
        elif ruin == "garbage":
            client.set(key, b"no stream")
        elif ruin == "another version":
            entries: Any = client.xrange(key)
            client.delete(key)
            client.xadd(key, {b"o": b"\2" + entries[0][1][b"o"][1:]})
        else:
            client.config_set("min-replicas-to-write", "1")
        late = new_router(own_server.url, budget=0.2 if ruin == "garbage" else 10.0)
        held = late.assign(blocks("before"), tenant="acme").blocks[0].held
        assert held == ("cache" if ruin == "read-only" else None)
        pin(one, "while it cannot be shared", AGENTS[1], tenant="acme")
        if ruin == "garbage":
            client.delete(key)
        client.config_set("min-replicas-to-write", "0")

    def again() -> bool:
        pin(one, "after", AGENTS[2], tenant="acme")
        return late.assign(blocks("after"), tenant="acme").blocks[0].held is not None

    wait_until(again, "what is read then is shared again")


@pytest.mark.parametrize("fault", [Stall(), Truncate(10)], ids=["stalls", "cuts"])
def test_the_connection_breaks(own_server: Server, new_router: NewRouter, fault: Any) -> None:
    with FaultProxy(own_server.port) as proxy:
        one, two = new_router(f"redis://{HOST}:{proxy.port}"), new_router(own_server.url)
        follow(one)
        follow(two)
        with proxy.breaking(replies=fault):
            for number in range(20):
                pin(one, number, AGENTS[number % 3])
            wait_until(lambda: one._sharing.stats().errors, "the failure is counted")
            assert one.assign(blocks(4)).blocks[0].agent == AGENTS[1]
        pin(two, "from two", AGENTS[2])
        wait_until(lambda: one.assign(blocks("from two")).blocks[0].held, "it goes on")


def test_router_works_without_a_server(new_router: NewRouter) -> None:
    router = new_router(f"redis://{HOST}:{free_port()}")
    first = read(router, blocks(*range(9)))
    assert readers(read(router, blocks(*range(9)))) == readers(first)
    wait_until(lambda: router._sharing.stats().errors, "it is counted")


# -- from a URL --------------------------------------------------------------------------------------------------------


def test_environment_configures_sharing(
    server: Server, prefix: str, monkeypatch: pytest.MonkeyPatch, new_router: NewRouter
) -> None:
    monkeypatch.setenv("WARMPREFIX_REDIS_URL", server.url)
    monkeypatch.setenv("WARMPREFIX_KEY_PREFIX", prefix)
    with AgentRouter.from_url(agents=AGENTS, bounds=AgentBounds(eps=0.5)) as router:
        assert router._bounds.eps == 0.5
        other = new_router(server.url)
        follow(other)
        pin(router, "x", AGENTS[1])
        learned(other, 1)
    with AgentRouter.from_url(agents=AGENTS) as router:
        monkeypatch.setenv("WARMPREFIX_SHARE_ORDERS", "false")
        with AgentRouter.from_url(agents=AGENTS) as alone:
            assert isinstance(alone._sharing, NoSharing)
        assert isinstance(router._sharing, RedisOrderSharing)
    monkeypatch.delenv("WARMPREFIX_REDIS_URL")
    monkeypatch.delenv("WARMPREFIX_SHARE_ORDERS")
    with pytest.raises(ValueError, match="url must be given, or WARMPREFIX_REDIS_URL"):
        AgentRouter.from_url(agents=AGENTS)
    with pytest.raises(ValueError, match="eps"):
        AgentRouter.from_url(server.url, AGENTS, bounds=AgentBounds(eps=-1))
    with pytest.raises(ValueError, match="url"):
        AgentRouter.from_url("http://example", AGENTS)


def test_without_the_extra_the_error_names_it() -> None:
    for missing in ("redis", "pydantic_settings"):
        code = f"""
import sys
sys.modules[{missing!r}] = None
from warmprefix import MissingExtraError
from warmprefix_routing import AgentRouter
router = AgentRouter(["a"])
assert router.commit(router.assign(["x"]))
try:
    AgentRouter.from_url("redis://127.0.0.1", ["a"])
except MissingExtraError as error:
    print(error.extra, error.module)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert done.stdout == f"redis {missing}\n"
