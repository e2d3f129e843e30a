"""`KvEventFeed`: receives the KV events of engines, and reports the context blocks that they make resident."""

from __future__ import annotations

import logging
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
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

__all__ = ["FeedBounds", "KvEventFeed"]

_log = logging.getLogger("warmprefix")

_POLL_SECONDS = 0.25
"""Longest time that the thread keeps the feed alive while no message comes."""
_SETTLE_SECONDS = 0.02
"""After this time an engine has published the blocks of a served prompt."""
_FAILURE_PAUSE_SECONDS = 1.0
_IDLE_SECONDS = 3_600.0
_PROMPTS_PER_ROUND = 64
"""Prompts searched for their context blocks before the thread's other work."""


@dataclass(frozen=True, slots=True)
class FeedBounds:
    """Bounds of a `KvEventFeed` on memory and time.

    Raises:
        ValueError: A bound is out of range.
    """

    max_kv_blocks: int = 1_048_576
    """Most KV blocks in the index; about 250 bytes each."""
    max_prompts: int = 4_096
    """Most prompts remembered; beyond it the least recently served one is forgotten."""
    max_prompt_blocks: int = 131_072
    """Most KV blocks of these prompts, shared ones counted once; about 350 bytes each."""
    max_queue: int = 1_024
    """Most prompts that wait to be searched; beyond it the oldest is dropped."""
    max_messages: int = 1_000
    """Most messages applied before the target is notified."""
    high_water_mark: int = 100_000
    """Most messages that wait in each socket; beyond it the publisher drops them."""
    replay_timeout: float = 2.0
    """Seconds without an answer after which a replay fails."""
    replay_cooldown: float = 30.0
    """Seconds between a failed replay and the next attempt."""

    def __post_init__(self) -> None:
        for name in ("max_kv_blocks", "max_prompts", "max_prompt_blocks", "max_queue", "max_messages"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be 1 or more, got {getattr(self, name)}")
        for name in ("replay_timeout", "replay_cooldown"):
            if getattr(self, name) <= 0:
                raise ValueError(f"{name} must be positive, got {getattr(self, name)}")
        if self.high_water_mark < 0:
            raise ValueError(f"high_water_mark must be 0 or more, got {self.high_water_mark}")


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
        count_copies: bool = True,
        bounds: FeedBounds | None = None,
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
            count_copies: True if engines that store a KV block twice also remove it twice. False if requests ask vLLM
                for full reports (`kv_cache_report_mode`).
            bounds: Bounds on memory and time; None for the defaults.
        """
        self._bounds = FeedBounds() if bounds is None else bounds
        self._endpoints = endpoints_of(endpoint, replay, ranks)
        self._options = SubscriptionOptions(
            topic, self._bounds.high_water_mark, self._bounds.replay_timeout, self._bounds.replay_cooldown
        )
        self._new_index = partial(
            KvIndex,
            max_kv_blocks=self._bounds.max_kv_blocks,
            max_prompts=self._bounds.max_prompts,
            max_prompt_blocks=self._bounds.max_prompt_blocks,
            count_copies=count_copies,
        )
        self._tokenizer = tokenizer
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
        self._receiving = Ticker(self._receive_once, self._receiver.close, "warmprefix-kv-events")
        self._mapping = Ticker(self._map_prompts, lambda: None, "warmprefix-kv-spans")

    # -- called by the planner ---------------------------------------------------------------------------------

    def follow(self, target: ResidencyTarget) -> None:
        self._target = weakref.ref(target)
        if not self._closed:
            self._receiving.start()

    def remember(self, served: ServedPrompt) -> None:
        with self._lock:
            if self._closed:
                return
            if len(self._served) >= self._bounds.max_queue:
                self._served.popleft()
                self._dropped += 1
            self._served.append((time.monotonic() + _SETTLE_SECONDS, served))
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

    # -- receiving ---------------------------------------------------------------------------------------------

    def _receive_once(self) -> float:
        """Wait for messages, apply them, and report changes; return the pause before the next round."""
        if self._closed:
            return 0.0
        try:
            self._receiver.wait(min(_POLL_SECONDS, self._until_settled()))
            prompts = self._take_mapped()
            self._receiver.receive(self._bounds.max_messages)
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
        return 0.0

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
