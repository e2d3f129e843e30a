"""One address at which KV events are published, and the one beside it where missed ones can be asked for again."""

from __future__ import annotations

import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

from warmprefix.errors import MissingExtraError
from warmprefix.residency.kv_events import (
    END,
    EventBatch,
    MalformedMessageError,
    Message,
    read_batch,
    read_message,
    replay_request,
)
from warmprefix.residency.kv_index import KvIndex
from warmprefix.residency.sequence import Arrival, Sequence

try:
    import zmq
    from zmq.utils.monitor import recv_monitor_message
except ImportError as error:
    raise MissingExtraError("events", "pyzmq") from error

__all__ = ["FeedCounts", "Link", "LinkOptions"]


_HEARTBEAT = 10_000
"""Milliseconds. A connection that died without a word is made anew."""
_CONNECTED = zmq.Event.CONNECTED | zmq.Event.ACCEPTED


@dataclass(slots=True)
class FeedCounts:
    """What a feed counts, all its links together."""

    events: int = 0
    gaps: int = 0
    replayed: int = 0
    wipes: int = 0
    malformed: int = 0
    unknown: int = 0
    lag: float = 0.0


class LinkOptions(NamedTuple):
    """As `KvEventFeed` takes them."""

    topic: str
    high_water_mark: int
    replay_timeout: float
    replay_cooldown: float


@dataclass(slots=True)
class _Replay:
    """A replay on its way."""

    socket: zmq.Socket[bytes]
    start: int
    name: Hashable | None
    """Of the source that misses something; None if all of a publisher is asked for."""
    deadline: float
    began: bool = False
    """Whether anything came."""
    unbroken: bool = True
    """Whether no connection was lost meanwhile to who publishes."""


class _HeldUp(NamedTuple):
    name: Hashable
    number: int
    batch: EventBatch


class Link:
    """Receives what one publisher publishes, in order and without gaps, and applies it to the index.

    While a replay is on its way, live messages wait in the socket. Belongs to one thread, which makes it, and closes
    it.

    What is published at an address that has a replay address beside it comes from one publisher. At one without, there
    may be several, as many as there are topics and ranks.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        replay_endpoint: str | None,
        index: KvIndex,
        counts: FeedCounts,
        options: LinkOptions,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._index = index
        self._counts = counts
        self._options = options
        self._sequences: dict[Hashable, Sequence] = {}
        self._replay: _Replay | None = None
        self._held_up: _HeldUp | None = None
        """A live message that can be applied only once those before it have come."""
        self._retry_at: float | None = None
        """When a replay that failed is tried again; none is asked for until then."""
        self._connections: set[int] = set()
        self._told = False
        """Whether anything came since a connection was lost, or all that there was, be it nothing, was replayed."""
        self._lost: set[Hashable] = set()
        """Sources of which nothing came since then, for it may have been theirs."""
        self._subscription = context.socket(zmq.SUB)
        self.monitor = self._subscription.get_monitor_socket(_CONNECTED | zmq.Event.DISCONNECTED)
        """Where it is told how the connection is; `receive` reads it."""
        try:
            self._subscribe(options)
            if replay_endpoint is not None:
                self._ask_again(0, None)
        except BaseException:
            self.close()
            raise

    def _subscribe(self, options: LinkOptions) -> None:
        subscription, endpoint = self._subscription, self._endpoint
        subscription.linger = 0
        subscription.ipv6 = "[" in endpoint
        subscription.rcvhwm = options.high_water_mark
        subscription.heartbeat_ivl, subscription.heartbeat_timeout = _HEARTBEAT, 3 * _HEARTBEAT
        subscription.subscribe(options.topic.encode())
        if "*" in endpoint:
            subscription.bind(endpoint)
        else:
            subscription.connect(endpoint)

    @property
    def heard(self) -> bool:
        """Whether who publishes here was heard of, and can still be heard."""
        return bool(self._connections) and self._told and not self._lost

    @property
    def replaying(self) -> bool:
        """Whether a replay is on its way, so that what is applied may be the half of it."""
        return self._replay is not None

    @property
    def socket(self) -> zmq.Socket[bytes]:
        """Where the next message is to be expected."""
        return self._subscription if self._replay is None else self._replay.socket

    def due(self) -> float | None:
        """When `receive` has something to do even if nothing comes; by the monotonic clock."""
        return self._retry_at if self._replay is None else self._replay.deadline

    def receive(self, most: int) -> bool:
        """Take in what is there, but no more than so many messages; whether there may be more."""
        self._keep_time()
        self._watch()
        for _ in range(most):
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
                # The gap that it leaves will be noticed.
                self._counts.malformed += 1
        return True

    def close(self) -> None:
        """Close the sockets."""
        self._subscription.disable_monitor()
        self.monitor.close(0)
        self._subscription.close(0)
        self._end_replay()

    def _watch(self) -> None:
        """Take note of connections that were made and lost."""
        while True:
            try:
                event = recv_monitor_message(self.monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            if event["event"] & _CONNECTED:
                self._connections.add(event["value"])
            elif event["value"] in self._connections:
                self._connections.remove(event["value"])
                self._told = False
                self._lost = set(self._sequences)
                if self._replay is not None:
                    self._replay.unbroken = False

    # -- live --------------------------------------------------------------------------------------------------

    def _take_live(self, message: Message) -> None:
        batch = read_batch(message.payload)
        if not self._connections:  # what came before it was lost is no sign of a new one
            self._watch()
        name = self._name(message.topic, batch)
        sequence = self._sequence(name)
        if sequence is None:
            self._index.apply(name, batch)  # which counts it as dropped
            return
        arrival = sequence.arrive(message.sequence, batch.time)
        if arrival is Arrival.SEEN:
            return
        if arrival is Arrival.RESTART:
            self._counts.wipes += 1
            self._index.wipe(name, known=True)
            sequence.reset()
            arrival = Arrival.NEXT if message.sequence == 0 else Arrival.GAP
        elif arrival is Arrival.GAP:
            self._counts.gaps += 1
        if arrival is Arrival.GAP and self._may_ask():
            self._held_up = _HeldUp(name, message.sequence, batch)
            self._ask_again(0 if sequence.applied is None else sequence.applied, name)
            return
        if arrival is Arrival.GAP:
            self._give_up(name)
        elif message.sequence == 0:
            self._index.wipe(name, known=True)  # it begins, so nothing came before
        self._apply(name, sequence, message.sequence, batch)
        self._counts.lag = max(time.time() - batch.time, 0.0)

    def _sequence(self, name: Hashable) -> Sequence | None:
        sequence = self._sequences.get(name)
        if sequence is None and len(self._sequences) < self._index.max_sources:
            self._sequences[name] = sequence = Sequence()
        return sequence

    def _name(self, topic: bytes, batch: EventBatch) -> Hashable:
        return (self._endpoint, topic if self._replay_endpoint is None else b"", batch.rank)

    def _apply(self, name: Hashable, sequence: Sequence, number: int, batch: EventBatch) -> None:
        self._index.apply(name, batch)
        sequence.apply(number, batch.time)
        if self._connections:
            self._told = True
            self._lost.discard(name)
        self._counts.events += len(batch.events)
        self._counts.unknown += batch.unknown

    def _give_up(self, name: Hashable) -> None:
        """Something this source did is lost, so it is not known what it holds."""
        self._counts.wipes += 1
        self._index.wipe(name, known=False)
        self._sequences[name].reset()

    # -- replayed ----------------------------------------------------------------------------------------------

    def _may_ask(self) -> bool:
        return self._replay_endpoint is not None and self._retry_at is None

    def _ask_again(self, start: int, name: Hashable | None) -> None:
        assert self._replay_endpoint is not None
        self._retry_at = None
        socket = self._context.socket(zmq.DEALER)  # a new one, so that late answers to an older request go nowhere
        socket.linger = 0
        socket.ipv6 = "[" in self._replay_endpoint
        socket.rcvhwm = 0  # a publisher does not wait for who reads slowly, it drops the rest of the answer
        socket.connect(self._replay_endpoint)
        socket.send_multipart(replay_request(start), zmq.NOBLOCK)
        self._replay = _Replay(socket, start, name, time.monotonic() + self._options.replay_timeout)

    def _take_replayed(self, replay: _Replay, message: Message) -> None:
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
                self._index.wipe(name, known=message.sequence == 0)
                sequence.reset()
            elif message.sequence == sequence.applied and batch.time != sequence.applied_time:
                # Not the message that is known by this number: another publisher's, which was started since.
                self._counts.wipes += 1
                self._index.wipe(name, known=True)
                sequence.reset()
                self._end_replay()
                self._ask_again(0, name)
                return
        if sequence.applied is not None:
            if message.sequence <= sequence.applied:
                return
            if message.sequence > sequence.applied + 1:
                if self._ask_for_rest(replay, name):
                    return
                self._give_up(name)  # too long ago, or what can't be read
        self._apply(name, sequence, message.sequence, batch)

    def _ask_for_rest(self, replay: _Replay, name: Hashable) -> bool:
        """Ask from where an answer broke off, if it brought anything: a publisher drops what it can't send at once."""
        applied = self._sequences[name].applied
        if applied is None or applied <= replay.start:
            return False
        self._end_replay()
        self._ask_again(applied, name)
        return True

    def _finish(self, replay: _Replay) -> None:
        """All that there was has come."""
        self._end_replay()
        if replay.name is not None and not replay.began:
            self._give_up(replay.name)
        if replay.start == 0 and replay.unbroken:
            self._told = True
            self._lost.clear()
        self._resume()

    def _fail(self, replay: _Replay) -> None:
        """The publisher does not answer, or not to the end."""
        names = list(self._sequences) if replay.name is None else [replay.name]
        if replay.began and any(self._ask_for_rest(replay, name) for name in names):
            return
        self._end_replay()
        if names:  # or nobody was ever heard there
            self._retry_at = time.monotonic() + self._options.replay_cooldown
            for name in names:
                self._give_up(name)
        self._resume()

    def _resume(self) -> None:
        """Go on with the message that could not be applied before those that were missing."""
        held_up, self._held_up = self._held_up, None
        if held_up is None:
            return
        name, number, batch = held_up
        sequence = self._sequences[name]
        if sequence.applied is not None:
            if number <= sequence.applied:
                return
            if number > sequence.applied + 1:
                self._give_up(name)
        self._apply(name, sequence, number, batch)

    def _keep_time(self) -> None:
        now = time.monotonic()
        if self._replay is not None:
            if now >= self._replay.deadline:
                self._fail(self._replay)
        elif self._retry_at is not None and now >= self._retry_at:
            self._ask_again(0, None)

    def _end_replay(self) -> None:
        if self._replay is not None:
            self._replay.socket.close(0)
            self._replay = None
