"""`KvEventFeed`: listens to what engines publish of their prefix caches, and tells what that makes resident."""

from __future__ import annotations

import logging
import math
import socket
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue

from warmprefix.errors import MissingExtraError, log_failure
from warmprefix.forks import in_each_process
from warmprefix.residency.base import FeedStats, ResidencyTarget, ServedPrompt
from warmprefix.residency.endpoints import Endpoint, endpoints_of
from warmprefix.residency.kv_index import KvIndex
from warmprefix.residency.kv_prompts import Change, MappedPrompt
from warmprefix.residency.link import FeedCounts, Link, LinkOptions
from warmprefix.residency.spans import SpanFinder
from warmprefix.ticker import Ticker

try:
    import zmq
except ImportError as error:
    raise MissingExtraError("events", "pyzmq") from error

__all__ = ["KvEventFeed"]

_log = logging.getLogger("warmprefix")

_LONGEST_WAIT = 0.25
"""Seconds for which the thread holds the feed while nothing comes."""
_SETTLING = 0.02
"""Seconds after which an engine has published what a prompt that was served added."""
_AFTER_FAILURE = 1.0
_MOST_MAPPED = 64
"""Prompts searched for their context blocks before others that use the thread's time are looked at."""


class KvEventFeed:
    """A `ResidencyFeed` by way of the KV events that vLLM and SGLang publish over ZeroMQ.

    Two daemon threads do all of the work, and no request waits for them. One receives: it applies what is published,
    asks again for what was missed, and tells the planner whenever more or fewer of a remembered prompt's context blocks
    are resident. The other finds the context blocks in the prompts that were served, which may mean asking the engine's
    tokenizer.

    What an engine holds is *known* if everything it published since it started, or since it was last empty, was heard.
    Messages that were missed are asked for at the replay address; if there is none, or they are gone, what was known of
    that engine is forgotten. Until it is known again, blocks that are heard of count as resident, and blocks that are
    removed as gone, but of others nothing is said. An engine that restarts is known from its first message on.

    All engines of one feed serve the same model; another model's have a feed, and a planner, of their own.

    In a forked process the feed begins anew with the next prompt that is remembered.
    """

    def __init__(
        self,
        endpoint: str | Sequence[str],
        *,
        tokenizer: Callable[[str], Sequence[int]],
        replay: str | Sequence[str | None] | None = None,
        ranks: int = 1,
        topic: str = "",
        thread: bool = True,
        max_kv_blocks: int = 1_048_576,
        max_prompts: int = 4_096,
        max_prompt_blocks: int = 131_072,
        max_queue: int = 1_024,
        max_messages: int = 1_000,
        high_water_mark: int = 100_000,
        replay_timeout: float = 2.0,
        replay_cooldown: float = 30.0,
        count_copies: bool = True,
    ) -> None:
        """Nothing is connected, and no thread runs, before somebody follows.

        Args:
            endpoint: Where engines publish, such as `tcp://engine:5557`; one address an engine. One with a `*` for its
                host is bound instead, for engines that connect.
            tokenizer: A text's token ids, without special tokens: an `EngineTokenizer`, or the model's own.
            replay: Where each of them answers for what was missed; None for those that don't.
            ranks: Data-parallel ranks an engine; each has ports of its own, one above the other.
            topic: What the topics begin with that are subscribed.
            thread: False to have a task receive: await `run`.
            max_kv_blocks: Most KV blocks of which it is remembered that they are held; some 250 bytes each.
            max_prompts: Most prompts remembered; beyond it the one not served longest is forgotten.
            max_prompt_blocks: Most KV blocks of which those consist, shared ones counted once; some 350 bytes each.
            max_queue: Most prompts that wait to be searched; beyond it the oldest is dropped.
            max_messages: Most that are taken in before others are told what changed.
            high_water_mark: Most that wait in each socket; beyond it the publisher drops them.
            replay_timeout: Seconds without an answer after which a replay has failed.
            replay_cooldown: Seconds before another is asked for then.
            count_copies: Whether engines that store a KV block twice also remove it twice. False if requests ask vLLM
                for full reports (`kv_cache_report_mode`).

        Raises:
            ValueError: An address can't be used, `replay` does not match, or a bound is out of range.
        """
        for name, value in (("max_queue", max_queue), ("max_messages", max_messages)):
            if value < 1:
                raise ValueError(f"{name} must be 1 or more, got {value}")
        for name, seconds in (("replay_timeout", replay_timeout), ("replay_cooldown", replay_cooldown)):
            if seconds <= 0:
                raise ValueError(f"{name} must be positive, got {seconds}")
        if high_water_mark < 0:
            raise ValueError(f"high_water_mark must be 0 or more, got {high_water_mark}")
        self._endpoints = endpoints_of(endpoint, replay, ranks)
        self._options = LinkOptions(topic, high_water_mark, replay_timeout, replay_cooldown)
        self._new_index = partial(
            KvIndex,
            max_kv_blocks=max_kv_blocks,
            max_prompts=max_prompts,
            max_prompt_blocks=max_prompt_blocks,
            count_copies=count_copies,
        )
        self._tokenizer = tokenizer
        self._in_thread = thread
        self._max_queue = max_queue
        self._max_messages = max_messages
        self._target: Callable[[], ResidencyTarget | None] = _nobody
        self._closed = False
        in_each_process(self._begin)

    def _begin(self) -> None:
        """What each process has for itself."""
        self._receiver = _Receiver(self._endpoints, self._options, self._new_index())
        self._finder = SpanFinder(self._tokenizer)
        self._mapped: SimpleQueue[tuple[float, MappedPrompt]] = SimpleQueue()
        self._not_due: tuple[float, MappedPrompt] | None = None
        self._served: deque[tuple[float, ServedPrompt]] = deque()
        self._dropped = self._unmapped = self._failures = 0
        self._running = False
        self._lock = threading.RLock()
        self._receiving = Ticker(self._receive_once, self._receiver.close, "warmprefix-kv-events")
        self._mapping = Ticker(self._map_some, _nothing, "warmprefix-kv-spans")

    # -- for the planner ---------------------------------------------------------------------------------------

    def follow(self, target: ResidencyTarget) -> None:
        self._target = weakref.ref(target)
        if self._in_thread and not self._closed:
            self._receiving.start()

    def remember(self, served: ServedPrompt) -> None:
        with self._lock:
            if self._closed:
                return
            if len(self._served) >= self._max_queue:
                self._served.popleft()
                self._dropped += 1
            self._served.append((time.monotonic() + _SETTLING, served))
        if self._in_thread:
            self._receiving.start()
        self._mapping.start()
        self._mapping.wake()

    def knows(self, cache_salt: str | None) -> bool:
        return not self._closed and self._receiver.known[cache_salt is not None]

    def stats(self) -> FeedStats:
        receiver = self._receiver
        index, counts = receiver.index, receiver.counts
        return FeedStats(
            sources=index.sources,
            connected=self.knows(None),
            events=counts.events,
            gaps=counts.gaps,
            replayed=counts.replayed,
            wipes=counts.wipes,
            malformed=counts.malformed,
            unknown=counts.unknown + index.unknown,
            dropped=self._dropped + index.dropped,
            unmapped=self._unmapped,
            lag=counts.lag,
            kv_blocks=index.kv_blocks,
            prompts=index.prompts,
            failures=self._failures,
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self._served.clear()
        self._receiver.wake()
        self._mapping.stop(0.0)
        self._receiving.stop(2.0)
        if not self._running and not self._in_thread:
            self._receiver.close()

    # -- receiving ---------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Receive until the feed is closed, or this is cancelled; for feeds made with `thread=False`.

        What is taken in at once takes some milliseconds of the event loop's time, `max_messages` some 20.

        Raises:
            RuntimeError: A thread receives, or another task does.
        """
        import asyncio  # it takes long to import, and who calls this has it

        if self._in_thread or self._running:
            raise RuntimeError("this feed already receives")
        self._running = True
        try:
            while not self._closed:
                await asyncio.sleep(self._receive(0.0))
        finally:
            if self._closed:
                self._receiver.close()
            else:  # it was cancelled, and another task may receive later; until then nothing is heard
                self._receiver.reset(self._new_index())
            self._running = False

    def _receive_once(self) -> float:
        if self._closed:
            return 0.0
        return self._receive(_LONGEST_WAIT)

    def _receive(self, wait: float) -> float:
        """One round: wait for something to come, take it in, tell what changed. Returns the pause before the next."""
        try:
            self._receiver.wait(min(wait, self._until_settled()))
            prompts = self._take_mapped()
            more = self._receiver.receive(self._max_messages)
            for prompt in prompts:
                self._receiver.index.remember(prompt)
            self._tell()
        except Exception:
            # What was being taken in is lost, so nothing that is known may be trusted.
            self._receiver.reset(self._new_index())
            self._failures += 1
            level = logging.ERROR if self._failures == 1 else logging.DEBUG
            _log.log(level, "The feed of KV events failed and begins anew", exc_info=True)
            return _AFTER_FAILURE
        return 0.0 if more or wait else _TASK_PAUSE

    def _tell(self) -> None:
        receiver = self._receiver
        heard = receiver.heard
        if not receiver.replaying:
            self._tell_changes(receiver.index.changes(all_heard=heard))
        receiver.take_stock(heard)

    def _tell_changes(self, changes: Sequence[Change]) -> None:
        if not changes:
            return
        target = self._target()
        if target is not None:
            for change in changes:
                target.residency_changed(change.scope, change.keys, change.resident_blocks)

    # -- finding context blocks --------------------------------------------------------------------------------

    def _map_some(self) -> float:
        for _ in range(_MOST_MAPPED):
            with self._lock:
                if not self._served or self._closed:
                    return _LONGEST_SLEEP
                due, served = self._served.popleft()
            try:
                mapped = self._finder.map(served)
            except Exception:
                mapped = None
                if not self._unmapped:
                    log_failure(_log, "The feed of KV events can't tokenize context blocks", first=True)
            if mapped is None:
                self._unmapped += 1
            else:
                self._mapped.put((due, mapped))
                self._receiver.wake()
        return 0.0

    def _until_settled(self) -> float:
        if self._not_due is None:
            with suppress(Empty):
                self._not_due = self._mapped.get_nowait()
        return _LONGEST_WAIT if self._not_due is None else max(self._not_due[0] - time.monotonic(), 0.0)

    def _take_mapped(self) -> list[MappedPrompt]:
        prompts: list[MappedPrompt] = []
        while self._until_settled() == 0.0 and self._not_due is not None:
            prompts.append(self._not_due[1])
            self._not_due = None
        return prompts


_TASK_PAUSE = 0.005
_LONGEST_SLEEP = 3_600.0


def _nobody() -> None:
    return None


def _nothing() -> None: ...


class _Receiver:
    """The sockets, and what was heard from them. Belongs to the thread or task that receives."""

    def __init__(self, endpoints: Sequence[Endpoint], options: LinkOptions, index: KvIndex) -> None:
        self._endpoints = endpoints
        self._options = options
        self.index = index
        self.counts = FeedCounts()
        self.known = (False, False)
        """Whether all that is held of prompts without a salt is known, and with one; any thread may look."""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._links: list[Link] = []
        self._woken: socket.socket | None = None
        self._waker: socket.socket | None = None

    @property
    def heard(self) -> bool:
        """Whether there is none that was not heard of, or may be gone."""
        return bool(self._links) and all(link.heard for link in self._links)

    @property
    def replaying(self) -> bool:
        return any(link.replaying for link in self._links)

    def wake(self) -> None:
        """End a `wait`; from any thread."""
        waker = self._waker
        if waker is not None:
            with suppress(OSError):  # it is full, so it wakes anyway; or closed
                waker.send(b"\0")

    def wait(self, seconds: float) -> None:
        """Until something comes or is due, but no longer."""
        woken = self._connect()
        now = time.monotonic()
        poller = zmq.Poller()
        poller.register(woken, zmq.POLLIN)
        for link in self._links:
            poller.register(link.socket, zmq.POLLIN)
            poller.register(link.monitor, zmq.POLLIN)
            due = link.due()
            if due is not None:
                seconds = min(seconds, due - now)
        poller.poll(math.ceil(max(seconds, 0.0) * 1_000))
        with suppress(BlockingIOError):
            while woken.recv(4_096):
                pass

    def receive(self, most: int) -> bool:
        """Take in what came, no more than so many messages a link; whether there may be more."""
        more = [link.receive(most) for link in self._links]  # each of them, so no shortcut
        return any(more)

    def take_stock(self, heard: bool) -> None:
        """Note what is known, after everything that changed was told."""
        sure = heard and not self.replaying
        self.known = (sure and self.index.certain(salted=False), sure and self.index.certain(salted=True))

    def reset(self, index: KvIndex) -> None:
        """Begin anew, with nothing known."""
        self._disconnect()
        self.index = index

    def close(self) -> None:
        self._disconnect()

    def _connect(self) -> socket.socket:
        """Make the sockets if there are none; returns the one that `wake` writes to."""
        if self._woken is None:
            self._woken, self._waker = socket.socketpair()
            self._woken.setblocking(False)
            self._waker.setblocking(False)
            self._context = zmq.Context()
            for endpoint in self._endpoints:
                link = Link(self._context, endpoint.publishes, endpoint.replays, self.index, self.counts, self._options)
                self._links.append(link)
        return self._woken

    def _disconnect(self) -> None:
        self.known = (False, False)
        for link in self._links:
            link.close()
        self._links = []
        for end in (self._waker, self._woken):
            if end is not None:
                end.close()
        self._waker = self._woken = None
        context, self._context = self._context, None
        if context is not None:
            context.destroy(linger=0)  # `term` waits for ever for a socket that was not closed
