"""The feed against real sockets: everything that can go wrong between a publisher and who listens."""

from __future__ import annotations

import asyncio
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
from warmprefix.residency.base import ResidencyFeed, ServedPrompt
from warmprefix.residency.feed import KvEventFeed

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
    def residency_changed(self, scope: Scope, keys: Sequence[bytes], resident_blocks: int) -> None: ...


def test_it_is_a_feed(feed_of: Make) -> None:
    assert isinstance(KvEventFeed("tcp://127.0.0.1:9", tokenizer=ord), ResidencyFeed)  # type: ignore[arg-type]


def test_tells_what_is_removed_and_what_comes_back(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8 and feed.stats().connected)
    feed.remember(served())
    remembered(feed, until)
    assert listener.told == []  # as whoever served it thinks anyway
    publisher.publish(removed(8), removed(7))
    until(lambda: listener.told)
    assert listener.told == [(SCOPE, keys(3), 2)]
    publisher.publish(removed(6))
    until(lambda: len(listener.told) == 2)
    assert listener.told[-1] == (SCOPE, keys(2), 1)
    publisher.publish(all_stored(5))
    until(lambda: len(listener.told) == 3)
    assert listener.told[-1] == (SCOPE, keys(3), 3)
    stats = feed.stats()
    assert (stats.sources, stats.connected, stats.events, stats.kv_blocks, stats.prompts) == (1, True, 5, 8, 1)
    assert (stats.gaps, stats.wipes, stats.malformed, stats.unknown, stats.dropped, stats.unmapped) == (0,) * 6
    assert 0 <= stats.lag < 60


def test_a_full_block_less_is_a_context_block_less(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    """Of a context block some of whose KV blocks are gone, nothing counts."""
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 7))
    until(lambda: feed.stats().kv_blocks == 7)
    feed.remember(served())
    until(lambda: listener.told)
    assert listener.told == [(SCOPE, keys(3), 2)]


def test_all_blocks_cleared(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    remembered(feed, until)
    publisher.publish({"type": "AllBlocksCleared"})
    until(lambda: listener.told)
    assert listener.told == [(SCOPE, keys(1), 0)]
    assert feed.stats().kv_blocks == 0
    assert feed.stats().connected


def test_prompts_that_share_blocks_are_told_once(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    feed.remember(served(TEXTS[:2]))
    remembered(feed, until, 2)
    publisher.publish(removed(*HASHES[3:][::-1]))
    until(lambda: listener.told)
    assert listener.told == [(SCOPE, keys(1), 0)]


def test_salts_share_nothing(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(extra_keys=[["a"], *[None] * 7]))
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served(salt="a", scope=Scope("a", None, None)))
    feed.remember(served(salt="b", scope=Scope("b", None, None)))
    remembered(feed, until, 2)
    until(lambda: listener.told)
    assert listener.told == [(Scope("b", None, None), keys(1), 0)]


@pytest.mark.parametrize("tells_topic", [True, False])
def test_who_comes_late_has_all_replayed(feed_of: Make, listener: Any, until: Until, tells_topic: bool) -> None:
    with KvPublisher(tells_topic=tells_topic) as publisher:
        publisher.publish(all_stored(0, 4))
        publisher.publish(all_stored(4, 8))
        feed = feed_of(publisher)
        until(lambda: feed.stats().connected)
        stats = feed.stats()
        assert (stats.kv_blocks, stats.replayed, stats.gaps, stats.wipes) == (8, 2, 0, 0)
        publisher.publish(removed(8))
        until(lambda: feed.stats().kv_blocks == 7)
        assert publisher.replay_requests == [0]


@pytest.mark.parametrize("tells_topic", [True, False])
def test_a_gap_is_filled(feed_of: Make, listener: Any, until: Until, tells_topic: bool) -> None:
    with KvPublisher(tells_topic=tells_topic) as publisher:
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
        assert publisher.replay_requests == [0, 1]  # from the last one known on, to see that it is the same


def test_a_gap_that_can_not_be_filled_wipes(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
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
    assert listener.told == []  # it may be there or not: nothing is claimed
    publisher.publish(all_stored(0, 6))
    until(lambda: listener.told)
    assert listener.told == [(SCOPE, keys(2), 2)]  # these are; of the third nothing is said
    publisher.publish(removed(6))
    until(lambda: len(listener.told) == 2)
    assert listener.told[-1] == (SCOPE, keys(2), 1)
    publisher.publish({"type": "AllBlocksCleared"})
    until(lambda: feed.stats().connected)
    assert feed.stats().kv_blocks == 0


def test_a_gap_whose_batches_are_gone_wipes(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 4))
    until(lambda: feed.stats().connected)
    publisher.publish(removed(4), sent=False, kept=False)
    publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
    until(lambda: feed.stats().wipes == 1)
    until(lambda: feed.stats().kv_blocks == 1 and not feed.stats().connected)
    assert feed.stats().gaps == 1


def test_a_history_without_its_beginning_is_not_known(feed_of: Make, listener: Any, until: Until) -> None:
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
        assert listener.told == []


def test_a_restart_wipes(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 4))
    publisher.publish(all_stored(4, 8))
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    remembered(feed, until)
    publisher.restart()
    publisher.publish(all_stored(0, 6))
    until(lambda: listener.told)
    stats = feed.stats()
    assert listener.told == [(SCOPE, keys(3), 2)]
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


def test_a_restart_is_noticed_when_it_counted_past(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    """The new process published more than the old one, all of it unheard: the numbers alone show a mere gap."""
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


def test_a_publisher_that_does_not_answer(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    """A replay that fails is tried again, but not at once; until it comes the engine is unknown."""
    publisher.replays = False
    feed = feed_of(publisher, replay_timeout=0.1, replay_cooldown=0.6)
    publisher.publish(all_stored(0, 2), sent=False)
    publisher.publish(all_stored(2, 4))
    until(lambda: feed.stats().wipes >= 1)
    asked = len(publisher.replay_requests)
    publisher.publish(removed(99), sent=False)
    publisher.publish(removed(98))
    until(lambda: feed.stats().gaps == 2 and not feed.stats().connected)
    assert len(publisher.replay_requests) == asked
    publisher.replays = True
    until(lambda: feed.stats().connected)
    assert feed.stats().kv_blocks == 4
    assert len(publisher.replay_requests) == asked + 1


def test_an_engine_that_starts_after_the_feed(feed_of: Make, listener: Any, until: Until) -> None:
    with KvPublisher() as gone:
        ports = [int(address.rpartition(":")[2]) for address in (gone.endpoint, gone.replay_endpoint)]
        feed = feed_of(gone, replay_timeout=0.1)
    until(lambda: not any(link.replaying for link in feed._receiver._links))
    with KvPublisher(port=ports[0], replay_port=ports[1]) as publisher:
        publisher.publish(all_stored(0, 4))
        publisher.wait_for_subscriber()
        publisher.publish(all_stored(4, 8))
        until(lambda: feed.stats().connected and feed.stats().kv_blocks == 8)


def test_ranks_are_told_apart(feed_of: Make, listener: Any, until: Until) -> None:
    """A block is held as long as one rank holds it, and a prefix only where one rank holds all of it."""
    with KvPublisher(rank=0) as first, KvPublisher(rank=1) as second:
        feed = feed_of(first, second)
        first.publish(all_stored())
        second.publish(all_stored(0, 4))
        until(lambda: feed.stats().sources == 2)
        until(lambda: feed.stats().events == 2)
        feed.remember(served())
        remembered(feed, until)
        first.publish(removed(1))  # the other rank still has this one, but not those at the end
        until(lambda: listener.told)
        assert listener.told == [(SCOPE, keys(2), 1)]
        first.restart()
        first.publish(removed(99))
        until(lambda: feed.stats().wipes == 1)
        assert feed.stats().kv_blocks == 4
        assert listener.told == [(SCOPE, keys(2), 1)]


def test_publishers_behind_one_address_are_told_apart_by_topic(feed_of: Make, until: Until) -> None:
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


def test_only_the_topic_that_is_asked_for(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher, replay=False, topic="kv@engine")
    publisher.send_frames(b"other", bytes(8), msgspec.msgpack.encode([1.0, [all_stored()], 0]))
    publisher.publish(all_stored(0, 2))
    until(lambda: feed.stats().events)
    assert (feed.stats().kv_blocks, feed.stats().sources) == (2, 1)


def test_messages_that_are_none(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
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


def test_a_batch_that_can_not_be_read_even_when_replayed(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored(0, 2))
    publisher.publish_payload(b"\xc1")
    publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
    publisher.publish(removed(50))
    until(lambda: feed.stats().events >= 3 and feed.stats().kv_blocks == 0)
    assert feed.stats().malformed == 2
    assert feed.stats().wipes == 1


def test_what_nobody_knows_is_counted(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish({"type": "BlockMoved", "to": 3}, all_stored(0, 1, colour="red"))
    until(lambda: feed.stats().connected)
    stats = feed.stats()
    assert (stats.unknown, stats.kv_blocks) == (2, 1)
    publisher.publish(all_stored(4, 6))  # of a parent that was never told
    until(lambda: feed.stats().unknown == 4)
    until(lambda: not feed.stats().connected)  # so it is not known what else was not


def test_a_slow_listener_loses_nothing(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
    """Told once a round of what many messages changed, it gets the end of it."""
    feed = feed_of(publisher, max_messages=10)
    publisher.publish(all_stored())
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    remembered(feed, until)
    told, slow = threading.Event(), threading.Event()
    tell = listener.residency_changed

    def tell_slowly(*change: Any) -> None:
        told.set()
        slow.wait(10)
        tell(*change)

    listener.residency_changed = tell_slowly
    publisher.publish(removed(8))
    assert told.wait(10)
    for _ in range(200):
        publisher.publish(all_stored(7))
        publisher.publish(removed(8))
    publisher.publish(all_stored(7))
    slow.set()
    until(lambda: feed.stats().events == 403)
    until(lambda: listener.told[-1] == (SCOPE, keys(3), 3))
    assert len(listener.told) < 100
    assert feed.stats().gaps == 0


def test_what_a_full_socket_drops_is_replayed(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    """More than the replay answers at once too: it is asked for until all is there."""
    feed = feed_of(publisher, high_water_mark=5)
    for number in range(3_000):
        publisher.publish(stored([number], None, [number, 1, 1, 1], 4), sent=number < 10 or number == 2_999)
    until(lambda: feed.stats().kv_blocks == 3_000 and feed.stats().connected)
    assert feed.stats().gaps >= 1
    assert feed.stats().wipes == 0


def test_bounds(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
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
    asked, answer = threading.Event(), threading.Event()

    def stuck(text: str) -> list[int]:
        asked.set()
        answer.wait(10)
        return [ord(character) for character in text]

    feed = feed_of(publisher, tokenizer=stuck, max_queue=3)
    publisher.publish(all_stored())
    feed.remember(served())
    asked.wait(10)
    for _ in range(10):
        feed.remember(served())  # returns at once
    publisher.publish(removed(8))
    until(lambda: feed.stats().kv_blocks == 7)  # whatever the tokenizer does
    assert feed.stats().dropped == 7
    answer.set()
    remembered(feed, until)


def test_a_prompt_without_its_context_blocks(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    publisher.publish(all_stored())
    feed.remember(ServedPrompt(SCOPE, None, keys(1), ("something else",), TOKENS))
    until(lambda: feed.stats().unmapped == 1)
    assert feed.stats().prompts == 0


def test_a_tokenizer_that_fails(
    publisher: KvPublisher, feed_of: Make, until: Until, caplog: pytest.LogCaptureFixture
) -> None:
    def fails(text: str) -> list[int]:
        raise OSError("no engine")

    feed = feed_of(publisher, tokenizer=fails)
    feed.remember(served())
    feed.remember(served())
    until(lambda: feed.stats().unmapped == 2)
    assert len([record for record in caplog.records if "tokenize" in record.message]) == 1


def test_a_listener_that_fails(
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
    until(lambda: "begins anew" in caplog.text)
    until(lambda: feed.stats().kv_blocks == 7 and feed.stats().connected)  # by way of the replay


def test_positional_events_of_older_engines(publisher: KvPublisher, feed_of: Make, listener: Any, until: Until) -> None:
    """They don't tell salts, so of salted prompts nothing is said."""
    feed = feed_of(publisher)
    publisher.publish(["BlockStored", HASHES, None, TOKENS, 4, None])
    until(lambda: feed.stats().kv_blocks == 8)
    feed.remember(served())
    feed.remember(served(salt="a", scope=Scope("a", None, None)))
    remembered(feed, until, 2)
    publisher.publish(["BlockRemoved", [8]])
    until(lambda: listener.told)
    assert listener.told == [(SCOPE, keys(3), 2)]


def test_hashes_as_bytes(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    names = [bytes([number]) * 32 for number in range(8)]
    publisher.publish(stored(names[:4], None, TOKENS[:16], 4))
    publisher.publish(stored(names[4:], names[3], TOKENS[16:], 4), removed(names[7]))
    until(lambda: feed.stats().kv_blocks == 7 and feed.stats().connected)


def test_a_task_can_receive(publisher: KvPublisher, listener: Any) -> None:
    async def main() -> None:
        feed = KvEventFeed(
            publisher.endpoint,
            replay=publisher.replay_endpoint,
            tokenizer=lambda text: [ord(c) for c in text],
            thread=False,
        )
        feed.follow(listener)
        task = asyncio.create_task(feed.run())
        publisher.publish(all_stored())
        while feed.stats().kv_blocks < 8:
            await asyncio.sleep(0.01)
        with pytest.raises(RuntimeError, match="already"):
            await feed.run()
        feed.remember(served())
        while not feed.stats().prompts:
            await asyncio.sleep(0.01)
        publisher.publish(removed(8))
        while not listener.told:
            await asyncio.sleep(0.01)
        assert "warmprefix-kv-events" not in {thread.name for thread in threading.enumerate()}
        feed.close()
        await task

    asyncio.run(asyncio.wait_for(main(), 30))
    assert listener.told == [(SCOPE, keys(3), 2)]


def test_a_task_that_is_cancelled_closes_its_sockets(publisher: KvPublisher, listener: Any) -> None:
    async def main() -> KvEventFeed:
        feed = KvEventFeed(publisher.endpoint, replay=publisher.replay_endpoint, tokenizer=ord, thread=False)  # type: ignore[arg-type]
        feed.follow(listener)
        task = asyncio.create_task(feed.run())
        publisher.publish(all_stored())
        while not feed.knows(None):
            await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return feed

    feed = asyncio.run(main())
    assert feed._receiver._context is None
    assert feed.stats().kv_blocks == 0
    assert not feed.knows(None)
    assert not feed.stats().connected
    feed.close()


def test_a_thread_is_no_task(publisher: KvPublisher, feed_of: Make) -> None:
    feed = feed_of(publisher)
    with pytest.raises(RuntimeError):
        asyncio.run(feed.run())


def test_it_keeps_nobody_alive(publisher: KvPublisher, until: Until) -> None:
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


def test_of_an_engine_that_was_never_heard_nothing_is_known(
    publisher: KvPublisher, feed_of: Make, listener: Any, until: Until
) -> None:
    """What it may hold is not said to be missing because another engine does not hold it."""
    with KvPublisher() as unheard:
        feed = feed_of(publisher, unheard, replay=False)
        publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
        until(lambda: feed.stats().kv_blocks == 1)
        feed.remember(served())
        remembered(feed, until)
        publisher.publish(removed(50))
        until(lambda: feed.stats().kv_blocks == 0)
        assert not feed.stats().connected
        assert not feed.knows(None)
        assert listener.told == []
        unheard.publish(all_stored(0, 6))
        until(lambda: feed.knows(None))
        assert feed.stats().connected
        assert listener.told == [(SCOPE, keys(3), 2)]


def test_an_engine_that_has_nothing_to_replay_is_known(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    with KvPublisher() as idle:
        feed = feed_of(publisher, idle)
        publisher.publish(all_stored())
        until(lambda: feed.knows(None))
        assert feed.stats().sources == 1


def test_an_engine_that_answers_no_replay_is_not_known(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    with KvPublisher(replays=False) as silent:
        feed = feed_of(publisher, silent, replay_timeout=0.1)
        publisher.publish(all_stored())
        until(lambda: feed.stats().kv_blocks == 8)
        publisher.publish(removed(8))
        until(lambda: feed.stats().kv_blocks == 7)
        assert not feed.knows(None)
        silent.publish(removed(99))
        until(lambda: feed.knows(None))


def test_an_engine_that_answers_but_is_not_heard_is_not_known(publisher: KvPublisher, until: Until) -> None:
    """The replay address is right, the other is not: what was replayed would stay true for ever."""
    publisher.publish(all_stored())
    feed = KvEventFeed("tcp://127.0.0.1:9", replay=publisher.replay_endpoint, tokenizer=ord)  # type: ignore[arg-type]
    target = Target()
    feed.follow(target)
    try:
        until(lambda: feed.stats().kv_blocks == 8 and not feed._receiver.replaying)
        feed._receiver.wake()
        assert not feed.knows(None)
    finally:
        feed.close()


def test_knows_which_salts_are_told(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher)
    assert not feed.knows(None)
    publisher.publish(["BlockStored", HASHES, None, TOKENS, 4, None])
    until(lambda: feed.knows(None))
    assert not feed.knows("a")
    publisher.publish(stored([50], None, [7, 7, 7, 7], 4))
    until(lambda: feed.knows("a"))
    feed.close()
    assert not feed.knows(None)
    assert not feed.knows("a")
    assert not feed.stats().connected


def test_knows_nothing_while_replaying(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
    feed = feed_of(publisher, replay_timeout=30.0)
    publisher.publish(all_stored(0, 2))
    until(lambda: feed.knows(None))
    publisher.replays = False
    publisher.publish(all_stored(2, 4), sent=False)
    publisher.publish(all_stored(4, 6))
    until(lambda: feed._receiver.replaying)
    until(lambda: not feed.knows(None))
    assert feed.stats().kv_blocks == 2


def test_a_connection_that_is_lost(feed_of: Make, listener: Any, until: Until) -> None:
    """Nothing is known of an engine that went away, before it is heard again."""
    with KvPublisher() as publisher:
        ports = [int(address.rpartition(":")[2]) for address in (publisher.endpoint, publisher.replay_endpoint)]
        feed = feed_of(publisher)
        publisher.publish(all_stored())
        until(lambda: feed.knows(None))
    until(lambda: not feed.knows(None))
    assert not feed.stats().connected
    with KvPublisher(port=ports[0], replay_port=ports[1]) as publisher:
        publisher.wait_for_subscriber()
        assert not feed.knows(None)
        publisher.publish(all_stored(0, 4))
        until(lambda: feed.knows(None))
        assert feed.stats().kv_blocks == 4


@pytest.mark.parametrize("thread", [True, False])
def test_an_address_in_use(thread: bool, until: Until, caplog: pytest.LogCaptureFixture) -> None:
    """Another process has bound it: the feed tries again until it is free, and says so once."""
    caplog.set_level(logging.DEBUG, "warmprefix")
    target = Target()
    with zmq.Context() as context, context.socket(zmq.PUB) as engine:
        other = context.socket(zmq.SUB)
        address = f"tcp://*:{other.bind_to_random_port('tcp://*')}"
        feed = KvEventFeed(address, tokenizer=ord, thread=thread)  # type: ignore[arg-type]
        feed.follow(target)

        def hear() -> None:
            until(lambda: feed.stats().failures == 2)
            assert not feed.knows(None)
            other.close(0)
            engine.linger = 0
            engine.connect(address.replace("*", "127.0.0.1"))
            number = 0

            def known() -> bool:
                nonlocal number
                batch = msgspec.msgpack.encode([1.0 + number, [{"type": "AllBlocksCleared"}], 0])
                engine.send_multipart([b"kv", number.to_bytes(8, "big"), batch])
                number += 1
                return feed.knows(None)

            until(known)

        async def main() -> None:
            task = asyncio.create_task(feed.run())
            await asyncio.to_thread(hear)
            feed.close()
            await task

        try:
            if thread:
                hear()
            else:
                asyncio.run(main())
        finally:
            other.close(0)
            feed.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("warmprefix-kv")]
    levels = [record.levelno for record in caplog.records if "begins anew" in record.message]
    assert levels[0] == logging.ERROR
    assert set(levels[1:]) == {logging.DEBUG}
    assert len(levels) == feed.stats().failures


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_process_hears_for_itself(publisher: KvPublisher, feed_of: Make, until: Until) -> None:
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


@pytest.mark.parametrize(
    "options",
    [
        {"endpoint": []},
        {"endpoint": "nowhere"},
        {"endpoint": "tcp://host"},
        {"endpoint": "udp://host:1"},
        {"endpoint": "ipc:///tmp/x", "ranks": 2},
        {"endpoint": "tcp://host:65535", "ranks": 2},
        {"ranks": 0},
        {"replay": ["tcp://a:1", "tcp://a:2"]},
        {"max_queue": 0},
        {"max_messages": 0},
        {"max_kv_blocks": 0},
        {"max_prompts": 0},
        {"max_prompt_blocks": 0},
        {"high_water_mark": -1},
        {"replay_timeout": 0},
        {"replay_cooldown": 0},
    ],
)
def test_arguments_out_of_range(options: dict[str, Any]) -> None:
    arguments: dict[str, Any] = {"endpoint": "tcp://host:1", "tokenizer": ord} | options
    with pytest.raises(ValueError, match=next(iter(options))):
        KvEventFeed(**arguments)
