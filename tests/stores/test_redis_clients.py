"""Whose clients a store uses, and what becomes of them."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import redis
import redis.asyncio

from redis_servers import Cluster, SentinelSetup, Server, wait_until
from warmprefix.stores import Abandon, Commit, Conversation, Forget, Prepare, PreparedTurn, SeenBlock
from warmprefix_redis import RedisSeenStore
from warmprefix_redis.breaker import CircuitBreaker

CHAT = Conversation("acme", "chat")
BLOCK = SeenBlock(b"A" * 16, "Doc_A", 1, 100)
PROPOSED = {BLOCK.fingerprint: BLOCK.label}
OpenStore = Callable[..., RedisSeenStore]


def serve(store: RedisSeenStore, plan: str) -> bool:
    store.execute(Prepare(CHAT, plan, PROPOSED))
    return store.execute(Commit(CHAT, plan, [BLOCK]))


async def aserve(store: RedisSeenStore, plan: str) -> bool:
    await store.aexecute(Prepare(CHAT, plan, PROPOSED))
    return await store.aexecute(Commit(CHAT, plan, [BLOCK]))


async def test_execute_and_aexecute_share_state(open_store: OpenStore) -> None:
    store = open_store()
    assert await aserve(store, "p1")
    assert serve(store, "p2")
    assert (await store.ainspect(CHAT)) == store.inspect(CHAT)
    assert (await store.aexecute(Prepare(CHAT, "p3", PROPOSED))) == store.execute(Prepare(CHAT, "p3", PROPOSED))
    assert await store.aexecute(Abandon(CHAT, "p3"))
    assert not store.execute(Abandon(CHAT, "p3"))
    await store.aexecute(Forget(CHAT))
    assert store.execute(Prepare(CHAT, "p4", PROPOSED)).seen == {}
    store.clear()
    assert store.inspect(CHAT) is None
    await store.aclose()


def test_each_event_loop_has_its_own_connections(open_store: OpenStore, admin: redis.Redis) -> None:
    store = open_store()

    async def in_a_loop(plan: str) -> bool:
        recorded = await aserve(store, plan)
        await store.aclose()
        return recorded

    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            before = len(admin.client_list())
            assert all(pool.map(lambda n: asyncio.run(in_a_loop(str(n))) in (True, False), range(4)))
            wait_until(lambda: len(admin.client_list()) <= before, "the loops' connections are closed")  # noqa: B023
    assert asyncio.run(in_a_loop("last"))


def test_a_given_client_is_left_open(admin: redis.Redis) -> None:
    store = RedisSeenStore(admin)
    serve(store, "p1")
    store.close()
    assert serve(store, "p2")


def test_sync_client_alone_refuses_aexecute(admin: redis.Redis) -> None:
    store = RedisSeenStore(admin)
    serve(store, "p1")
    with pytest.raises(TypeError, match=r"^this store was given a client for threads"):
        asyncio.run(store.aexecute(Prepare(CHAT, "p2", PROPOSED)))


def test_decoding_client_is_refused(server: Server) -> None:
    with server.client(decode_responses=True) as client, pytest.raises(ValueError, match=r"decode_responses=False"):
        RedisSeenStore(client)


@pytest.mark.parametrize("target", [None, 6379, b"redis://localhost", redis.asyncio.Redis()])
def test_invalid_target_is_refused(target: object) -> None:
    with pytest.raises(TypeError, match=r"^target must be a URL, or a Redis or RedisCluster"):
        RedisSeenStore(target)


def test_resp3_clients_work(server: Server, admin: redis.Redis) -> None:
    with server.client(protocol=3) as client:
        store = RedisSeenStore(client)
        serve(store, "p1")
        assert store.execute(Prepare(CHAT, "p2", PROPOSED)).seen == {BLOCK.fingerprint: BLOCK}
        assert store.inspect(CHAT) is not None


def test_threads_share_a_store(open_store: OpenStore) -> None:
    store = open_store()
    barrier = threading.Barrier(8)

    def work(worker: int) -> None:
        chat = Conversation("acme", f"chat-{worker}")
        barrier.wait()
        for turn in range(50):
            assert store.execute(Prepare(chat, f"p{turn}", PROPOSED)).turn == turn
            assert store.execute(Commit(chat, f"p{turn}", [BLOCK]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))


async def test_cancelled_call_leaves_connection_usable(open_store: OpenStore) -> None:
    """The next answer is that to the next question."""
    store = open_store()
    random_delay = random.Random(0)
    for number in range(200):
        chat = Conversation("acme", f"chat-{number}")
        task = asyncio.create_task(store.aexecute(Prepare(chat, "p1", PROPOSED)))
        await asyncio.sleep(random_delay.random() * 0.001)
        task.cancel()
        await asyncio.wait([task])
        fingerprint = number.to_bytes(16, "big")
        await store.aexecute(Prepare(CHAT, f"p{number}", {}))
        assert await store.aexecute(Commit(CHAT, f"p{number}", [SeenBlock(fingerprint, f"Doc_{number}", 1, number)]))
        seen = (await store.aexecute(Prepare(CHAT, "look", {fingerprint: f"Doc_{number}"}))).seen
        assert seen[fingerprint].tokens == number
        await store.aexecute(Abandon(CHAT, "look"))
    await store.aclose()


# -- Cluster and Sentinel ------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(running: Callable[[str], tuple[Cluster, str]]) -> Cluster:
    return running("cluster")[0]


def test_cluster_client_works(cluster: Cluster) -> None:
    with cluster.client() as client:
        store = RedisSeenStore(client, prefix="clients")
        assert serve(store, "p1")
        for number in range(20):
            store.execute(Prepare(Conversation(None, str(number)), "p1", {}))
        store.clear()
        assert store.inspect(CHAT) is None
        assert not list(client.scan_iter(match="clients:*"))


def test_scripts_missing_on_some_cluster_nodes_are_resent(cluster: Cluster) -> None:
    store = RedisSeenStore(cluster.url, prefix="scripts", timeout=10)
    for round_ in range(2):
        for node in cluster.nodes:
            with node.client() as client:
                client.script_flush()
        for number in range(20):
            assert store.execute(Prepare(Conversation(None, str(number)), f"p{round_}", {})).turn == 0
    store.close()


async def test_failover_leads_to_the_new_master(flavour: str) -> None:
    with SentinelSetup(flavour) as sentinels:
        store = RedisSeenStore(sentinels.url, timeout=1)
        store.breaker = CircuitBreaker(0, 0)
        assert serve(store, "p1")
        assert await aserve(store, "p2")
        master = sentinels.master
        master.wait_for_replicas()
        master.kill()
        sentinels.wait_for_failover(master)

        def serves() -> bool:
            try:
                return store.execute(Prepare(CHAT, "p3", PROPOSED)).seen == {}
            except redis.RedisError:
                return False

        wait_until(serves, "the store has found the new master, whose copy it does not trust")
        assert serve(store, "p4")
        awaited: PreparedTurn | None = None
        while awaited is None:  # this client notices only on use that its connection is gone
            with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                awaited = await store.aexecute(Prepare(CHAT, "p5", PROPOSED))
        assert awaited.seen == {BLOCK.fingerprint: BLOCK._replace(turn=3)}
        await store.aclose()
