"""The sockets of a feed: the addresses of engines and their ranks, and the events received from them."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from contextlib import suppress

from warmprefix.errors import MissingExtraError
from warmprefix_kv_events.kv_index import KvIndex
from warmprefix_kv_events.subscription import Endpoint, FeedCounts, KvSubscription, SubscriptionOptions

try:
    import zmq
except ImportError as error:
    raise MissingExtraError("events", "pyzmq") from error

__all__ = ["Receiver", "endpoints_of"]


def endpoints_of(
    publish: str | Sequence[str], replay: str | Sequence[str | None] | None, ranks: int = 1
) -> tuple[Endpoint, ...]:
    """Return the addresses of all publishers: each engine's, and those of its further ranks on the ports above.

    >>> [endpoint.publish for endpoint in endpoints_of(["tcp://a:5557", "tcp://b:5557"], None, ranks=2)]
    ['tcp://a:5557', 'tcp://a:5558', 'tcp://b:5557', 'tcp://b:5558']

    Raises:
        ValueError: An address is missing or not usable, or the number of `replay` addresses is not that of engines.
    """
    engines = [publish] if isinstance(publish, str) else list(publish)
    if not engines:
        raise ValueError(f"endpoint must have at least one address, got {publish!r}")
    replays = [replay] * len(engines) if replay is None else [replay] if isinstance(replay, str) else list(replay)
    if len(replays) != len(engines):
        raise ValueError(f"replay must have one address per endpoint, got {len(replays)} for {len(engines)}")
    if ranks < 1:
        raise ValueError(f"ranks must be 1 or more, got {ranks}")
    return tuple(
        Endpoint(_of_rank("endpoint", address, rank), None if answer is None else _of_rank("replay", answer, rank))
        for address, answer in zip(engines, replays, strict=True)
        for rank in range(ranks)
    )


def _of_rank(name: str, address: str, rank: int) -> str:
    scheme, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if scheme == "ipc" and place and not rank:
        return address
    if scheme == "tcp" and host and port.isdecimal() and int(port) + rank < 65_536:
        return f"tcp://{host}:{int(port) + rank}"
    allowed = "tcp://host:port" if rank else "tcp://host:port or ipc://path"
    raise ValueError(f"{name} must be {allowed}, got {address!r}" + (f" for rank {rank}" if rank else ""))


class Receiver:
    """Applies the events of all publishers to one index. Belongs to the thread or task that receives."""

    def __init__(self, endpoints: Sequence[Endpoint], options: SubscriptionOptions, index: KvIndex) -> None:
        self._endpoints = endpoints
        self._options = options
        self.index = index
        self.counts = FeedCounts()
        self.complete = (False, False)
        """True if the state of all engines is complete, for prompts without and with a salt. Any thread may read it."""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._subscriptions: list[KvSubscription] = []
        self._woken: socket.socket | None = None
        self._waker: socket.socket | None = None

    @property
    def is_current(self) -> bool:
        """True if every engine is connected and has reported at least once."""
        return bool(self._subscriptions) and all(subscription.is_current for subscription in self._subscriptions)

    @property
    def replaying(self) -> bool:
        """True during a replay of any publisher."""
        return any(subscription.replaying for subscription in self._subscriptions)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        waker = self._waker
        if waker is not None:
            with suppress(OSError):  # a full buffer wakes it anyway; or the socket is closed
                waker.send(b"\0")

    def wait(self, seconds: float) -> None:
        """Wait for a message or a deadline, at most this long."""
        woken = self._connect()
        now = time.monotonic()
        poller = zmq.Poller()
        poller.register(woken, zmq.POLLIN)
        for subscription in self._subscriptions:
            poller.register(subscription.socket, zmq.POLLIN)
            poller.register(subscription.monitor, zmq.POLLIN)
            due = subscription.due()
            if due is not None:
                seconds = min(seconds, due - now)
        poller.poll(math.ceil(max(seconds, 0.0) * 1_000))
        with suppress(BlockingIOError):
            while woken.recv(4_096):
                pass

    def receive(self, max_messages: int) -> bool:
        """Apply waiting messages, at most this many per subscription; return True if more may wait."""
        more = [subscription.receive(max_messages) for subscription in self._subscriptions]  # a list: no short circuit
        return any(more)

    def update_complete(self, is_current: bool) -> None:
        """Set `complete`, after all changes were reported."""
        certain = is_current and not self.replaying
        self.complete = (certain and self.index.certain(salted=False), certain and self.index.certain(salted=True))

    def reset(self, index: KvIndex) -> None:
        """Disconnect, and start over with an empty index."""
        self.close()
        self.index = index

    def _connect(self) -> socket.socket:
        """Create the sockets if there are none; return the one that `wake` writes to."""
        if self._woken is None:
            self._woken, self._waker = socket.socketpair()
            self._woken.setblocking(False)
            self._waker.setblocking(False)
            self._context = zmq.Context()
            for endpoint in self._endpoints:
                subscription = KvSubscription(self._context, endpoint, self.index, self.counts, self._options)
                self._subscriptions.append(subscription)
        return self._woken

    def close(self) -> None:
        """Close all sockets; the next `wait` creates them again."""
        self.complete = (False, False)
        while self._subscriptions:
            self._subscriptions.pop().close()
        for end in (self._waker, self._woken):
            if end is not None:
                end.close()
        self._waker = self._woken = None
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)  # `term` would wait forever for a socket that is still open
