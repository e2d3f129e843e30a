"""Workers while Redis is away, and when it is back."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from redis_servers import HOST, Server, free_port, wait_until
from warmprefix.order_sharing import LearnedOrder
from warmprefix.plan import Scope
from warmprefix_redis.order_codec import stream_key

NewWorker = Callable[..., Any]
MakeOrders = Callable[..., list[LearnedOrder]]


def test_redis_is_killed_while_workers_publish(own_server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    one, two = new_worker(own_server), new_worker(own_server)
    for worker in (one, two):
        worker.follow()
    over, number = threading.Event(), 0

    def serve() -> None:
        nonlocal number
        while not over.wait(0.001):
            one.publish(orders(1, first=number))
            number += 1

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        for _ in range(3):
            learned = len(two.names())
            wait_until(lambda: len(two.names()) > learned + 100, "orders arrive")  # noqa: B023
            own_server.kill()
            failed = two.sharing.stats().errors
            wait_until(lambda: two.sharing.stats().errors > failed, "it is noticed")  # noqa: B023
            own_server.start()
    finally:
        over.set()
        serving.join()
    last = orders(1, first=number - 1)[0].keys[0]
    wait_until(lambda: two.names()[-1:] == [last], "the last order arrives")
    names = two.names()
    assert len(set(names)) == len(names), "nothing is learned twice"
    assert names == sorted(names), "nothing out of order"
    stats = one.sharing.stats()
    # The reply to the last batch before a kill may be lost, so what is counted as dropped may have been there.
    assert stats.published <= number <= stats.published + stats.dropped


def test_publish_and_follow_return_while_redis_hangs(
    own_server: Server, new_worker: NewWorker, orders: MakeOrders
) -> None:
    one, two = new_worker(own_server), new_worker(own_server)
    two.follow()
    one.publish(orders(1))
    two.wait_for(orders(1))
    own_server.pause()
    done = threading.Event()

    def use() -> None:
        one.publish(orders(10_000, first=1))
        one.follow(Scope("new", None, None))
        one.sharing.unfollow(Scope("new", None, None))
        done.set()

    # If one of these waited for Redis, it would do so until the server is resumed, which comes after.
    threading.Thread(target=use, daemon=True).start()
    assert done.wait(30)
    assert one.sharing.stats().dropped >= 10_000 - 2 * 4_096
    assert len(one.sharing._queue) <= 4_096
    own_server.resume()
    one.publish(orders(1, first=20_000))
    wait_until(lambda: orders(1, first=20_000)[0].keys[0] in two.names(), "it goes on")


def test_missing_server_is_logged_once(
    new_worker: NewWorker, orders: MakeOrders, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "warmprefix"):
        one = new_worker(f"redis://{HOST}:{free_port()}")
        one.follow()
        one.publish(orders(4_150))
        wait_until(lambda: one.sharing.stats().errors >= 3, "it tries again")
    stats = one.sharing.stats()
    assert stats.published == stats.received == 0
    assert stats.dropped >= 50
    levels = [record.levelno for record in caplog.records]
    assert levels[0] == logging.WARNING
    assert set(levels[1:]) == {logging.DEBUG}


def test_batch_with_unknown_outcome_is_not_resent(
    own_server: Server, new_worker: NewWorker, orders: MakeOrders
) -> None:
    """A server that hangs may still execute commands; orders that come meanwhile wait until it answers."""
    one = new_worker(own_server)
    one.publish_and_wait(orders(1))
    own_server.pause()
    one.publish(orders(1, first=1))
    wait_until(lambda: one.sharing.stats().errors, "it fails")
    one.publish(orders(5, first=2))
    wait_until(lambda: one.sharing.stats().errors >= 2, "it fails again")
    own_server.resume()
    wait_until(lambda: one.sharing.stats().published == 1 + 5, "what waited is sent")
    assert one.sharing.stats().dropped == 1
    two = new_worker(own_server)
    two.follow()
    two.wait_for(orders(7))


def test_a_reader_that_was_away_while_the_stream_was_trimmed(
    own_server: Server, new_worker: NewWorker, orders: MakeOrders, prefix: str, scope: Scope
) -> None:
    two = new_worker(own_server)
    two.follow()
    one = new_worker(own_server)
    one.publish(orders(5))
    two.wait_for(orders(5))
    stalled, go_on = threading.Event(), threading.Event()
    learned: list[bytes] = []

    def learn(some: list[LearnedOrder]) -> None:
        stalled.set()
        go_on.wait(30)
        learned.extend(order.keys[0] for order in some)

    slow = new_worker(own_server)
    slow.sharing.follow(scope, learn)
    assert stalled.wait(30)
    one.publish_and_wait(orders(50, first=5))
    with own_server.client() as client:
        client.xtrim(stream_key(prefix, scope), maxlen=10, approximate=False)
    go_on.set()
    one.publish_and_wait(orders(1, first=100))
    wait_until(lambda: learned[-1:] == [orders(1, first=100)[0].keys[0]], "it goes on behind the gap")
    assert learned == [order.keys[0] for order in [*orders(5), *orders(10, first=45), *orders(1, first=100)]]
    assert slow.sharing.stats().errors == 0


def test_server_with_empty_data_and_a_late_clock(
    own_server: Server, new_worker: NewWorker, orders: MakeOrders, prefix: str, scope: Scope
) -> None:
    """A reader does not wait until the entries' numbers are where they were."""
    one, two = new_worker(own_server), new_worker(own_server)
    key = stream_key(prefix, scope)
    with own_server.client() as client:
        later = (int(time.time()) + 3_600) * 1_000
        client.xadd(key, {"o": b""}, id=f"{later}-0")
        two.follow()
        wait_until(lambda: two.sharing.stats().malformed == 1, "it has read that far")
        client.delete(key)
    two.publish_and_wait(orders(1))
    one.publish(orders(3, first=10))
    two.wait_for(orders(3, first=10))


def test_server_out_of_memory(own_server: Server, new_worker: NewWorker, orders: MakeOrders) -> None:
    one, two = new_worker(own_server), new_worker(own_server)
    two.follow()
    one.publish(orders(5))
    two.wait_for(orders(5))
    with own_server.client() as client:
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("maxmemory", "1")
        one.publish(orders(5, first=5))
        wait_until(lambda: one.sharing.stats().dropped == 5, "they are dropped")
        client.config_set("maxmemory", "0")
    one.publish(orders(5, first=10))
    two.wait_for([*orders(5), *orders(5, first=10)])


def test_full_queue_drops_the_oldest(new_worker: NewWorker, orders: MakeOrders) -> None:
    one = new_worker(f"redis://{HOST}:{free_port()}")
    one.publish(orders(1))
    wait_until(lambda: one.sharing.stats().errors, "it is backing off")
    one.publish(sent := orders(5_000, first=1))
    assert [order.keys[0] for _, order in one.sharing._queue] == [order.keys[0] for order in sent[-4_096:]]
    assert one.sharing.stats().dropped == 1 + 5_000 - 4_096
