"""The feed with real sockets, and failures between publisher and feed."""

from __future__ import annotations

import gc
import logging
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import zmq

from kv_publisher import KvPublisher, removed, stored
from warmprefix.plan import Scope
from warmprefix.residency import FoundCheckpoints, ResidencyFeed, ServedPrompt
from warmprefix_kv_events.kv_feed import KvEventFeed

Until = Callable[[Callable[[], object]], None]
Make = Callable[..., KvEventFeed]

SCOPE = Scope(None, None, None)
PREAMBLE = list(range(1_000, 1_008))
TEXTS = ("abcdefgh", "ijklmnop", "qrstuvwx")
TOKENS = PREAMBLE + [ord(character) for text in TEXTS for character in text]
"""Two KV blocks of four tokens of preamble, then two for each context block."""
HASHES = list(range(1, 9))


def served(texts: Sequence[str] = TEXTS, salt: str | None = None, scope: Scope = SCOPE) -> ServedPrompt:
    tokens = PREAMBLE + [ord(character) for text in texts for character in text] + [1, 2, 3]
    return ServedPrompt(scope, salt, tuple(text.encode() for text in texts), tuple(texts), tokens)


def all_stored(first: int = 0, last: int = 8, **fields: Any) -> dict[str, object]:
    parent = HASHES[first - 1] if first else None
    return stored(HASHES[first:last], parent, TOKENS[4 * first : 4 * last], 4, **fields)


def keys(count: int) -> tuple[bytes, ...]:
    return tuple(text.encode() for text in TEXTS[:count])


def remembered(feed: KvEventFeed, until: Until, count: int = 1) -> None:
    until(lambda: feed.stats().prompts == count)


class Target:
    def residency_changed(
        self, scope: Scope, keys: Sequence[bytes], resident_blocks: int, checkpoints: FoundCheckpoints | None = None
    ) -> None: ...


def test_it_implements_the_feed_protocol(feed_of: Make) -> None:
    assert isinstance(KvEventFeed("tcp://127.0.0.1:9", tokenizer=ord), ResidencyFeed)  # type: ignore[arg-type]


def test_removed_and_restored_blocks_are_reported(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8 and feed.stats().connected)
    feed.remember(served())
    remembered(feed, until)
    assert listener.changes == []  # the target assumes it already
    publisher.publish(removed(8), removed(7))
    until(lambda: listener.changes)
    assert listener.changes == [(SCOPE, keys(3), 2)]
    publisher.publish(removed(6))
    until(lambda: len(listener.changes) == 2)
    assert listener.changes[-1] == (SCOPE, keys(2), 1)
    publisher.publish(all_stored(5))
    until(lambda: len(listener.changes) == 3)
    assert listener.changes[-1] == (SCOPE, keys(3), 3)
    stats = feed.stats()
    assert (stats.sources, stats.connected, stats.events, stats.kv_blocks, stats.prompts) == (1, True, 5, 8, 1)
    assert (stats.gaps, stats.wipes, stats.malformed, stats.unknown, stats.dropped, stats.unmapped) == (0,) * 6
    assert 0 <= stats.lag < 60


def test_a_partly_removed_context_block_is_not_resident(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    """A context block counts only with all of its KV blocks."""
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 7))
    until(lambda: feed.stats().kv_blocks == 7)
    feed.remember(served())
    until(lambda: listener.changes)
    assert listener.changes == [(SCOPE, keys(3), 2)]


def test_clearing_the_cache_is_reported(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    remembered(feed, until)
    publisher.publish({"type": "AllBlocksCleared"})
    until(lambda: listener.changes)
    assert listener.changes == [(SCOPE, keys(1), 0)]
    assert feed.stats().kv_blocks == 0
    assert feed.stats().connected


def test_prompts_with_common_blocks_are_reported_once(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    feed.remember(served(TEXTS[:2]))
    remembered(feed, until, 2)
    publisher.publish(removed(*HASHES[3:][::-1]))
    until(lambda: listener.changes)
    assert listener.changes == [(SCOPE, keys(1), 0)]


def test_prompts_with_different_salts_share_no_blocks(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(extra_keys=[["a"], *[None] * 7]))
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served(salt="a", scope=Scope("a", None, None)))
    feed.remember(served(salt="b", scope=Scope("b", None, None)))
    remembered(feed, until, 2)
    until(lambda: listener.changes)
    assert listener.changes == [(Scope("b", None, None), keys(1), 0)]


@pytest.mark.parametrize("sends_topic", [True, False])
def test_a_late_feed_replays_everything(feed_of: Make, listener: Any, until: Until, sends_topic: bool) -> None:
    with KvPublisher(sends_topic=sends_topic) as publisher:
        publisher.publish(all_stored(0, 4))
        publisher.publish(all_stored(4, 8))
        feed = feed_of(publisher)
        until(lambda: feed.stats().connected)
        stats = feed.stats()
        assert (stats.kv_blocks, stats.replayed, stats.gaps, stats.wipes) == (8, 2, 0, 0)
        publisher.publish(removed(8))
        until(lambda: feed.stats().kv_blocks == 7)
        assert publisher.replay_requests == [0]


@pytest.mark.parametrize("sends_topic", [True, False])
def test_a_gap_is_replayed(feed_of: Make, listener: Any, until: Until, sends_topic: bool) -> None:
    with KvPublisher(sends_topic=sends_topic) as publisher:
        feed = feed_of(publisher)
        publisher.publish(all_stored(0, 1))
        publisher.publish(all_stored(1, 2))
        until(lambda: feed.stats().kv_blocks == 2)
        publisher.publish(all_stored(2, 4), sent=False)
        publisher.publish(all_stored(4, 6), sent=False)
        publisher.publish(all_stored(6, 8))
        until(lambda: feed.stats().kv_blocks == 8 and feed.stats().connected)
        stats = feed.stats()
        assert (stats.gaps, stats.wipes, stats.events, stats.unknown) == (1, 0, 5, 0)
        assert publisher.replay_requests == [0, 1]  # from the last applied one, to check that it is the same


def test_a_gap_without_a_replay_address_discards_the_state(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    feed = feed_of(publisher, replay=False)
    publisher.publish(all_stored())
    until(lambda: feed.stats().connected)
    feed.remember(served())
    remembered(feed, until)
    publisher.publish(removed(99), sent=False)
    publisher.publish(removed(98))
    until(lambda: feed.stats().wipes == 1 and not feed.stats().connected)
    stats = feed.stats()
    assert (stats.gaps, stats.kv_blocks) == (1, 0)
    assert listener.changes == []  # its residency is uncertain
    publisher.publish(all_stored(0, 6))
    until(lambda: listener.changes)
    assert listener.changes == [(SCOPE, keys(2), 2)]  # the third is uncertain
    publisher.publish(removed(6))
    until(lambda: len(listener.changes) == 2)
    assert listener.changes[-1] == (SCOPE, keys(2), 1)
    publisher.publish({"type": "AllBlocksCleared"})
    until(lambda: feed.stats().connected)
    assert feed.stats().kv_blocks == 0


def test_a_gap_whose_batches_are_gone_discards_the_state(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 4))
    until(lambda: feed.stats().connected)
    publisher.publish(removed(4), sent=False, kept=False)
    publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
    until(lambda: feed.stats().wipes == 1)
    until(lambda: feed.stats().kv_blocks == 1 and not feed.stats().connected)
    assert feed.stats().gaps == 1


def test_a_replay_without_its_beginning_is_incomplete(feed_of: Make, listener: Any, until: Until) -> None:
    with KvPublisher(buffer=1) as publisher:
        publisher.publish(all_stored(0, 2))
        publisher.publish(stored([50], None, [7, 7, 7, 7], 4), all_stored(2, 4))
        feed = feed_of(publisher)
        until(lambda: feed.stats().replayed == 1)
        stats = feed.stats()
        assert (stats.kv_blocks, stats.unknown, stats.connected) == (1, 2, False)
        feed.remember(served())
        remembered(feed, until)
        publisher.publish(removed(50))
        until(lambda: feed.stats().kv_blocks == 0)
        assert listener.changes == []


def test_a_restart_discards_the_state(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 4))
    publisher.publish(all_stored(4, 8))
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    remembered(feed, until)
    publisher.restart()
    publisher.publish(all_stored(0, 6))
    until(lambda: listener.changes)
    stats = feed.stats()
    assert listener.changes == [(SCOPE, keys(3), 2)]
    assert (stats.wipes, stats.gaps, stats.kv_blocks, stats.connected) == (1, 0, 6, True)


def test_a_restart_whose_beginning_was_missed_is_replayed(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    feed = feed_of(publisher)
    for first in range(0, 8, 2):
        publisher.publish(all_stored(first, first + 2))
    until(lambda: feed.stats().kv_blocks == 8)
    publisher.restart()
    publisher.publish(all_stored(0, 2), sent=False)
    publisher.publish(all_stored(2, 4))
    until(lambda: feed.stats().wipes == 1 and feed.stats().connected and feed.stats().kv_blocks == 4)
    assert publisher.replay_requests == [0, 0]


def test_a_restart_is_detected_when_its_numbers_passed_the_old_ones(
    publisher: KvPublisher, feed_of: Make, until: Until
) -> None:
    """The new process published more than the old one, all of it missed: the numbers alone look like a gap."""
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 6))
    publisher.publish(all_stored(6, 8))
    until(lambda: feed.stats().kv_blocks == 8)
    publisher.restart()
    for position in range(5):
        publisher.publish(stored([60 + position], None, [position] * 4, 4), sent=False)
    publisher.publish(stored([70], None, [7] * 4, 4))
    until(lambda: feed.stats().connected and feed.stats().kv_blocks == 6)
    assert feed.stats().wipes == 1
    assert publisher.replay_requests == [0, 1, 0]


def test_a_failed_replay_is_repeated_after_the_cooldown(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    """Until a replay succeeds, the state of the engine is incomplete."""
    publisher.replays = False
    feed = feed_of(publisher, replay_timeout=0.1, replay_cooldown=0.6)
    publisher.publish(all_stored(0, 2), sent=False)
    publisher.publish(all_stored(2, 4))
    until(lambda: feed.stats().wipes >= 1)
    requested = len(publisher.replay_requests)
    publisher.publish(removed(99), sent=False)
    publisher.publish(removed(98))
    until(lambda: feed.stats().gaps == 2 and not feed.stats().connected)
    assert len(publisher.replay_requests) == requested
    publisher.replays = True
    until(lambda: feed.stats().connected)
    assert feed.stats().kv_blocks == 4
    assert len(publisher.replay_requests) == requested + 1


def test_an_engine_that_starts_after_the_feed(feed_of: Make, listener: Any, until: Until) -> None:
    with KvPublisher() as gone:
        ports = [int(address.rpartition(":")[2]) for address in (gone.endpoint, gone.replay_endpoint)]
        feed = feed_of(gone, replay_timeout=0.1)
    until(lambda: not any(subscription.replaying for subscription in feed._receiver._subscriptions))
    with KvPublisher(port=ports[0], replay_port=ports[1]) as publisher:
        publisher.publish(all_stored(0, 4))
        publisher.wait_for_subscriber()
        publisher.publish(all_stored(4, 8))
        until(lambda: feed.stats().connected and feed.stats().kv_blocks == 8)


def test_ranks_are_separate_sources(feed_of: Make, listener: Any, until: Until) -> None:
    """A block is held while any rank holds it; a prefix is resident only if one rank holds all of it."""
    with KvPublisher(rank=0) as first, KvPublisher(rank=1) as second:
        feed = feed_of(first, second)
        first.publish(all_stored())
        second.publish(all_stored(0, 4))
        until(lambda: feed.stats().sources == 2)
        until(lambda: feed.stats().events == 2)
        feed.remember(served())
        remembered(feed, until)
        first.publish(removed(1))  # the other rank still has this one, but not those at the end
        until(lambda: listener.changes)
        assert listener.changes == [(SCOPE, keys(2), 1)]
        first.restart()
        first.publish(removed(99))
        until(lambda: feed.stats().wipes == 1)
        assert feed.stats().kv_blocks == 4
        assert listener.changes == [(SCOPE, keys(2), 1)]


def test_publishers_at_one_address_are_separated_by_topic(feed_of: Make, until: Until) -> None:
    with KvPublisher() as publisher:
        feed = feed_of(publisher, replay=False)

        def publish(topic: bytes, number: int, event: object) -> None:
            payload = msgspec.msgpack.encode([1.0, [event], 0])
            publisher.send_frames(topic, number.to_bytes(8, "big"), payload)

        publish(b"kv@a", 0, all_stored(0, 2))
        publish(b"kv@b", 0, all_stored(0, 2))
        publish(b"kv@a", 1, removed(2))
        publish(b"kv@b", 1, removed(2))
        until(lambda: feed.stats().events == 4 and feed.stats().connected)
        stats = feed.stats()
        assert (stats.sources, stats.kv_blocks, stats.gaps, stats.wipes) == (2, 1, 0, 0)


def test_only_the_given_topic_is_subscribed(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher, replay=False, topic="kv@engine")
    publisher.send_frames(b"other", bytes(8), msgspec.msgpack.encode([1.0, [all_stored()], 0]))
    publisher.publish(all_stored(0, 2))
    until(lambda: feed.stats().events)
    assert (feed.stats().kv_blocks, feed.stats().sources) == (2, 1)


def test_malformed_messages_are_counted(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 2))
    publisher.send_frames(b"kv@engine", b"short", b"x")
    publisher.send_frames(b"kv@engine")
    publisher.publish_payload(b"\xc1", kept=False)
    publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
    until(lambda: feed.stats().wipes and not feed.stats().connected)
    stats = feed.stats()
    assert stats.malformed == 3
    assert stats.gaps == 1


def test_a_batch_that_is_malformed_even_when_replayed_discards_the_state(
    publisher: KvPublisher, feed_of: Make, until: Until
) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 2))
    publisher.publish_payload(b"\xc1")
    publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
    publisher.publish(removed(50))
    until(lambda: feed.stats().events >= 3 and feed.stats().kv_blocks == 0)
    assert feed.stats().malformed == 2
    assert feed.stats().wipes == 1


def test_unknown_events_and_parents_are_counted(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish({"type": "BlockMoved", "to": 3}, all_stored(0, 1, colour="red"))
    until(lambda: feed.stats().connected)
    stats = feed.stats()
    assert (stats.unknown, stats.kv_blocks) == (2, 1)
    publisher.publish(all_stored(4, 6))  # its parent was never stored
    until(lambda: feed.stats().unknown == 4)
    until(lambda: not feed.stats().connected)  # other blocks may be missing too


def test_a_slow_target_receives_the_final_state(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    """It is called once per round of many messages, and the last call has the final state."""
    feed = feed_of(publisher, max_messages=10)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    remembered(feed, until)
    called, slow = threading.Event(), threading.Event()
    report = listener.residency_changed

    def report_slowly(*change: Any) -> None:
        called.set()
        slow.wait(10)
        report(*change)

    listener.residency_changed = report_slowly
    publisher.publish(removed(8))
    assert called.wait(10)
    for _ in range(200):
        publisher.publish(all_stored(7))
        publisher.publish(removed(8))
    publisher.publish(all_stored(7))
    slow.set()
    until(lambda: feed.stats().events == 403)
    until(lambda: listener.changes[-1] == (SCOPE, keys(3), 3))
    assert len(listener.changes) < 100
    assert feed.stats().gaps == 0


def test_messages_dropped_by_a_full_socket_are_replayed(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    """One replay does not bring all of them, so the feed requests the rest."""
    feed = feed_of(publisher, high_water_mark=5)
    for number in range(3_000):
        publisher.publish(stored([number], None, [number, 1, 1, 1], 4), sent=number < 10 or number == 2_999)
    until(lambda: feed.stats().kv_blocks == 3_000 and feed.stats().connected)
    assert feed.stats().gaps >= 1
    assert feed.stats().wipes == 0


def test_bounds_are_kept(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher, max_kv_blocks=100, max_prompts=2, max_queue=4)
    for number in range(300):
        publisher.publish(stored([number], None, [number, 1, 1, 1], 4))
    until(lambda: feed.stats().events == 300)
    assert feed.stats().kv_blocks <= 100
    assert feed.stats().dropped >= 200
    dropped = feed.stats().dropped
    for number in range(3):
        feed.remember(served(TEXTS[number:]))
        until(lambda: not feed._served)
    until(lambda: feed.stats().dropped > dropped)
    assert feed.stats().prompts == 2


def test_prompts_wait_in_a_bounded_queue(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    called, answer = threading.Event(), threading.Event()

    def stuck(text: str) -> list[int]:
        called.set()
        answer.wait(10)
        return [ord(character) for character in text]

    feed = feed_of(publisher, tokenizer=stuck, max_queue=3)
    publisher.publish(all_stored())
    feed.remember(served())
    called.wait(10)
    for _ in range(10):
        feed.remember(served())  # returns at once
    publisher.publish(removed(8))
    until(lambda: feed.stats().kv_blocks == 7)  # even while the tokenizer waits
    assert feed.stats().dropped == 7
    answer.set()
    remembered(feed, until)


def test_a_prompt_without_its_context_blocks_is_counted(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    feed.remember(ServedPrompt(SCOPE, None, keys(1), ("something else",), TOKENS))
    until(lambda: feed.stats().unmapped == 1)
    assert feed.stats().prompts == 0


def test_a_failing_tokenizer_is_logged_once(
    publisher: KvPublisher, feed_of: Make, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(text: str) -> list[int]:
        raise OSError("no engine")

    feed = feed_of(publisher, tokenizer=fails)
    feed.remember(served())
    feed.remember(served())
    until(lambda: feed.stats().unmapped == 2)
    assert len([record for record in caplog.records if "tokenize" in record.message]) == 1


def test_a_feed_starts_over_after_a_failing_target(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    feed = feed_of(publisher)

    def fails(*change: Any) -> None:
        raise RuntimeError("not today")

    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    listener.residency_changed = fails
    feed.remember(served())
    remembered(feed, until)
    publisher.publish(removed(8))
    until(lambda: "starts over" in caplog.text)
    until(lambda: feed.stats().kv_blocks == 7 and feed.stats().connected)  # restored by the replay


def test_events_of_older_engines_leave_salted_prompts_uncertain(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    """They do not send salts, so the residency of salted prompts is uncertain."""
    feed = feed_of(publisher)
    publisher.publish(["BlockStored", HASHES, None, TOKENS, 4, None])
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    feed.remember(served(salt="a", scope=Scope("a", None, None)))
    remembered(feed, until, 2)
    publisher.publish(["BlockRemoved", [8]])
    until(lambda: listener.changes)
    assert listener.changes == [(SCOPE, keys(3), 2)]


def test_hashes_may_be_bytes(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    names = [bytes([number]) * 32 for number in range(8)]
    publisher.publish(stored(names[:4], None, TOKENS[:16], 4))
    publisher.publish(stored(names[4:], names[3], TOKENS[16:], 4), removed(names[7]))
    until(lambda: feed.stats().kv_blocks == 7 and feed.stats().connected)


def test_threads_keep_neither_target_nor_feed_alive(publisher: KvPublisher, until: Until) -> None:
    target = Target()
    feed = KvEventFeed(publisher.endpoint, tokenizer=lambda text: [ord(c) for c in text])
    feed.follow(target)
    publisher.wait_for_subscriber()
    gone = weakref.ref(target)
    del target
    gc.collect()
    assert gone() is None
    feed_gone, receiver = weakref.ref(feed), feed._receiver
    del feed
    until(lambda: gc.collect() is not None and feed_gone() is None)
    until(lambda: receiver._context is None)  # its thread closed the sockets


def test_close_is_idempotent_and_final(publisher: KvPublisher, feed_of: Make, listener: Any) -> None:
    feed = feed_of(publisher)
    feed.close()
    feed.close()
    feed.remember(served())
    feed.follow(listener)
    assert feed._receiver._context is None
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("warmprefix-kv")]
    never = KvEventFeed(publisher.endpoint, tokenizer=ord)  # type: ignore[arg-type]
    never.close()


def test_an_engine_that_never_reported_makes_the_state_incomplete(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    """A block is not reported as missing while an engine that may hold it has not reported."""
    with KvPublisher() as silent:
        feed = feed_of(publisher, silent, replay=False)
        publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
        until(lambda: feed.stats().kv_blocks == 1)
        feed.remember(served())
        remembered(feed, until)
        publisher.publish(removed(50))
        until(lambda: feed.stats().kv_blocks == 0)
        assert not feed.stats().connected
        assert not feed.is_complete(None)
        assert listener.changes == []
        silent.publish(all_stored(0, 6))
        until(lambda: feed.is_complete(None))
        assert feed.stats().connected
        assert listener.changes == [(SCOPE, keys(3), 2)]


def test_an_empty_replay_completes_the_state(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    with KvPublisher() as idle:
        feed = feed_of(publisher, idle)
        publisher.publish(all_stored())
        until(lambda: feed.is_complete(None))
        assert feed.stats().sources == 1


def test_an_unanswered_replay_leaves_the_state_incomplete(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    with KvPublisher(replays=False) as silent:
        feed = feed_of(publisher, silent, replay_timeout=0.1)
        publisher.publish(all_stored())
        until(lambda: feed.stats().kv_blocks == 8)
        publisher.publish(removed(8))
        until(lambda: feed.stats().kv_blocks == 7)
        assert not feed.is_complete(None)
        silent.publish(removed(99))
        until(lambda: feed.is_complete(None))


def test_a_replay_without_a_live_connection_leaves_the_state_incomplete(publisher: KvPublisher, until: Until) -> None:
    """Only the replay address works: without live events the replayed state becomes outdated."""
    publisher.publish(all_stored())
    feed = KvEventFeed("tcp://127.0.0.1:9", replay=publisher.replay_endpoint, tokenizer=ord)  # type: ignore[arg-type]
    target = Target()
    feed.follow(target)
    try:
        until(lambda: feed.stats().kv_blocks == 8 and not feed._receiver.replaying)
        feed._receiver.wake()
        assert not feed.is_complete(None)
    finally:
        feed.close()


def test_completeness_depends_on_salts(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    assert not feed.is_complete(None)
    publisher.publish(["BlockStored", HASHES, None, TOKENS, 4, None])
    until(lambda: feed.is_complete(None))
    assert not feed.is_complete("a")
    publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
    until(lambda: feed.is_complete("a"))
    feed.close()
    assert not feed.is_complete(None)
    assert not feed.is_complete("a")
    assert not feed.stats().connected


def test_the_state_is_incomplete_during_a_replay(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher, replay_timeout=30.0)
    publisher.publish(all_stored(0, 2))
    until(lambda: feed.is_complete(None))
    publisher.replays = False
    publisher.publish(all_stored(2, 4), sent=False)
    publisher.publish(all_stored(4, 6))
    until(lambda: feed._receiver.replaying)
    until(lambda: not feed.is_complete(None))
    assert feed.stats().kv_blocks == 2


def test_a_lost_connection_makes_the_state_incomplete(feed_of: Make, listener: Any, until: Until) -> None:
    """The state of an engine that went away is incomplete until it reports again."""
    with KvPublisher() as publisher:
        ports = [int(address.rpartition(":")[2]) for address in (publisher.endpoint, publisher.replay_endpoint)]
        feed = feed_of(publisher)
        publisher.publish(all_stored())
        until(lambda: feed.is_complete(None))
    until(lambda: not feed.is_complete(None))
    assert not feed.stats().connected
    with KvPublisher(port=ports[0], replay_port=ports[1]) as publisher:
        publisher.wait_for_subscriber()
        assert not feed.is_complete(None)
        publisher.publish(all_stored(0, 4))
        until(lambda: feed.is_complete(None))
        assert feed.stats().kv_blocks == 4


def test_an_address_in_use_is_tried_again(until: Until, caplog: pytest.LogCaptureFixture) -> None:
    """Another process has bound it: the feed tries again until it is free, and logs one error."""
    caplog.set_level(logging.DEBUG, "warmprefix")
    target = Target()
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        other = context.socket(zmq.SUB)
        address = f"tcp://*:{other.bind_to_random_port('tcp://*')}"
        feed = KvEventFeed(address, tokenizer=ord)  # type: ignore[arg-type]
        feed.follow(target)

        def receive_events() -> None:
            until(lambda: feed.stats().failures == 2)
            assert not feed.is_complete(None)
            other.close(0)
            engine.linger = 0
            engine.connect(address.replace("*", "127.0.0.1"))
            number = 0

            def all_received() -> bool:
                nonlocal number
                batch = msgspec.msgpack.encode([1.0 + number, [{"type": "AllBlocksCleared"}], 0])
                engine.send_multipart([b"kv", number.to_bytes(8, "big"), batch])
                number += 1
                return feed.is_complete(None)

            until(all_received)

        try:
            receive_events()
        finally:
            other.close(0)
            feed.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("warmprefix-kv")]
    levels = [record.levelno for record in caplog.records if "starts over" in record.message]
    assert levels[0] == logging.ERROR
    assert set(levels[1:]) == {logging.DEBUG}
    assert len(levels) == feed.stats().failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_has_its_own_feed(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    child = os.fork()
    if child == 0:
        try:
            assert feed.stats().kv_blocks == 0
            feed.remember(served())
            until(lambda: feed.stats().kv_blocks == 8 and feed.stats().prompts == 1)
            feed.close()
        except BaseException:
            os._exit(1)
        os._exit(0)
    until(lambda: os.waitpid(child, os.WNOHANG) == (child, 0))
    publisher.publish(removed(8))
    until(lambda: feed.stats().kv_blocks == 7)
