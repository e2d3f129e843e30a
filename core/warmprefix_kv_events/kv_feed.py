"""`KvEventFeed`: receives the KV events of engines, and reports the context blocks that they make resident."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial

from warmprefix.errors import log_failure
from warmprefix.forks import fork_safe_lock, in_each_process
from warmprefix.residency import FeedStats, ResidencyTarget, ServedPrompt
from warmprefix.ticker import Ticker
from warmprefix_kv_events.kv_index import KvIndex
from warmprefix_kv_events.prompt_tree import MappedPrompt
from warmprefix_kv_events.receiver import Receiver, endpoints_of
from warmprefix_kv_events.spans import SpanFinder
from warmprefix_kv_events.subscription import SubscriptionOptions

__all__ = ["KvEventFeed"]

_log = logging.getLogger("warmprefix")

_POLL_SECONDS = 0.25
"""Longest time that the thread keeps the feed alive while no message comes."""
_SETTLE_SECONDS = 0.02
"""After this time an engine has published the blocks of a served prompt."""
_FAILURE_PAUSE_SECONDS = 1.0
_TASK_PAUSE_SECONDS = 0.005
_IDLE_SECONDS = 3_600.0
_PROMPTS_PER_ROUND = 64
"""Prompts searched for their context blocks before the thread's other work."""


class KvEventFeed:
    """A `ResidencyFeed` that receives the KV events of vLLM and SGLang over ZeroMQ.

    Two daemon threads do all of the work, and no request waits for them. One receives events and notifies the planner
    when more or fewer context blocks of a remembered prompt are resident. The other finds the context blocks in served
    prompts, which may call the engine's tokenizer.

    The state of an engine is *complete* if the feed received every event since the engine started, or since its cache
    was last empty. Missed messages are requested at the replay address; without one, or if they are gone, the state of
    that engine is discarded. Until it is complete again, stored blocks count as resident and removed blocks as gone,
    and nothing is reported on others. The state of an engine that restarts is complete from its first message on.

    All engines of one feed serve the same model; use another feed and another planner for another model.

    In a forked process the feed starts over with the next prompt that is remembered.
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
        """Prepare a feed; it connects and starts its threads when a target follows.

        Raises ValueError for an address that is not usable, a `replay` that does not match, or a bound out of range.

        Args:
            endpoint: Address at which engines publish, such as `tcp://engine:5557`; one per engine. The feed binds an
                address with `*` as its host, for engines that connect.
            tokenizer: Returns a text's token ids, without special tokens: an `EngineTokenizer`, or the model's own.
            replay: Address at which each engine answers replay requests; None for an engine that does not.
            ranks: Data-parallel ranks per engine; each uses the ports above those of the rank before it.
            topic: Prefix of the subscribed topics.
            thread: False to receive in a task: await `run`.
            max_kv_blocks: Most KV blocks in the index; about 250 bytes each.
            max_prompts: Most prompts remembered; beyond it the least recently served one is forgotten.
            max_prompt_blocks: Most KV blocks of these prompts, shared ones counted once; about 350 bytes each.
            max_queue: Most prompts that wait to be searched; beyond it the oldest is dropped.
            max_messages: Most messages applied before the target is notified.
            high_water_mark: Most messages that wait in each socket; beyond it the publisher drops them.
            replay_timeout: Seconds without an answer after which a replay fails.
            replay_cooldown: Seconds between a failed replay and the next attempt.
            count_copies: True if engines that store a KV block twice also remove it twice. False if requests ask vLLM
                for full reports (`kv_cache_report_mode`).
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
        self._options = SubscriptionOptions(topic, high_water_mark, replay_timeout, replay_cooldown)
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
        self._target: Callable[[], ResidencyTarget | None] = lambda: None
        self._closed = False
        self._lock = fork_safe_lock()
        in_each_process(self._begin)

    def _begin(self) -> None:
        """Create the state that each process has for itself."""
        self._receiver = Receiver(self._endpoints, self._options, self._new_index())
        self._finder = SpanFinder(self._tokenizer)
        self._served: deque[tuple[float, ServedPrompt]] = deque()
        self._mapped: deque[tuple[float, MappedPrompt]] = deque()  # one thread appends, one takes
        self._dropped = self._unmapped = self._failures = 0
        self._running = False
        self._receiving = Ticker(self._receive_once, self._receiver.close, "warmprefix-kv-events")
        self._mapping = Ticker(self._map_prompts, lambda: None, "warmprefix-kv-spans")

    # -- called by the planner ---------------------------------------------------------------------------------

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
            self._served.append((time.monotonic() + _SETTLE_SECONDS, served))
        if self._in_thread:
            self._receiving.start()
        self._mapping.start()
        self._mapping.wake()

    def is_complete(self, cache_salt: str | None) -> bool:
        return not self._closed and self._receiver.complete[cache_salt is not None]

    def stats(self) -> FeedStats:
        index, counts = self._receiver.index, asdict(self._receiver.counts)
        counts["unknown"] += index.unknown
        return FeedStats(
            sources=index.sources,
            connected=self.is_complete(None),
            dropped=self._dropped + index.dropped,
            unmapped=self._unmapped,
            kv_blocks=index.kv_blocks,
            prompts=index.prompts,
            failures=self._failures,
            **counts,
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
        """Receive until the feed is closed or this is cancelled, for feeds with `thread=False`.

        One round takes some milliseconds of the event loop's time, about 20 with `max_messages` messages. Raises
        RuntimeError if a thread or another task receives already.
        """
        import asyncio  # a slow import, which a caller with an event loop has made already

        if self._in_thread or self._running:
            raise RuntimeError("run must be called with thread=False, by one task at a time; the feed receives already")
        self._running = True
        try:
            while not self._closed:
                await asyncio.sleep(self._receive(0.0))
        finally:
            if self._closed:
                self._receiver.close()
            else:  # cancelled: events are missed until another task receives
                self._receiver.reset(self._new_index())
            self._running = False

    def _receive_once(self) -> float:
        return 0.0 if self._closed else self._receive(_POLL_SECONDS)

    def _receive(self, wait: float) -> float:
        """Wait for messages, apply them, and report changes; return the pause before the next round."""
        try:
            self._receiver.wait(min(wait, self._until_settled()))
            prompts = self._take_mapped()
            more = self._receiver.receive(self._max_messages)
            for prompt in prompts:
                self._receiver.index.remember(prompt)
            self._notify_target()
        except Exception:
            # Events of this round are lost, so the index is no longer reliable.
            self._receiver.reset(self._new_index())
            self._failures += 1
            level = logging.ERROR if self._failures == 1 else logging.DEBUG
            _log.log(level, "The feed of KV events failed and starts over", exc_info=True)
            return _FAILURE_PAUSE_SECONDS
        return 0.0 if more or wait else _TASK_PAUSE_SECONDS

    def _notify_target(self) -> None:
        receiver = self._receiver
        is_current = receiver.is_current
        if not receiver.replaying:
            changes = receiver.index.changes(all_connected=is_current)
            target = self._target() if changes else None
            if target is not None:
                for change in changes:
                    target.residency_changed(*change)
        receiver.update_complete(is_current)

    # -- finding context blocks --------------------------------------------------------------------------------

    def _map_prompts(self) -> float:
        for _ in range(_PROMPTS_PER_ROUND):
            with self._lock:
                if not self._served or self._closed:
                    return _IDLE_SECONDS
                due, served = self._served.popleft()
            try:
                mapped = self._finder.map(served)
            except Exception:
                mapped = None
                if not self._unmapped:
                    log_failure(_log, "The feed of KV events cannot tokenize context blocks", first=True)
            if mapped is None:
                self._unmapped += 1
            else:
                self._mapped.append((due, mapped))
                self._receiver.wake()
        return 0.0

    def _until_settled(self) -> float:
        return max(self._mapped[0][0] - time.monotonic(), 0.0) if self._mapped else _POLL_SECONDS

    def _take_mapped(self) -> list[MappedPrompt]:
        prompts: list[MappedPrompt] = []
        while self._until_settled() == 0.0:
            prompts.append(self._mapped.popleft()[1])
        return prompts
