"""A subscription to the KV events of one address: received in order, with missed ones replayed."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix_kv_events.kv_events import (
    END,
    Arrival,
    EventBatch,
    KvMessage,
    MalformedMessageError,
    SequenceTracker,
    read_batch,
    read_message,
    replay_request,
)
from warmprefix_kv_events.kv_index import KvIndex

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise MissingExtraError("events", "pyzmq") from error

__all__ = ["Endpoint", "FeedCounts", "KvSubscription", "SubscriptionOptions"]

_HEARTBEAT_MS = 10_000
"""Without an answer to a heartbeat, ZeroMQ reconnects."""
_CONNECTED = zmq.Event.CONNECTED | zmq.Event.ACCEPTED


class Endpoint(NamedTuple):
    """The addresses of one publisher."""

    publish: str
    replay: str | None
    """Address that answers requests for missed messages."""


@dataclass(slots=True)
class FeedCounts:
    """Counts of a feed, summed over its subscriptions; see `FeedStats`."""

    events: int = 0
    gaps: int = 0
    replayed: int = 0
    wipes: int = 0
    malformed: int = 0
    unknown: int = 0
    lag: float = 0.0


class SubscriptionOptions(NamedTuple):
    """The arguments of `KvEventFeed` with these names."""

    topic: str
    high_water_mark: int
    replay_timeout: float
    replay_cooldown: float


@dataclass(slots=True)
class _Replay:
    """A replay in progress."""

    socket: zmq.Socket[bytes]
    start: int
    name: Hashable | None
    """The source with missing messages; None for all sources of the publisher."""
    deadline: float
    began: bool = False
    """True once a message came."""
    unbroken: bool = True
    """True if no connection to the publisher was lost since it began."""


class KvSubscription:
    """Receives the messages of one address, in order and without gaps, and applies them to the index.

    During a replay, live messages wait in the socket. Belongs to the one thread that creates and closes it.

    A replay address belongs to one publisher; without one there may be several, one for each topic and rank.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: Endpoint,
        index: KvIndex,
        counts: FeedCounts,
        options: SubscriptionOptions,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._index = index
        self._counts = counts
        self._options = options
        self._sequences: dict[Hashable, SequenceTracker] = {}
        self._replay: _Replay | None = None
        self._pending: tuple[Hashable, int, EventBatch] | None = None
        """Source, number and batch of a live message that waits for the missing ones before it."""
        self._retry_at: float | None = None
        """Time of the next attempt after a failed replay; no replay is requested before."""
        self._connections: set[int] = set()
        self._reported = False
        """True if a message came since the last lost connection, or a full replay ended (even an empty one)."""
        self._silent: set[Hashable] = set()
        """Sources without a message since then: the lost connection may have been theirs."""
        self._live_socket = self._new_socket(zmq.SUB, endpoint.publish, options.high_water_mark)
        self.monitor = self._live_socket.get_monitor_socket(_CONNECTED | zmq.Event.DISCONNECTED)
        """Socket with events of the connection, which `receive` reads."""
        try:
            self._live_socket.heartbeat_ivl, self._live_socket.heartbeat_timeout = _HEARTBEAT_MS, 3 * _HEARTBEAT_MS
            self._live_socket.subscribe(options.topic.encode())
            if "*" in endpoint.publish:
                self._live_socket.bind(endpoint.publish)
            else:
                self._live_socket.connect(endpoint.publish)
            if endpoint.replay is not None:
                self._request_replay(0, None)
        except BaseException:
            self.close()
            raise

    def _new_socket(self, kind: int, address: str, high_water_mark: int) -> zmq.Socket[bytes]:
        socket = self._context.socket(kind)
        socket.linger = 0
        socket.ipv6 = "[" in address
        socket.rcvhwm = high_water_mark
        return socket

    @property
    def is_current(self) -> bool:
        """True if every publisher here is connected and has reported since it connected."""
        return bool(self._connections) and self._reported and not self._silent

    @property
    def replaying(self) -> bool:
        """True during a replay, when the index may have only a part of it."""
        return self._replay is not None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Socket that receives the next message."""
        return self._live_socket if self._replay is None else self._replay.socket

    def due(self) -> float | None:
        """Return the time by the monotonic clock at which `receive` has work even without a message."""
        return self._retry_at if self._replay is None else self._replay.deadline

    def receive(self, max_messages: int) -> bool:
        """Apply waiting messages, at most this many; return True if more may wait."""
        self._handle_deadlines()
        self._read_monitor()
        for _ in range(max_messages):
            replay = self._replay
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return False
            try:
                message = read_message(frames)
                if replay is None:
                    self._take_live(message)
                else:
                    self._take_replayed(replay, message)
            except MalformedMessageError:
                # The next message shows the gap that this one leaves.
                self._counts.malformed += 1
        return True

    def close(self) -> None:
        """Close the sockets."""
        self._live_socket.disable_monitor()
        self.monitor.close(0)
        self._live_socket.close(0)
        self._end_replay()

    def _read_monitor(self) -> None:
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] & _CONNECTED:
                self._connections.add(event["value"])
            elif event["value"] in self._connections:
                self._connections.remove(event["value"])
                self._reported = False
                self._silent = set(self._sequences)
                if self._replay is not None:
                    self._replay.unbroken = False

    # -- live messages -----------------------------------------------------------------------------------------

    def _take_live(self, message: KvMessage) -> None:
        batch = read_batch(message.payload)
        if not self._connections:  # a message from before a lost connection does not show a new one
            self._read_monitor()
        name = self._name(message.topic, batch)
        sequence = self._sequence(name)
        if sequence is None:
            self._index.apply(name, batch)  # the index counts it as dropped
            return
        arrival = sequence.arrive(message.sequence, batch.time)
        if arrival is Arrival.SEEN:
            return
        if arrival is Arrival.RESTART:
            self._discard(name, restarted=True)
            arrival = Arrival.NEXT if message.sequence == 0 else Arrival.GAP
        elif arrival is Arrival.GAP:
            self._counts.gaps += 1
        if arrival is Arrival.GAP and self._endpoint.replay is not None and self._retry_at is None:
            self._pending = name, message.sequence, batch
            self._request_replay(0 if sequence.applied is None else sequence.applied, name)
            return
        if arrival is Arrival.GAP:
            self._discard(name)
        elif message.sequence == 0:
            self._index.wipe(name, complete=True)  # the first message of a publisher: its cache was empty
        self._apply(name, sequence, message.sequence, batch)
        self._counts.lag = max(time.time() - batch.time, 0.0)

    def _sequence(self, name: Hashable) -> SequenceTracker | None:
        sequence = self._sequences.get(name)
        if sequence is None and len(self._sequences) < self._index.max_sources:
            self._sequences[name] = sequence = SequenceTracker()
        return sequence

    def _name(self, topic: bytes, batch: EventBatch) -> Hashable:
        return (self._endpoint.publish, topic if self._endpoint.replay is None else b"", batch.rank)

    def _apply(self, name: Hashable, sequence: SequenceTracker, number: int, batch: EventBatch) -> None:
        self._index.apply(name, batch)
        sequence.apply(number, batch.time)
        if self._connections:
            self._reported = True
            self._silent.discard(name)
        self._counts.events += len(batch.events)
        self._counts.unknown += batch.unknown

    def _discard(self, name: Hashable, *, restarted: bool = False) -> None:
        """Discard the state of a source, because some of its events are lost or it restarted."""
        self._counts.wipes += 1
        self._index.wipe(name, complete=restarted)
        self._sequences[name].reset()

    # -- replayed messages -------------------------------------------------------------------------------------

    def _request_replay(self, start: int, name: Hashable | None) -> None:
        address = self._endpoint.replay
        assert address is not None
        self._retry_at = None
        # A new socket: late answers to an older request are dropped. Without a bound: otherwise a publisher drops the
        # rest of an answer that is read slowly.
        socket = self._new_socket(zmq.DEALER, address, 0)
        socket.connect(address)
        socket.send_multipart(replay_request(start), zmq.NOBLOCK)
        self._replay = _Replay(socket, start, name, time.monotonic() + self._options.replay_timeout)

    def _take_replayed(self, replay: _Replay, message: KvMessage) -> None:
        if message.sequence == END:
            self._finish(replay)
            return
        replay.deadline = time.monotonic() + self._options.replay_timeout
        batch = read_batch(message.payload)
        name = self._name(b"", batch)
        sequence = self._sequence(name)
        if sequence is None:
            return
        self._counts.replayed += 1
        if not replay.began:
            replay.began = True
            if replay.start == 0:
                self._index.wipe(name, complete=message.sequence == 0)
                sequence.reset()
            elif message.sequence == sequence.applied and batch.time != sequence.applied_time:
                # Another message with the same number: the publisher restarted, and its messages count again from 0.
                self._discard(name, restarted=True)
                self._end_replay()
                self._request_replay(0, name)
                return
        if sequence.applied is not None:
            if message.sequence <= sequence.applied:
                return
            if message.sequence > sequence.applied + 1:
                if self._request_rest(replay, name):
                    return
                self._discard(name)  # the publisher no longer has them, or they could not be decoded
        self._apply(name, sequence, message.sequence, batch)

    def _request_rest(self, replay: _Replay, name: Hashable) -> bool:
        """Request the rest of an answer, which a publisher may cut off; return False if it brought nothing."""
        applied = self._sequences[name].applied
        if applied is None or applied <= replay.start:
            return False
        self._end_replay()
        self._request_replay(applied, name)
        return True

    def _finish(self, replay: _Replay) -> None:
        """Complete a replay that came to its end."""
        self._end_replay()
        if replay.name is not None and not replay.began:
            self._discard(replay.name)
        if replay.start == 0 and replay.unbroken:
            self._reported = True
            self._silent.clear()
        self._resume()

    def _fail(self, replay: _Replay) -> None:
        """Give up a replay without an answer, or without its end."""
        names = list(self._sequences) if replay.name is None else [replay.name]
        if replay.began and any(self._request_rest(replay, name) for name in names):
            return
        self._end_replay()
        if names:  # otherwise no publisher ever sent a message here
            self._retry_at = time.monotonic() + self._options.replay_cooldown
            for name in names:
                self._discard(name)
        self._resume()

    def _resume(self) -> None:
        """Apply the pending live message, after the missing ones before it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        name, number, batch = pending
        sequence = self._sequences[name]
        if sequence.applied is not None:
            if number <= sequence.applied:
                return
            if number > sequence.applied + 1:
                self._discard(name)
        self._apply(name, sequence, number, batch)

    def _handle_deadlines(self) -> None:
        now = time.monotonic()
        if self._replay is not None:
            if now >= self._replay.deadline:
                self._fail(self._replay)
        elif self._retry_at is not None and now >= self._retry_at:
            self._request_replay(0, None)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.socket.close(0)
            self._replay = None
