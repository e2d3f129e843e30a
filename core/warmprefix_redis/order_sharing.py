"""Sharing of served orders through Redis Streams: one per scope, which every worker appends to and reads."""

from __future__ import annotations

import atexit
import logging
import os
import random
import time
import weakref
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.order_sharing import Learn, LearnedOrder, SharingStats
from warmprefix.plan import Scope
from warmprefix.ticker import Ticker
from warmprefix_redis.connections import connect, parse_redis_url
from warmprefix_redis.order_codec import SENDER_BYTES, decode, encode, stream_key
from warmprefix_redis.record import check_prefix

__all__ = ["RedisOrderSharing"]

_log = logging.getLogger("warmprefix")

_FIELD = b"o"
_KEPT_ORDERS = 4_000
"""Approximate number of latest orders that a stream keeps for workers that are new to its scope."""
_TTL_MS = 86_400_000
"""After its last order a stream is dropped."""
_MAX_QUEUE = 4_096
"""Orders that wait to be sent; beyond it the oldest is dropped."""
_MAX_SENT, _MAX_READ, _MAX_STREAMS = 1_024, 256, 256
"""Per round."""
_SEND_SECONDS = 0.01
"""Least time between two rounds that send."""
_BUSY_SECONDS, _LOOK_SECONDS, _IDLE_LOOK_SECONDS = 10.0, 0.02, 1.0
"""How long a scope counts as busy after this worker served it, and the time between two looks at a scope."""
_TIMEOUT_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 2.0
"""Between a failure and the next attempt."""
_SLICE = 16
_YIELD_SECONDS = 0.0005
"""Between two slices of orders, to let threads that serve requests run first."""


class RedisOrderSharing:
    """An `OrderSharing` through Redis or Valkey, 6.2 or newer: standalone, Sentinel or Cluster.

    One daemon thread does all of the work, in rounds of one round trip: it appends published orders, and reads what
    other workers appended to the streams of the followed scopes only. A round starts when something is published, and
    to look for new entries: every 20 ms, and once per second where this worker served nothing for ten seconds.

    When Redis fails or hangs, at most 4,096 orders wait for it. The thread tries again ever less often, down to every
    two seconds, and continues where it was. An order is not sent twice, even if it is unknown whether it arrived.

    In Redis a stream takes about 22 bytes per block of the last 4,000 orders, and expires a day after the last one. Its
    key is a digest; its entries hold fingerprints, token counts and ranks. Commands: XADD, PEXPIRE, XRANGE, and PING
    after a failure; XREVRANGE with `newest_first`. Labels are not shared: a label derived from the block is the same
    everywhere, and any other label only matters to the prompts of the worker that gave it.

    A forked process is another worker. While one node of a Cluster does not answer, nothing is shared through the other
    nodes either.
    """

    def __init__(self, url: str, *, prefix: str = "wp", newest_first: bool = False) -> None:
        """Check the arguments; connecting, and the thread, start with the first `publish` or `follow`.

        Args:
            url: A URL as for `RedisSeenStore`.
            prefix: Beginning of all keys.
            newest_first: Pass the latest orders of a scope to `learn` in its first call, which comes even if there are
                none: 256 of one scope, 16 or more of each where several are new. If there are more, all kept orders
                follow from the oldest on, these among them.

        Raises:
            ValueError: The prefix is empty or has braces, or the URL cannot be used.
        """
        self._target = parse_redis_url(url)
        self._prefix = check_prefix(prefix)
        self._newest_first = newest_first
        self._streams: dict[Scope, _Stream] = {}
        self._closed = False
        self._counts: Counter[str] = Counter()
        self._lag: float | None = None
        # Guards the queue, the streams and the counts. Held for microseconds, never while waiting. Re-entrant, because
        # a signal's handler may publish in the middle of any call.
        self._lock = fork_safe_lock()
        in_each_process(self._start_process)
        _sharings.add(self)

    def _start_process(self) -> None:
        """Set what each process has of its own."""
        self._sender = os.urandom(SENDER_BYTES)
        for stream in self._streams.values():
            stream.sender = self._sender
        self._queue: deque[tuple[Scope, LearnedOrder]] = deque()
        self._failures = 0
        self._next_send = self._retry_at = 0.0
        self._server_offset: float | None = None
        """Seconds from this clock to the server's, which numbers the entries."""
        self._clients: list[Any] = []
        self._ticker = Ticker(self._tick, partial(_close_all, self._clients), "warmprefix-sharing")

    # -- for the planner -----------------------------------------------------------------------------------------

    def publish(self, scope: Scope, order: LearnedOrder) -> None:
        """Send an order to the other workers soon. O(1); the order must not change any more."""
        with self._lock:
            if self._closed:
                self._counts["dropped"] += 1
                return
            if len(self._queue) >= _MAX_QUEUE:
                self._queue.popleft()
                self._counts["dropped"] += 1
            self._queue.append((scope, order))
            is_first = len(self._queue) == 1
        self._run(is_first)

    def follow(self, scope: Scope, learn: Learn) -> None:
        """Pass the orders that others serve in this scope to `learn`, starting with the latest earlier ones.

        Earlier orders of this worker are among those, because a scope that is followed again has forgotten them.
        """
        now = time.monotonic()
        with self._lock:
            if self._closed:
                return
            key = stream_key(self._prefix, scope)
            self._streams[scope] = _Stream(
                key, learn, os.urandom(SENDER_BYTES), now, now + _BUSY_SECONDS, self._newest_first
            )
        self._run(hurry=True)

    def unfollow(self, scope: Scope) -> None:
        """Stop calling `learn` for a scope; a call in progress may still finish."""
        with self._lock:
            self._streams.pop(scope, None)

    def has_caught_up(self, scope: Scope) -> bool:
        """Return whether all orders from before `follow` are learned; False for a scope that is not followed."""
        stream = self._streams.get(scope)
        return stream is not None and stream.has_caught_up

    def close(self, timeout: float = 1.0) -> None:
        """Send queued orders and end the thread; after `timeout` seconds it is left to end by itself."""
        with self._lock:
            self._closed = True
            self._streams.clear()
        self._ticker.stop(timeout)

    def stats(self) -> SharingStats:
        """Return counts since the start."""
        with self._lock:
            return SharingStats(**self._counts, lag=self._lag)

    def _run(self, hurry: bool) -> None:
        try:
            self._ticker.start()
        except RuntimeError as error:  # no more threads, or the interpreter is about to exit
            self._failed("no thread", error)
        if hurry:
            self._ticker.wake()

    # -- the thread ----------------------------------------------------------------------------------------------

    def _tick(self) -> float:
        """Make one round, and return the seconds until the next."""
        now = time.monotonic()
        if now >= self._retry_at or self._closed:
            try:
                self._exchange(now)
                self._failures = 0
            except Exception as error:
                self._failures += 1
                pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures - 1, 10), _MAX_PAUSE_SECONDS)
                self._retry_at = time.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311
                self._failed("redis", error)
        with self._lock:
            due = [stream.due_at for stream in self._streams.values()]
            due += [self._next_send] if self._queue else []
        now = time.monotonic()
        return max(min([*due, now + _IDLE_LOOK_SECONDS]), self._retry_at) - now

    def _failed(self, part: str, error: object) -> None:
        """Count and log a failure, after which workers learn less from each other."""
        self._count("errors")
        # Logged as text: a handler that keeps the exception would keep this object alive, and with it the thread.
        level = logging.WARNING if self._counts["errors"] == 1 else logging.DEBUG
        _log.log(level, "sharing of learned orders failed: %s: %s: %s", part, type(error).__name__, str(error))

    def _count(self, name: str, count: int = 1) -> None:
        with self._lock:
            self._counts[name] += count

    # -- sending and reading -------------------------------------------------------------------------------------

    def _exchange(self, now: float) -> None:
        """Append queued orders and read due streams in one round trip; then learn what was read."""
        if self._failures:  # send no orders before the server answers again
            self._client().ping()
        outgoing = self._take(now) if now >= self._next_send or self._closed else []
        with self._lock:
            due = [(scope, stream) for scope, stream in self._streams.items() if stream.due_at <= now]
        due = sorted(due, key=lambda each: each[1].due_at)[:_MAX_STREAMS]
        if not (outgoing or due):
            return
        count = max(_MAX_READ // max(len(due), 1), 1)
        unread = sum(stream.is_unread for _, stream in due)
        newest = max(_MAX_READ // max(unread, 1), _SLICE)
        pipeline = self._client().pipeline(transaction=False)
        for key, _, entry in outgoing:
            pipeline.xadd(key, {_FIELD: entry}, maxlen=_KEPT_ORDERS, approximate=True)
        for _, stream in due:
            if stream.is_unread:
                pipeline.xrevrange(stream.key, count=newest)
            else:
                pipeline.xrange(stream.key, b"(" + stream.position, "+", count)
        for key in {key for key, _, _ in outgoing}:
            pipeline.pexpire(key, _TTL_MS)
        try:
            answers = iter(pipeline.execute(raise_on_error=False))
        except BaseException:
            self._count("dropped", len(outgoing))
            raise
        for _, own, _ in outgoing:
            self._sent(own, next(answers))
        for scope, stream in due:
            self._read(scope, stream, newest if stream.is_unread else count, next(answers))
        for answer in answers:
            if isinstance(answer, Exception):
                self._failed("redis", answer)

    def _client(self) -> Any:
        if not self._clients:
            self._clients += connect(self._target, _TIMEOUT_SECONDS)
        return self._clients[0]

    def _take(self, now: float) -> list[_Outgoing]:
        """Take from the queue what one round sends."""
        with self._lock:
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), _MAX_SENT))]
        self._next_send = now + _SEND_SECONDS
        outgoing = []
        for scope, order in taken:
            stream = self._streams.get(scope)
            if stream is not None:
                stream.busy_until = now + _BUSY_SECONDS
                stream.due_at = min(stream.due_at, now)
            try:
                entry = encode(self._sender if stream is None else stream.sender, order)
            except (TypeError, ValueError):  # such as a block longer than any cache
                self._count("dropped")
                continue
            outgoing.append(_Outgoing(stream_key(self._prefix, scope) if stream is None else stream.key, stream, entry))
        return outgoing

    def _sent(self, stream: _Stream | None, id: Any) -> None:
        if isinstance(id, Exception):
            self._failed("redis", id)
            self._count("dropped")
            return
        self._count("published")
        self._server_offset = _place(id)[0] / 1_000 - time.monotonic()
        if stream is not None and _place(id) < _place(stream.position):
            stream.position = id  # the server lost the stream, or another one took over whose clock is behind

    def _read(self, scope: Scope, stream: _Stream, count: int, answer: Any) -> None:
        now = time.monotonic()
        if self._streams.get(scope) is not stream:
            return
        if isinstance(answer, Exception):
            stream.due_at = now + _MAX_PAUSE_SECONDS
            self._failed("redis", answer)
            return
        is_first, stream.is_unread = stream.is_unread, False
        is_full = len(answer) == count
        if is_first:
            answer = answer[::-1]
        orders = list(self._orders_of_others(stream, answer))
        if answer and not (is_first and is_full):  # else all are read, so that the newest come last
            stream.position = max(stream.position, answer[-1][0], key=_place)
        wait = _LOOK_SECONDS if now < stream.busy_until else _IDLE_LOOK_SECONDS
        # After the newest ones, a request that waited for them comes before older ones.
        stream.due_at = now if is_full and not is_first else now + wait
        size = _MAX_READ if is_first else _SLICE
        for first in range(0, max(len(orders), is_first), size):
            if self._streams.get(scope) is not stream or self._closed:
                return
            part = orders[first : first + size]
            try:
                stream.learn(part)
            except Exception as error:
                self._failed("learning", error)
                continue
            self._count("received", len(part))
            if not is_first:  # a request may wait for the newest orders
                time.sleep(_YIELD_SECONDS)
        if orders and stream.has_caught_up and self._server_offset is not None:
            self._lag = max(time.monotonic() + self._server_offset - _place(stream.position)[0] / 1_000, 0.0)
        stream.has_caught_up = stream.has_caught_up or not is_full

    def _orders_of_others(self, stream: _Stream, entries: Sequence[tuple[bytes, dict[bytes, bytes]]]) -> Iterator[Any]:
        for _, fields in entries:
            decoded = decode(fields.get(_FIELD, b""))
            if decoded is None:
                self._count("malformed")
            elif decoded[0] != stream.sender:
                yield decoded[1]


@dataclass(slots=True, eq=False)
class _Stream:
    """The stream of a followed scope, and how far it was read. Times are those of `time.monotonic`."""

    key: bytes
    learn: Learn
    sender: bytes
    """Of this worker's entries since it follows the scope."""
    due_at: float
    """When to look at it again."""
    busy_until: float
    is_unread: bool
    """True until the newest orders are read, which come first."""
    position: bytes = b"0-0"
    """Last entry read."""
    has_caught_up: bool = False
    """True once all entries from before were learned."""


class _Outgoing(NamedTuple):
    """An entry to append."""

    key: bytes
    stream: _Stream | None
    """None if this worker does not follow the scope."""
    entry: bytes


def _place(id: bytes) -> tuple[int, int]:
    milliseconds, _, number = id.partition(b"-")
    return int(milliseconds), int(number)


def _close_all(clients: Sequence[Any]) -> None:
    for client in clients:
        client.close()


_sharings: weakref.WeakSet[RedisOrderSharing] = weakref.WeakSet()


def _at_exit() -> None:
    for sharing in list(_sharings):
        sharing.close()


atexit.register(_at_exit)
