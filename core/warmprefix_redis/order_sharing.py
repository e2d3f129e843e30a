"""Sharing of served orders through Redis Streams: one per scope, which every worker appends to and reads."""

from __future__ import annotations

import atexit
import logging
import os
import random
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.order_sharing import Learn, LearnedOrder, SharingStats
from warmprefix.plan import Scope
from warmprefix.ticker import Ticker
from warmprefix_redis.connections import RedisTarget, connect, parse_redis_url
from warmprefix_redis.followed_stream import IDLE_SECONDS, FollowedStream
from warmprefix_redis.order_codec import MAX_ORDERS, WORKER_BYTES, decode, encode, orders_in, pack, stream_key
from warmprefix_redis.record import check_prefix

try:
    import redis
except ImportError as error:
    raise MissingExtraError("redis", "redis") from error

__all__ = ["RedisOrderSharing"]

_log = logging.getLogger("warmprefix")

_FIELD = b"o"
_UNDECODED: Mapping[str, Any] = {"NEVER_DECODE": []}
"""Option that makes a decoding client return bytes."""
_TIMEOUT_SECONDS = 1.0
_FIRST_PAUSE_SECONDS, _MAX_PAUSE_SECONDS = 0.1, 2.0
"""Between a failure and the next attempt."""
_MAX_SENT = 1_024
"""Orders per round."""
_MAX_STREAMS, _MAX_ENTRIES = 256, 256
"""Read per round."""
_MAX_TAIL_BYTES = 8 << 20
_LEARNING_SECONDS = 0.05
"""Per round."""
_SLICE = 16
_YIELD_SECONDS = 0.0005
"""Between two slices of orders, to let threads that serve requests run first."""


class RedisOrderSharing:
    """An `OrderSharing` through Redis or Valkey, 6.2 or newer: standalone, Sentinel or Cluster.

    One daemon thread does all of the work, in rounds of one round trip: it appends published orders, and reads what
    other workers appended to the streams of the followed scopes only. A round starts when something is published, and
    to look for new entries: every `interval` seconds while there are some, less often when there are none, down to
    every 50 ms; and once per second where this worker served nothing for ten seconds.

    When Redis fails or hangs, at most `max_queue` orders wait for it. The thread tries again ever less often, down to
    every two seconds, and continues where it was. A batch is not sent twice, even if it is unknown whether it arrived.

    In Redis a stream takes about 22 bytes per block of the last `tail` orders, and expires `ttl` seconds after the last
    one. Its key is a digest; its entries hold fingerprints, token counts and ranks. Commands: XADD, PEXPIRE, XRANGE,
    XREVRANGE, and PING after a failure. Labels are not shared: a label derived from the block is the same everywhere,
    and any other label only matters to the prompts of the worker that gave it.

    A forked process is another worker, with a connection of its own if this was made from a URL. While one node of a
    Cluster does not answer, nothing is shared through the other nodes either.
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
        """Check the arguments; connecting, and the thread, start with the first `publish` or `follow`.

        Args:
            client: A synchronous client, which you close after this, or a URL as for `RedisSeenStore`.
            prefix: Beginning of all keys.
            interval: Least seconds between two rounds that send, unless `batch` orders wait, or between two that look.
            batch: Most orders per entry.
            max_queue: Most orders that wait to be sent; beyond it the oldest is dropped.
            tail: Approximate number of latest orders that a stream keeps for workers that are new to its scope.
            ttl: Seconds after its last order at which a stream is dropped.

        Raises:
            TypeError: `client` is something else, such as an asynchronous client.
            ValueError: A number is out of range, the prefix is empty or has braces, or the URL cannot be used.
        """
        if not isinstance(client, redis.Redis | redis.RedisCluster | str):
            raise TypeError(f"client must be a synchronous redis client or a URL, got {type(client).__name__}")
        for name, value in (("interval", interval), ("max_queue", max_queue), ("tail", tail), ("ttl", ttl)):
            if value <= 0:
                raise ValueError(f"{name} must be positive, got {value}")
        if not 1 <= batch <= MAX_ORDERS:
            raise ValueError(f"batch must be 1 to {MAX_ORDERS}, got {batch}")
        self._client = parse_redis_url(client) if isinstance(client, str) else client
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
        # Guards the queue, the streams and the counts. Held for microseconds, never while waiting. Re-entrant, because
        # a signal's handler may publish in the middle of any call.
        self._lock = fork_safe_lock()
        in_each_process(self._start_process)
        _sharings.add(self)

    def _start_process(self) -> None:
        """Set what each process has of its own."""
        self._worker = os.urandom(WORKER_BYTES)
        self._queue: deque[tuple[Scope, LearnedOrder]] = deque()
        self._failures = 0
        self._next_send = self._next_look = 0.0
        self._connection = _Connection(self._client)
        self._ticker = Ticker(self._tick, self._connection.close, "warmprefix-sharing")

    # -- for the planner -----------------------------------------------------------------------------------------

    def publish(self, scope: Scope, order: LearnedOrder) -> None:
        """Send an order to the other workers soon. O(1); the order must not change any more."""
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
        """Pass the orders that others serve in this scope to `learn`, starting with the latest earlier ones."""
        with self._lock:
            if self._closed:
                return
            self._streams[scope] = FollowedStream(stream_key(self._prefix, scope), learn, self._tail, time.monotonic())
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

    # -- the thread ----------------------------------------------------------------------------------------------

    def _tick(self) -> float:
        """Make one round, and return the seconds until the next."""
        now = time.monotonic()
        try:
            if now >= self._next_look or self._sends_now(now) or self._closed:
                if self._failures:  # send no orders before the server answers again
                    self._connection.client().ping()
                self._exchange(now)
                self._failures = 0
            self._learn()
        except Exception as error:
            self._failures += 1
            pause = min(_FIRST_PAUSE_SECONDS * 2 ** min(self._failures - 1, 10), _MAX_PAUSE_SECONDS)
            self._next_send = self._next_look = time.monotonic() + pause * random.uniform(0.5, 1.0)  # noqa: S311
            self._failed("redis", error)
        return self._pause()

    def _sends_now(self, now: float) -> bool:
        with self._lock:
            waiting = len(self._queue)
        return waiting > 0 and (now >= self._next_send or (waiting >= self._batch and not self._failures))

    def _pause(self) -> float:
        """Return the seconds until the next round is due."""
        now = time.monotonic()
        followed = self._followed()
        if any(stream.backlog for _, stream in followed) or self._sends_now(now):
            return 0.0
        look = min([now + IDLE_SECONDS, *(stream.due_at for _, stream in followed if stream.is_busy(now))])
        with self._lock:
            send = self._next_send if self._queue else now + IDLE_SECONDS
        return min(max(look, self._next_look), send) - now

    def _followed(self) -> list[tuple[Scope, FollowedStream]]:
        with self._lock:
            return list(self._streams.items())

    def _failed(self, part: str, error: object) -> None:
        """Count and log a failure, after which workers learn less from each other."""
        with self._lock:
            self._errors += 1
            first = self._errors == 1
        # Logged as text: a handler that keeps the exception would keep this object alive, and with it the thread.
        level = logging.WARNING if first else logging.DEBUG
        _log.log(level, "sharing of learned orders failed: %s: %s: %s", part, type(error).__name__, str(error))

    # -- sending and reading -------------------------------------------------------------------------------------

    def _exchange(self, now: float) -> None:
        """Append queued orders and read due streams in one round trip; then read one new scope's tail."""
        outgoing = self._take(now)
        # Read no more than can be learned.
        followed = self._followed()
        reads = not self._closed and sum(len(stream.backlog) for _, stream in followed) < _MAX_ENTRIES
        due = sorted([stream for _, stream in followed if stream.is_due(now)], key=lambda stream: stream.due_at)
        due = due[:_MAX_STREAMS] if reads else []
        count = max(_MAX_ENTRIES // max(len(due), 1), 1)
        self._next_look = now + self._interval
        if outgoing:
            self._next_send = now + self._interval
        if outgoing or due:
            try:
                answers = iter(self._send(outgoing, due, count))
            except BaseException:
                with self._lock:
                    self._dropped += sum(len(entry.packed) for entry in outgoing)
                raise
            for entry in outgoing:
                self._sent(entry, next(answers), next(answers))
            for stream in due:
                self._read(stream, count, next(answers), now)
        new = [stream for _, stream in self._followed() if stream.needs_tail(now)]
        if reads and new:
            self._read_tail(new[0])

    def _take(self, now: float) -> list[_OutgoingEntry]:
        """Take from the queue what one round sends, as entries."""
        with self._lock:
            taken = [self._queue.popleft() for _ in range(min(len(self._queue), _MAX_SENT))]
        by_scope: dict[Scope, list[bytes]] = {}
        for scope, order in taken:
            try:
                packed_order = pack(order)
            except (TypeError, ValueError):  # noqa: PERF203 - such as a block longer than any cache
                with self._lock:
                    self._dropped += 1
            else:
                by_scope.setdefault(scope, []).append(packed_order)
        entries = []
        for scope, packed in by_scope.items():
            stream = self._streams.get(scope)
            if stream is not None:
                stream.mark_served(now)
            key = stream_key(self._prefix, scope) if stream is None else stream.key
            firsts = range(0, len(packed), self._batch)
            entries += [_OutgoingEntry(key, stream, packed[first : first + self._batch]) for first in firsts]
        return entries

    def _send(self, outgoing: Sequence[_OutgoingEntry], due: Sequence[FollowedStream], count: int) -> Sequence[object]:
        pipeline = self._connection.client().pipeline(transaction=False)
        for entry in outgoing:
            start = None if entry.stream is None else entry.stream.retention.start
            # Each entry has an order at least, so `tail` entries hold too many orders rather than too few.
            bound = {"maxlen": self._tail} if start is None else {"minid": start}
            pipeline.xadd(entry.key, {_FIELD: encode(self._worker, entry.packed)}, approximate=True, **bound)
            pipeline.pexpire(entry.key, self._ttl_ms)
        for stream in due:
            command = ("XRANGE", stream.key, b"(" + stream.position, "+", "COUNT", count)
            pipeline.execute_command(*command, **_UNDECODED)
        answers: Sequence[object] = pipeline.execute(raise_on_error=False)
        return answers

    def _sent(self, entry: _OutgoingEntry, id: object, expires: object) -> None:
        for answer in (id, expires):
            if isinstance(answer, Exception):
                self._failed("redis", answer)
        if isinstance(id, Exception):
            with self._lock:
                self._dropped += len(entry.packed)
            return
        with self._lock:
            self._published += len(entry.packed)
        if entry.stream is not None:
            entry.stream.add_own(id if isinstance(id, bytes) else str(id).encode(), time.monotonic())

    def _read(self, stream: FollowedStream, count: int, answer: object, now: float) -> None:
        if not isinstance(answer, list):
            stream.due_at = now + _MAX_PAUSE_SECONDS
            self._failed("redis", answer)
            return
        for id, payload in _payloads(answer):
            stream.add_read(id, payload)
        stream.schedule(now, len(answer), count, self._interval)

    def _read_tail(self, stream: FollowedStream) -> None:
        """Read the latest entries of a stream, newest first, until there are `tail` orders."""
        client = self._connection.client()
        past: list[tuple[bytes, bytes]] = []
        orders = size = 0
        end, count = b"+", self._batch
        while max(orders, len(past)) < self._tail and size < _MAX_TAIL_BYTES:
            command = ("XREVRANGE", stream.key, end, "-", "COUNT", count)
            try:
                answer = client.execute_command(*command, **_UNDECODED)
            except redis.ResponseError as error:  # a problem of this stream, not of all
                stream.due_at = time.monotonic() + _MAX_PAUSE_SECONDS
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
            count = min(max(wanted, self._batch), _MAX_SENT)
        stream.add_tail(past[::-1])

    # -- learning ------------------------------------------------------------------------------------------------

    def _learn(self) -> None:
        """Pass entries to their `Learn` functions, for `_LEARNING_SECONDS` at most."""
        until = time.monotonic() + _LEARNING_SECONDS
        behind = [(scope, stream) for scope, stream in self._followed() if stream.backlog]
        for scope, stream in sorted(behind, key=lambda each: each[1].learned_at):
            orders: list[LearnedOrder] = []
            while stream.backlog and time.monotonic() < until:
                id, payload, is_past = stream.backlog.popleft()
                orders += self._orders_of_others(stream, id, payload, is_past)
                if len(orders) >= _SLICE or not stream.backlog:
                    self._pass_on(scope, stream, orders)
                    orders = []
            self._pass_on(scope, stream, orders)
            stream.mark_learned(time.monotonic())

    def _orders_of_others(
        self, stream: FollowedStream, id: bytes, payload: bytes, is_past: bool
    ) -> Sequence[LearnedOrder]:
        """Return an entry's orders, unless it is this worker's own or malformed."""
        try:
            entry = decode(payload)
        except ValueError:
            with self._lock:
                self._malformed += 1
            return ()
        stream.retention.add(id, len(entry.orders))
        if entry.worker == self._worker and not (is_past and stream.precedes_own(id)):
            return ()
        if not is_past:
            self._lag = stream.age(id, time.monotonic())
        return entry.orders

    def _pass_on(self, scope: Scope, stream: FollowedStream, orders: Sequence[LearnedOrder]) -> None:
        for first in range(0, len(orders), _SLICE):
            part = orders[first : first + _SLICE]
            if self._streams.get(scope) is not stream or self._closed:
                return
            try:
                stream.learn(part)
            except Exception as error:
                self._failed("learning", error)
                continue
            with self._lock:
                self._received += len(part)
            time.sleep(_YIELD_SECONDS)


class _OutgoingEntry(NamedTuple):
    """An entry to append."""

    key: bytes
    stream: FollowedStream | None
    """None if this worker does not follow the scope."""
    packed: Sequence[bytes]


def _payloads(entries: Iterable[tuple[bytes, Mapping[bytes, bytes]]]) -> Iterator[tuple[bytes, bytes]]:
    """Yield each entry's id and payload, which is empty for entries of other applications."""
    for id, fields in entries:
        yield id, fields.get(_FIELD, b"")


class _Connection:
    """The given client, or an own one that is opened when first needed."""

    def __init__(self, given: redis.Redis | redis.RedisCluster | RedisTarget) -> None:
        self._given = given
        self._own: list[Any] = []

    def client(self) -> Any:
        if not isinstance(self._given, RedisTarget):
            return self._given
        if not self._own:
            self._own = connect(self._given, _TIMEOUT_SECONDS)
        return self._own[0]

    def close(self) -> None:
        for client in self._own:
            client.close()


_sharings: weakref.WeakSet[RedisOrderSharing] = weakref.WeakSet()


def _at_exit() -> None:
    for sharing in list(_sharings):
        sharing.close()


atexit.register(_at_exit)
