"""What waits to be told."""

from __future__ import annotations

import pytest

from warmprefix.stores import Conversation
from warmprefix.stores.outbox import Abandon, Commit, Forget, Outbox

CHAT, OTHER = Conversation("acme", "chat"), Conversation("acme", "other")


def test_notices_wait_in_order_and_by_conversation() -> None:
    outbox = Outbox()
    first, second, third = Abandon("p1"), Commit("p2", []), Forget()
    outbox.add(CHAT, first)
    outbox.add(OTHER, third)
    outbox.add(CHAT, second)
    assert outbox.waiting(CHAT) == (first, second)
    assert outbox.waiting(OTHER) == (third,)
    assert outbox.conversations() == [CHAT, OTHER]
    assert len(outbox) == 3


def test_a_notice_stays_until_it_is_delivered_and_only_it_goes() -> None:
    outbox = Outbox()
    first, second = Abandon("same"), Abandon("same")
    outbox.add(CHAT, first)
    outbox.add(CHAT, second)
    outbox.delivered(CHAT, first)
    outbox.delivered(CHAT, first)
    assert outbox.waiting(CHAT) == (second,)
    outbox.delivered(CHAT, second)
    assert outbox.waiting(CHAT) == ()
    assert outbox.conversations() == []
    assert len(outbox) == 0


def test_beyond_the_bound_those_that_wait_longest_are_lost_and_counted() -> None:
    outbox = Outbox(max_notices=2)
    for chat in ("one", "two", "three"):
        outbox.add(Conversation(None, chat), Forget())
    assert [chat.id for chat in outbox.conversations()] == ["two", "three"]
    assert outbox.dropped == 1
    assert len(outbox) == 2


def test_dozens_for_one_conversation_become_one_to_forget_it() -> None:
    outbox = Outbox()
    for i in range(1_000):
        outbox.add(CHAT, Abandon(f"p{i}"))
        assert len(outbox) == len(outbox.waiting(CHAT)) <= 64
    assert isinstance(outbox.waiting(CHAT)[0], Forget)
    last = outbox.waiting(CHAT)[-1]
    assert isinstance(last, Abandon)
    assert last.plan_id == "p999"


def test_clear() -> None:
    outbox = Outbox()
    outbox.add(CHAT, Forget())
    outbox.clear()
    assert len(outbox) == 0
    assert outbox.waiting(CHAT) == ()


def test_a_bound_of_none_is_refused() -> None:
    with pytest.raises(ValueError, match="max_notices must be 1 or more, got 0"):
        Outbox(0)
