"""Learned orders by way of Redis Streams: one a scope, which every worker appends to and reads."""

from __future__ import annotations

import atexit
import logging
import os
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix.order_sharing.base import Learn, LearnedOrder, SharingStats
from warmprefix.order_sharing.codec import MAX_ORDERS, WORKER_BYTES, decode, encode, orders_in, pack, stream_key
from warmprefix.order_sharing.followed import SELDOM, FollowedStream
from warmprefix.plan import Scope
from warmprefix.stores.redis.keys import check_prefix
from warmprefix.stores.redis.urls import Opened, Target, connect, parse_target
from warmprefix.ticker import Ticker

try:
    import redis
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

__all__ = ["RedisOrderSharing"]

_log = logging.getLogger("warmprefix")

_FIELD = b"o"
_UNDECODED: Mapping[str, Any] = {"NEVER_DECODE": []}
"""What a client that decodes answers must leave as it is."""
_TIMEOUT = 1.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 2.0
"""Seconds before what failed is tried again."""
_MOST_SENT = 1_024
"""Orders a round."""
_MOST_STREAMS, _MOST_ENTRIES = 256, 256
"""Read a round."""
_MOST_TAIL_BYTES = 8 << 20
_TEACHING = 0.05
"""Seconds a round."""
_SLICE = 16
_BREATH = 0.0005
"""Seconds between two slices of orders, in which threads that serve requests come first."""


class RedisOrderSharing:
    """An `OrderSharing` by way of Redis or Valkey, 6.2 or newer: standalone, Sentinel or Cluster.

    One daemon thread does all of the work, in rounds of one round trip: it appends what was published, and reads what
    other workers appended to the streams of the scopes that this one follows, and of no others. A round begins when
    something is published, and to look for what others did: every `interval` seconds while that is anything, less often
    when it is not, down to every 50 ms; and once a second where this worker served nothing for ten seconds.

    When Redis fails or hangs, at most `max_queue` orders wait for it, the thread tries again ever less often, down to
    every two seconds, and goes on where it was. A batch whose fate is unknown is not sent twice.

    In Redis a stream takes about 22 bytes a block of the last `tail` orders, and goes `ttl` seconds after the last
    one. Its name is made of digests; what is in it are fingerprints, token counts and ranks. Commands: XADD, PEXPIRE,
    XRANGE, XREVRANGE, and PING after a failure. Labels are not shared: a label that follows from the block is the same
    everywhere, and which worker gave one that does not is a matter of its own prompts.

    A forked process is another worker, with a connection of its own if this was made from a URL. While one of several
    nodes of a Cluster does not answer, nothing is shared by way of the others either.
    """

    def __init__(
        self,
        client: redis.Redis | redis.RedisCluster | str,
        *,
        prefix: str = "wp",
        interval: float = 0.01,
        batch: int = 64,
        max_queue: int = 4_096,
        tail: int = 4_000,
        ttl: float = 86_400.0,
    ) -> None:
        """Nothing is connected, and no thread runs, before something is published or followed.

        Args:
            client: A synchronous client, which you close after this, or a URL as for `RedisSeenStore`.
            prefix: What the names of all keys begin with.
            interval: Least seconds between two rounds that send, unless `batch` orders wait, or between two that look.
            batch: Most orders an entry.
            max_queue: Most orders that wait to be sent; beyond it the oldest is dropped.
            tail: How many of the latest orders a stream keeps for workers that are new to its scope, about.
            ttl: Seconds after its last order at which a stream is dropped.

        Raises:
            TypeError: `client` is something else, such as an asynchronous client.
            ValueError: A number is out of range, the prefix is empty or has braces, or the URL is none.
        """
        if not isinstance(client, redis.Redis | redis.RedisCluster | str):
            raise TypeError(f"client must be a synchronous redis client or a URL, got {type(client).__name__}")
        for name, value in (("interval", interval), ("max_queue", max_queue), ("tail", tail), ("ttl", ttl)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not 1 <= batch <= MAX_ORDERS:
            raise ValueError(f"batch must be 1 to {MAX_ORDERS}, got {batch}")
        self._client = parse_target(client) if isinstance(client, str) else client
        self._prefix = check_prefix(prefix)
        self._interval = interval
        self._batch = batch
        self._max_queue = max_queue
        self._tail = tail
        self._ttl_ms = max(int(ttl * 1_000), 1)
        self._streams: dict[Scope, FollowedStream] = {}
        self._closed = False
        self._published = self._received = self._dropped = self._malformed = self._errors = 0
        self._lag: float | None = None
        self._start()
        _sharings.add(self)

    def _start(self) -> None:
        """What each process has for itself."""
        self._worker = os.urandom(WORKER_BYTES)
        # Guards the queue, the streams' names and the counts. Held for microseconds, by nobody who waits. Re-entrant,
        # because a signal's handler may publish in the middle of any call.
        self._lock = threading.RLock()
        self._learning = threading.Lock()
        """Held while a follower learns, which may hold locks itself, so that no process is forked just then."""
        self._queue: deque[tuple[Scope, LearnedOrder]] = deque()
        self._failures = 0
        self._next_send = self._next_look = 0.0
        self._connection = _Connection(self._client)
        self._ticker = Ticker(self._tick, self._connection.close, "warmprefix-sharing")

    # -- for the planner ---------------------------------------------------------------------------------------

    def publish(self, scope: Scope, order: LearnedOrder) -> None:
        with self._lock:
            if self._closed:
                self._dropped += 1
                return
            if len(self._queue) >= self._max_queue:
                self._queue.popleft()
                self._dropped += 1
            self._queue.append((scope, order))
            hurry = len(self._queue) in (1, self._batch)
        self._run(hurry)

    def follow(self, scope: Scope, learn: Learn) -> None:
        with self._lock:
            if self._closed:
                return
            self._streams[scope] = FollowedStream(stream_key(self._prefix, scope), learn, self._tail, time.monotonic())
        self._run(hurry=True)

    def unfollow(self, scope: Scope) -> None:
        with self._lock:
            self._streams.pop(scope, None)

    def has_caught_up(self, scope: Scope) -> bool:
        stream = self._streams.get(scope)
        return stream is not None and stream.has_caught_up

    def close(self, timeout: float = 1.0) -> None:
        """Send what waits and end the thread; after `timeout` seconds it is left to end by itself."""
        with self._lock:
            self._closed = True
            self._streams.clear()
        self._ticker.stop(timeout)

    def stats(self) -> SharingStats:
        with self._lock:
            return SharingStats(
                self._published, self._received, self._dropped, self._malformed, self._errors, self._lag
            )

    def _run(self, hurry: bool) -> None:
        try:
            self._ticker.start()
        except RuntimeError as error:  # no more threads, or the interpreter is about to exit
            self._failed("no thread", error)
        if hurry:
            self._ticker.wake()

    # -- the thread --------------------------------------------------------------------------------------------

    def _tick(self) -> float:
        """One round; returns the seconds until the next."""
        now = time.monotonic()
        try:
            if now >= self._next_look or self._sends_now(now) or self._closed:
                if self._failures:  # nothing is risked before something answers
                    self._connection.client().ping()
                self._exchange(now)
                self._failures = 0
            self._teach()
        except Exception as error:
            self._failures += 1
            pause = min(_FIRST_PAUSE * 2 ** min(self._failures - 1, 10), _LONGEST_PAUSE)
            self._next_send = self._next_look = time.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311
            self._failed("redis", error)
        return self._pause()

    def _sends_now(self, now: float) -> bool:
        with self._lock:
            waiting = len(self._queue)
        return waiting > 0 and (now >= self._next_send or (waiting >= self._batch and not self._failures))

    def _exchange(self, now: float) -> None:
        """Append what waits, read what is due, in one round trip; then one scope's tail, if one is new."""
        outgoing = self._take(now)
        # No more is read than can be learned.
        reads = not self._closed and sum(len(stream.backlog) for _, stream in self._followed()) < _MOST_ENTRIES
        due = self._due(now) if reads else []
        self._next_look = now + self._interval
        if outgoing:
            self._next_send = now + self._interval
        if outgoing or due:
            try:
                answers = iter(self._send(outgoing, due))
            except BaseException:
                with self._lock:
                    self._dropped += sum(len(batch.packed) for batch in outgoing)
                raise
            for batch in outgoing:
                self._sent(batch, next(answers), next(answers))
            for stream, count in due:
                self._read(stream, count, next(answers), now)
        newcomer = self._newcomer(now) if reads else None
        if newcomer is not None:
            self._read_tail(newcomer)

    def _send(self, outgoing: Sequence[_Batch], due: Sequence[tuple[FollowedStream, int]]) -> Sequence[object]:
        pipeline = self._connection.client().pipeline(transaction=False)
        for batch in outgoing:
            start = None if batch.stream is None else batch.stream.retention.start
            # An entry has an order at least, so as a bound their number is too generous, but always true.
            bound = {"maxlen": self._tail} if start is None else {"minid": start}
            pipeline.xadd(batch.key, {_FIELD: encode(self._worker, batch.packed)}, approximate=True, **bound)
            pipeline.pexpire(batch.key, self._ttl_ms)
        for stream, count in due:
            command = ("XRANGE", stream.key, b"(" + stream.position, "+", "COUNT", count)
            pipeline.execute_command(*command, **_UNDECODED)
        answers: Sequence[object] = pipeline.execute(raise_on_error=False)
        return answers

    def _take(self, now: float) -> list[_Batch]:
        """From the queue, what one round sends, as entries."""
        with self._lock:
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), _MOST_SENT))]
        by_scope: dict[Scope, list[bytes]] = {}
        unfit = 0
        for scope, order in taken:
            packed_order = _packed(order)
            if packed_order is None:
                unfit += 1
            else:
                by_scope.setdefault(scope, []).append(packed_order)
        batches = []
        for scope, packed in by_scope.items():
            stream = self._streams.get(scope)
            if stream is not None:
                stream.served(now)
            key = stream_key(self._prefix, scope) if stream is None else stream.key
            firsts = range(0, len(packed), self._batch)
            batches += [_Batch(key, stream, packed[first : first + self._batch]) for first in firsts]
        with self._lock:
            self._dropped += unfit
        return batches

    def _sent(self, batch: _Batch, id: object, expires: object) -> None:
        for answer in (id, expires):
            if isinstance(answer, Exception):
                self._failed("redis", answer)
        if isinstance(id, Exception):
            with self._lock:
                self._dropped += len(batch.packed)
            return
        with self._lock:
            self._published += len(batch.packed)
        if batch.stream is not None:
            batch.stream.has_appended(id if isinstance(id, bytes) else str(id).encode(), time.monotonic())

    def _due(self, now: float) -> list[tuple[FollowedStream, int]]:
        """The streams to be read now, each with the most entries."""
        due = [stream for _, stream in self._followed() if stream.is_due(now)]
        due.sort(key=lambda stream: stream.due_at)
        del due[_MOST_STREAMS:]
        return [(stream, max(_MOST_ENTRIES // len(due), 1)) for stream in due]

    def _read(self, stream: FollowedStream, count: int, answer: object, now: float) -> None:
        if not isinstance(answer, list):
            stream.due_at = now + _LONGEST_PAUSE
            self._failed("redis", answer)
            return
        for id, payload in _payloads(answer):
            stream.has_read(id, payload)
        stream.was_read(now, len(answer), count, self._interval)

    def _newcomer(self, now: float) -> FollowedStream | None:
        return next((stream for _, stream in self._followed() if stream.is_new(now)), None)

    def _read_tail(self, stream: FollowedStream) -> None:
        """Fetch the latest orders of a scope, newest first, until there are `tail`."""
        client = self._connection.client()
        past: list[tuple[bytes, bytes]] = []
        orders = size = 0
        end, count = b"+", self._batch
        while max(orders, len(past)) < self._tail and size < _MOST_TAIL_BYTES:
            command = ("XREVRANGE", stream.key, end, "-", "COUNT", count)
            try:
                answer = client.execute_command(*command, **_UNDECODED)
            except redis.ResponseError as error:  # this stream's trouble, not everybody's
                stream.due_at = time.monotonic() + _LONGEST_PAUSE
                self._failed("redis", error)
                return
            for id, payload in _payloads(answer):
                if orders >= self._tail:
                    break
                past.append((id, payload))
                orders += orders_in(payload)
                size += len(payload)
                end = b"(" + id
            if len(answer) < count:
                break
            wanted = (self._tail - orders) * len(past) // max(orders, 1)
            count = min(max(wanted, self._batch), _MOST_SENT)
        stream.has_read_tail(past[::-1])

    # -- learning ----------------------------------------------------------------------------------------------

    def _teach(self) -> None:
        """Hand the followers what was read, for a while."""
        until = time.monotonic() + _TEACHING
        behind = [(scope, stream) for scope, stream in self._followed() if stream.backlog]
        for scope, stream in sorted(behind, key=lambda each: each[1].taught_at):
            orders: list[LearnedOrder] = []
            while stream.backlog and time.monotonic() < until:
                id, payload, is_past = stream.backlog.popleft()
                orders += self._foreign(stream, id, payload, is_past)
                if len(orders) >= _SLICE or not stream.backlog:
                    self._hand_over(scope, stream, orders)
                    orders = []
            self._hand_over(scope, stream, orders)
            stream.was_taught(time.monotonic())

    def _foreign(self, stream: FollowedStream, id: bytes, payload: bytes, is_past: bool) -> Sequence[LearnedOrder]:
        """The orders of an entry, unless they are known or none."""
        try:
            entry = decode(payload)
        except ValueError:
            with self._lock:
                self._malformed += 1
            return ()
        stream.retention.add(id, len(entry.orders))
        if entry.worker == self._worker and not (is_past and stream.was_before(id)):
            return ()
        if not is_past:
            self._lag = stream.age(id, time.monotonic())
        return entry.orders

    def _hand_over(self, scope: Scope, stream: FollowedStream, orders: Sequence[LearnedOrder]) -> None:
        for first in range(0, len(orders), _SLICE):
            part = orders[first : first + _SLICE]
            with self._learning:
                if self._streams.get(scope) is not stream or self._closed:
                    return
                try:
                    stream.learn(part)
                except Exception as error:
                    self._failed("learning", error)
                    continue
            with self._lock:
                self._received += len(part)
            time.sleep(_BREATH)

    def _pause(self) -> float:
        """Seconds until there is something to do, as far as is known."""
        now = time.monotonic()
        followed = self._followed()
        if any(stream.backlog for _, stream in followed) or self._sends_now(now):
            return 0.0
        look = min([now + SELDOM, *(stream.due_at for _, stream in followed if stream.is_busy(now))])
        with self._lock:
            send = self._next_send if self._queue else now + SELDOM
        return min(max(look, self._next_look), send) - now

    def _followed(self) -> list[tuple[Scope, FollowedStream]]:
        with self._lock:
            return list(self._streams.items())

    def _failed(self, what: str, error: object) -> None:
        """The one place where a failure degrades to workers that learn less from each other."""
        with self._lock:
            self._errors += 1
            first = self._errors == 1
        # Told in words: an exception that a handler keeps would keep this alive, and with it the thread.
        level = logging.WARNING if first else logging.DEBUG
        _log.log(level, "sharing of learned orders failed: %s: %s: %s", what, type(error).__name__, str(error))


class _Batch(NamedTuple):
    """One entry to be."""

    key: bytes
    stream: FollowedStream | None
    """None if this worker does not follow the scope."""
    packed: Sequence[bytes]


def _packed(order: LearnedOrder) -> bytes | None:
    try:
        return pack(order)
    except (TypeError, ValueError):  # such as a block that nobody could learn: longer than any cache
        return None


def _payloads(entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> Iterator[tuple[bytes, bytes]]:
    """Of each entry the id and what it holds, or nothing where it is not ours."""
    for id, fields in entries:
        yield id, fields.get(_FIELD, b"")


class _Connection:
    """The client that was given, or one of our own, made when it is first needed."""

    def __init__(self, given: redis.Redis | redis.RedisCluster | Target) -> None:
        self._given = given
        self._own: Opened | None = None

    def client(self) -> Any:
        if not isinstance(self._given, Target):
            return self._given
        if self._own is None:
            self._own = connect(self._given, timeout=_TIMEOUT, connect_timeout=_TIMEOUT)
        return self._own.client

    def close(self) -> None:
        if self._own is not None:
            self._own.close()


# -- processes ---------------------------------------------------------------------------------------------------------

_sharings: weakref.WeakSet[RedisOrderSharing] = weakref.WeakSet()
_forking = threading.local()


def _before_fork() -> None:
    """Let nobody be learning, or the child would inherit a planner's lock that no thread of its own will release."""
    locks = [sharing._learning for sharing in list(_sharings)]  # noqa: SLF001
    _forking.held = [lock for lock in locks if lock.acquire(timeout=_TIMEOUT)]


def _after_fork() -> None:
    for lock in _forking.held:
        lock.release()


def _in_the_fork() -> None:
    for sharing in list(_sharings):
        sharing._start()  # noqa: SLF001


def _at_exit() -> None:
    for sharing in list(_sharings):
        sharing.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_in_the_fork)
atexit.register(_at_exit)
