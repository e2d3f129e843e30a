"""The outbox of operations that a store has not executed."""

from __future__ import annotations

import pytest

from warmprefix.stores import Abandon, Commit, Conversation, Forget, MemorySeenStore, Prepare, SeenBlock, unanswered_id
from warmprefix_redis.outbox import Outbox, Settlement, UnansweredPlan, operations_of

CHAT, OTHER = Conversation("acme", "chat"), Conversation("acme", "other")


def test_operations_wait_in_order_per_conversation() -> None:
    outbox = Outbox()
    first, second, third = Abandon(CHAT, "p1"), Commit(CHAT, "p2", []), Forget(OTHER)
    outbox.add(first)
    outbox.add(third)
    outbox.add(second)
    assert outbox.waiting(CHAT) == (first, second)
    assert outbox.waiting(OTHER) == (third,)
    assert outbox.conversations() == [CHAT, OTHER]
    assert len(outbox) == 3


def test_remove_takes_only_that_operation() -> None:
    outbox = Outbox()
    first, second = Abandon(CHAT, "same"), Abandon(CHAT, "same")
    outbox.add(first)
    outbox.add(second)
    outbox.remove(first)
    outbox.remove(first)
    assert outbox.waiting(CHAT) == (second,)
    outbox.remove(second)
    assert outbox.waiting(CHAT) == ()
    assert outbox.conversations() == []
    assert len(outbox) == 0


def test_overflow_drops_the_longest_waiting_and_counts_them() -> None:
    outbox = Outbox(max_pending=2)
    for chat in ("one", "two", "three"):
        outbox.add(Forget(Conversation(None, chat)))
    assert [chat.id for chat in outbox.conversations()] == ["two", "three"]
    assert outbox.dropped == 1
    assert len(outbox) == 2


def test_dozens_of_operations_become_one_settlement() -> None:
    outbox = Outbox()
    for i in range(1_000):
        outbox.add(Abandon(CHAT, f"p{i}"))
        assert len(outbox) == len(outbox.waiting(CHAT)) <= 64
    assert isinstance(outbox.waiting(CHAT)[0], Settlement)
    last = outbox.waiting(CHAT)[-1]
    assert isinstance(last, Abandon)
    assert last.plan_id == "p999"


@pytest.mark.parametrize("turns", [10, 64, 200])
def test_long_outage_leaves_no_lease_and_keeps_labels_taken(turns: int) -> None:
    """One plan has a lease; many others are unanswered, but the model saw them."""
    store, outbox = MemorySeenStore(), Outbox()
    store.execute(Prepare(CHAT, "before", {b"a": "doc-a"}))
    outbox.add(Commit(CHAT, "before", [SeenBlock(b"a", "doc-a", 1, 5)]))
    for i in range(turns):
        plan_id = unanswered_id(f"p{i}")
        outbox.add(UnansweredPlan(CHAT, plan_id))
        outbox.add(Commit(CHAT, plan_id, [SeenBlock(b"b%d" % i, f"doc-{i}", 1, 5)]))
    while notices := outbox.waiting(CHAT):
        for operation in 2 * operations_of(notices[0]):
            store.execute(operation)
        outbox.remove(notices[0])

    proposed = {b"other%d" % i: f"doc-{i}" for i in range(turns)} | {b"other": "doc-a"}
    prepared = store.execute(Prepare(CHAT, "after", proposed))
    assert prepared.taken == frozenset(proposed.values())
    store.execute(Commit(CHAT, "after", [SeenBlock(b"c", "doc-c", 1, 5)]))
    prepared = store.execute(Prepare(CHAT, "last", {b"c": "doc-c", b"a": "doc-a"}))
    assert set(prepared.seen) == {b"c"}
    assert prepared.contested == frozenset()


def test_open_plans_survive_the_settlement_of_others() -> None:
    outbox = Outbox()
    outbox.add(UnansweredPlan(CHAT, unanswered_id("open")))
    for i in range(100):
        outbox.add(UnansweredPlan(CHAT, unanswered_id(f"p{i}")))
        outbox.add(Abandon(CHAT, unanswered_id(f"p{i}")))
    store = MemorySeenStore()
    for notice in outbox.waiting(CHAT):
        for operation in operations_of(notice):
            store.execute(operation)
    store.execute(Prepare(CHAT, "parallel", {}))
    store.execute(Commit(CHAT, "parallel", [SeenBlock(b"a", "doc-a", 1, 5)]))
    assert store.execute(Prepare(CHAT, "later", {b"a": "doc-a"})).contested == frozenset([b"a"])
    assert not store.execute(Commit(CHAT, unanswered_id("open"), []))
    assert store.execute(Prepare(CHAT, "last", {b"a": "doc-a"})).seen == {}


def test_clear() -> None:
    outbox = Outbox()
    outbox.add(Forget(CHAT))
    outbox.clear()
    assert len(outbox) == 0
    assert outbox.waiting(CHAT) == ()


def test_bound_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="max_pending must be 1 or more, got 0"):
        Outbox(0)
