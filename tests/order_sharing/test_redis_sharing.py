"""Workers that share by way of a real server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import redis

from redis_servers import Cluster, SentinelSetup, Server, wait_until
from warmprefix.order_sharing import LearnedOrder, NoSharing, OrderSharing, SharingStats
from warmprefix.plan import Scope
from warmprefix_redis import order_sharing
from warmprefix_redis.order_codec import encode, stream_key
from warmprefix_redis.order_sharing import RedisOrderSharing

NewWorker = Callable[..., Any]
MakeOrders = Callable[..., list[LearnedOrder]]


def test_workers_learn_orders_of_others_only(server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    one, two, three = new_worker(server), new_worker(server), new_worker(server)
    for worker in (one, two, three):
        worker.follow()
    ones, twos = orders(40), orders(40, first=100)
    one.publish(ones)
    two.wait_for(ones)
    two.publish(twos)
    one.wait_for(twos)
    three.wait_for(ones + twos)
    learned = three.learned[Scope("acme", "model", None)][0]
    assert (learned.keys, list(learned.tokens), list(learned.ranks)) == tuple(ones[0])
    assert one.sharing.stats() == SharingStats(published=40, received=40, lag=one.sharing.stats().lag)
    assert one.sharing.stats().lag is not None
    assert two.names() == [order.keys[0] for order in ones]


def test_late_worker_learns_earlier_orders(
    server: Server, new_worker: NewWorker, orders: MakeOrders, scope: Scope
) -> None:
    one = new_worker(server)
    one.follow()
    wait_until(lambda: one.sharing.has_caught_up(scope), "there is nothing to catch up with")
    one.publish_and_wait(before := orders(300))
    late = new_worker(server)
    assert not late.sharing.has_caught_up(scope)
    late.follow()
    wait_until(lambda: late.sharing.has_caught_up(scope), "it has caught up")
    late.wait_for(before)
    one.publish(after := orders(5, first=1_000))
    late.wait_for(before + after)


def test_only_the_latest_orders_are_kept(
    server: Server,
    new_worker: NewWorker,
    orders: MakeOrders,
    prefix: str,
    scope: Scope,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(order_sharing, "_KEPT_ORDERS", 100)
    one = new_worker(server)
    with server.client() as client:
        for number in range(10):
            one.publish_and_wait(orders(50, blocks=20, first=50 * number))
            # Whole nodes of the stream are dropped, of 4 kB or 100 entries.
            assert client.xlen(stream_key(prefix, scope)) <= 200
    late = new_worker(server)
    late.follow()
    wait_until(lambda: late.sharing.has_caught_up(scope), "it has caught up")
    assert 100 <= len(late.learned[scope]) <= 200
    assert late.names()[-1] == orders(1, first=499)[0].keys[0]


def test_stream_of_an_unused_scope_expires(
    server: Server, new_worker: NewWorker, orders: MakeOrders, prefix: str, scope: Scope
) -> None:
    one = new_worker(server)
    key = stream_key(prefix, scope)
    with server.client() as client:
        one.publish_and_wait(orders(1))
        assert 86_300_000 < client.pttl(key) <= 86_400_000
        client.pexpire(key, 50_000)
        one.publish_and_wait(orders(1))
        assert client.pttl(key) > 86_300_000


def test_scopes_are_separate_whatever_their_names(server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    names = [None, "", "a", "a}", "{a}:orders", "*", "a\0b", "\ud800", "ä" * 500, "a\r\nDEL b"]
    scopes = [Scope(tenant, model, None) for tenant in names for model in (None, "", "a")]
    one, two = new_worker(server), new_worker(server)
    for number, scope in enumerate(scopes):
        two.follow(scope)
        one.publish(orders(3, first=10 * number), scope)
    for number, scope in enumerate(scopes):
        two.wait_for(orders(3, first=10 * number), scope)


def test_only_followed_scopes_are_read(server: Server, new_worker: NewWorker, orders: MakeOrders, scope: Scope) -> None:
    one, two = new_worker(server), new_worker(server)
    other = Scope("another", "model", None)
    with server.client() as client:
        asked = Asked(client)
        two.follow()
        one.publish(orders(5), other)
        one.publish(orders(5))
        two.wait_for(orders(5))
        one.publish_and_wait(orders(5, first=5), other)
        two.sharing.close()
        keys = {key for command, key in asked.of(client) if command == "XRANGE"}
    assert keys == {stream_key(two.sharing._prefix, scope)}


class Asked:
    """Return the commands that a server received, with their first argument, from its slow log."""

    def __init__(self, client: redis.Redis) -> None:
        client.config_set("slowlog-max-len", 10_000)
        client.config_set("slowlog-log-slower-than", 0)
        client.slowlog_reset()

    def of(self, client: redis.Redis) -> set[tuple[str, bytes]]:
        entries = [entry["command"].split(b" ") for entry in client.slowlog_get(10_000)]
        client.config_set("slowlog-log-slower-than", -1)
        return {(words[0].decode().upper(), words[1] if len(words) > 1 else b"") for words in entries}


def test_unfollow_ends_learning(server: Server, new_worker: NewWorker, orders: MakeOrders, scope: Scope) -> None:
    one, two, witness = new_worker(server), new_worker(server), new_worker(server)
    for worker in (two, witness):
        worker.follow()
    one.publish(first := orders(5))
    two.wait_for(first)
    two.sharing.unfollow(scope)
    two.sharing.unfollow(Scope("never", "followed", None))
    one.publish(more := orders(5, first=5))
    witness.wait_for(first + more)
    two.publish_and_wait(orders(1, first=99))  # a whole round of its thread
    assert two.names() == [order.keys[0] for order in first]


def test_following_again_learns_everything_once(
    server: Server, new_worker: NewWorker, orders: MakeOrders, scope: Scope
) -> None:
    """Also what it served itself, for it was to forget that."""
    one, two = new_worker(server), new_worker(server)
    two.follow()
    one.publish_and_wait(ones := orders(5))
    two.wait_for(ones)
    two.publish_and_wait(twos := orders(5, first=5))
    two.sharing.unfollow(scope)
    two.follow()
    two.wait_for(ones + twos)
    two.publish_and_wait(orders(5, first=10))
    one.publish_and_wait(more := orders(5, first=15))
    two.wait_for(ones + twos + more)


def test_repeated_entries_are_learned_twice(
    server: Server, new_worker: NewWorker, orders: MakeOrders, prefix: str, scope: Scope
) -> None:
    two = new_worker(server)
    two.follow()
    with server.client() as client:
        for _ in range(2):
            for order in orders(2):
                client.xadd(stream_key(prefix, scope), {"o": encode(b"worker 1", order)})
    two.wait_for([*orders(2), *orders(2)])
    assert two.sharing.stats().errors == 0


@pytest.mark.parametrize("there_before", [False, True])
def test_foreign_entries_are_skipped_and_counted(
    server: Server, new_worker: NewWorker, orders: MakeOrders, prefix: str, scope: Scope, there_before: bool
) -> None:
    one, two = new_worker(server), new_worker(server)
    key = stream_key(prefix, scope)
    good = encode(b"worker 1", orders(1)[0])
    alien: list[Any] = [
        {"o": b""},
        {"o": b"\2" + good[1:]},
        {"o": good[:-1]},
        {"o": bytes(1_000)},
        {"other": b"1", "fields": b"2"},
        {"o": b"\xff" * 100_000},
    ]
    two.follow()
    if there_before:
        two.sharing.unfollow(scope)
    else:
        one.publish(orders(1))
        two.wait_for(orders(1))
    with server.client() as client:
        for fields in alien:
            client.xadd(key, fields)
    if there_before:
        one.publish_and_wait(orders(1))
        two.follow()
    one.publish(orders(1, first=1))
    two.wait_for(orders(2))
    stats = two.sharing.stats()
    assert (stats.malformed, stats.errors) == (len(alien), 0)


def test_key_of_another_type_affects_only_its_scope(
    server: Server, new_worker: NewWorker, orders: MakeOrders, prefix: str, scope: Scope
) -> None:
    one, two = new_worker(server), new_worker(server)
    taken = Scope("taken", None, None)
    with server.client() as client:
        client.set(stream_key(prefix, taken), "something else")
        for worker in (one, two):
            worker.follow(taken)
            worker.follow()
        one.publish(orders(3), taken)
        one.publish(orders(3))
        two.wait_for(orders(3))
        wait_until(lambda: one.sharing.stats().dropped == 3, "what can't be sent is dropped")
        assert one.sharing.stats().errors > 0
        assert client.get(stream_key(prefix, taken)) == b"something else"
        client.delete(stream_key(prefix, taken))
    one.publish(orders(3, first=3), taken)
    two.wait_for(orders(3, first=3), taken)


def test_invalid_orders_are_dropped(server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    one, two = new_worker(server), new_worker(server)
    two.follow()
    one.publish([LearnedOrder([b"k" * 16] * 2, [1, 1], [0, 1]), LearnedOrder([b"k" * 16], [1 << 60], [0])])
    one.publish([LearnedOrder([b"short"], [1], [0]), LearnedOrder(["text"], [1], [0])])  # type: ignore[list-item]
    one.publish(orders(1))
    two.wait_for(orders(1))
    assert one.sharing.stats() == SharingStats(published=1, dropped=4)


def test_learning_continues_after_an_exception(
    server: Server, new_worker: NewWorker, orders: MakeOrders, scope: Scope
) -> None:
    one, two = new_worker(server), new_worker(server)
    learned: list[bytes] = []

    def learn(some: list[LearnedOrder]) -> None:
        learned.extend(order.keys[0] for order in some)
        raise RuntimeError("planted")

    two.sharing.follow(scope, learn)
    for number in range(3):
        one.publish(orders(1, first=number))
        wait_until(lambda: len(learned) > number, "it is learned")  # noqa: B023
    wait_until(lambda: two.sharing.stats().errors == 3, "it is counted")
    assert two.sharing.stats().received == 0


def test_user_with_minimal_permissions(server: Server, new_worker: NewWorker, orders: MakeOrders, prefix: str) -> None:
    with server.client() as client:
        allowed = "resetchannels -@all +xadd +pexpire +xrange +ping"
        client.execute_command("ACL SETUSER", "sharer", "on", ">secret", f"~{prefix}:*:orders", *allowed.split())
    url = server.url.replace("redis://", "redis://sharer:secret@")
    one, two = new_worker(url), new_worker(url)
    one.publish_and_wait(orders(70))
    two.follow()
    two.wait_for(orders(70))
    one.publish(orders(5, first=70))
    two.wait_for(orders(75))
    assert one.sharing.stats().errors == two.sharing.stats().errors == 0


@pytest.fixture(scope="module")
def cluster() -> Any:
    with Cluster() as running:
        yield running


def test_in_a_cluster(cluster: Cluster, new_worker: NewWorker, orders: MakeOrders) -> None:
    scopes = [Scope(f"tenant {number}", None, None) for number in range(12)]
    one, two = new_worker(cluster.url), new_worker(cluster.url)
    one.publish(orders(70), scopes[0])
    for number, scope in enumerate(scopes):
        two.follow(scope)
        one.publish(orders(3, first=100 + number), scope)
    two.wait_for([*orders(70), *orders(3, first=100)], scopes[0])
    for number, scope in enumerate(scopes[1:], 1):
        two.wait_for(orders(3, first=100 + number), scope)
    owners = {cluster.owner(stream_key(one.sharing._prefix, scope)).port for scope in scopes}
    assert len(owners) == 3
    assert one.sharing.stats().errors == two.sharing.stats().errors == 0


def test_sentinels_make_another_server_the_master(new_worker: NewWorker, orders: MakeOrders) -> None:
    with SentinelSetup() as setup:
        one, two = new_worker(setup.url), new_worker(setup.url)
        for worker in (one, two):
            worker.follow()
        one.publish(orders(5))
        two.wait_for(orders(5))
        first = setup.master
        first.kill()
        setup.wait_for_failover(first)
        learned_before = len(two.learned[Scope("acme", "model", None)])
        number = 100

        def arrives() -> bool:
            nonlocal number
            number += 1
            one.publish(orders(1, first=number))
            return len(two.learned[Scope("acme", "model", None)]) > learned_before

        wait_until(arrives, "what is published arrives again")


def test_arguments_are_checked() -> None:
    with pytest.raises(ValueError, match="url must begin with"):
        RedisOrderSharing("http://localhost")
    with pytest.raises(ValueError, match="prefix must not"):
        RedisOrderSharing("redis://localhost", prefix="{a}")


def test_no_sharing_implements_the_protocol(scope: Scope, orders: MakeOrders) -> None:
    off = NoSharing()
    assert isinstance(off, OrderSharing)
    off.follow(scope, list.append)  # type: ignore[arg-type]
    off.publish(scope, orders(1)[0])
    off.unfollow(scope)
    off.close()
    assert off.stats() == SharingStats()
