"""Real servers, and workers whose learning can be watched."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest

from redis_servers import Server, binaries, wait_until
from warmprefix.order_sharing import LearnedOrder
from warmprefix.plan import Scope
from warmprefix_redis.order_sharing import RedisOrderSharing

SCOPE = Scope("acme", "model", None)


class Worker:
    """A sharing, and the orders that it delivered per scope."""

    def __init__(self, sharing: RedisOrderSharing) -> None:
        self.sharing = sharing
        self.learned: dict[Scope, list[LearnedOrder]] = {}

    def follow(self, scope: Scope = SCOPE) -> None:
        self.learned[scope] = []
        self.sharing.follow(scope, self.learned[scope].extend)

    def publish(self, orders: Sequence[LearnedOrder], scope: Scope = SCOPE) -> None:
        for order in orders:
            self.sharing.publish(scope, order)

    def publish_and_wait(self, orders: Sequence[LearnedOrder], scope: Scope = SCOPE) -> None:
        before = self.sharing.stats().published
        self.publish(orders, scope)
        wait_until(lambda: self.sharing.stats().published == before + len(orders), "all orders are sent")

    def wait_for(self, orders: Sequence[LearnedOrder], scope: Scope = SCOPE) -> None:
        """Wait until as many orders were learned, and check that they are these, in this order."""
        wait_until(lambda: len(self.learned[scope]) >= len(orders), f"{len(orders)} orders are learned")
        assert self.names(scope) == [order.keys[0] for order in orders]

    def names(self, scope: Scope = SCOPE) -> list[bytes]:
        return [order.keys[0] for order in self.learned[scope]]


def make_orders(count: int, blocks: int = 3, first: int = 0) -> list[LearnedOrder]:
    """Make orders of different blocks, each identified by its first."""
    return [
        LearnedOrder(
            [bytes([block]) + number.to_bytes(15, "big") for block in range(blocks)],
            list(range(100, 100 + blocks)),
            list(range(blocks)),
        )
        for number in range(first, first + count)
    ]


@pytest.fixture(scope="session", params=sorted(binaries()))
def server(request: pytest.FixtureRequest) -> Iterator[Server]:
    """Return a shared server of each flavour; tests use separate prefixes."""
    with Server(request.param) as running:
        yield running


@pytest.fixture
def own_server() -> Iterator[Server]:
    """Return a server that may be killed."""
    with Server() as running:
        yield running


_prefixes = map("test-{}".format, itertools.count())


@pytest.fixture
def prefix() -> str:
    return next(_prefixes)


@pytest.fixture
def new_worker(prefix: str) -> Iterator[Callable[..., Worker]]:
    """Return a function that makes workers; closes them, and checks that their threads end."""
    before = set(threading.enumerate())
    made: list[RedisOrderSharing] = []

    def make(server: Server | str) -> Worker:
        made.append(RedisOrderSharing(server.url if isinstance(server, Server) else server, prefix=prefix))
        return Worker(made[-1])

    yield make
    for sharing in made:
        sharing.close()
    wait_until(lambda: set(threading.enumerate()) <= before, "no thread is left")


@pytest.fixture
def scope() -> Scope:
    return SCOPE


@pytest.fixture
def orders() -> Callable[..., list[LearnedOrder]]:
    return make_orders
