"""A listener, a publisher, and feeds that are closed after the test."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from kv_publisher import KvPublisher
from warmprefix.plan import Scope
from warmprefix.residency import FoundCheckpoints
from warmprefix_kv_events.kv_feed import FeedBounds, KvEventFeed


class Listener:
    """A `ResidencyTarget` that records the changes."""

    def __init__(self) -> None:
        self.changes: list[tuple[Scope, tuple[bytes, ...], int]] = []

    def residency_changed(
        self, scope: Scope, keys: Sequence[bytes], resident_blocks: int, checkpoints: FoundCheckpoints | None = None
    ) -> None:
        self.changes.append((scope, tuple(keys), resident_blocks))


def characters(text: str) -> list[int]:
    """Return one token per character."""
    return [ord(character) for character in text]


def wait_until(condition: Callable[[], object], timeout: float = 60.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, "the condition did not hold in time"
        time.sleep(0.005)


@pytest.fixture
def until() -> Callable[[Callable[[], object]], None]:
    return wait_until


@pytest.fixture
def listener() -> Listener:
    return Listener()


@pytest.fixture
def publisher() -> Iterator[KvPublisher]:
    with KvPublisher() as publisher:
        yield publisher


@pytest.fixture
def feed_of(listener: Listener) -> Iterator[Callable[..., KvEventFeed]]:
    """Return a factory of feeds that are connected and have replayed earlier messages."""
    feeds: list[KvEventFeed] = []

    def make(*publishers: KvPublisher, replay: bool = True, **options: Any) -> KvEventFeed:
        options.setdefault("tokenizer", characters)
        bounds = {name: options.pop(name) for name in FeedBounds.__slots__ if name in options}
        bounds.setdefault("replay_timeout", 5.0)  # a busy machine answers late
        feed = KvEventFeed(
            [publisher.endpoint for publisher in publishers],
            replay=[publisher.replay_endpoint for publisher in publishers] if replay else None,
            bounds=FeedBounds(**bounds),
            **options,
        )
        feeds.append(feed)
        feed.follow(listener)
        for publisher in publishers:
            publisher.wait_for_subscriber()
        receiver = feed._receiver
        wait_until(lambda: len(receiver._subscriptions) == len(publishers) and not receiver.replaying)
        return feed

    yield make
    for feed in feeds:
        feed.close()
