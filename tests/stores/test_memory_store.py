"""The bounds of `MemorySeenStore`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from warmprefix.stores import Commit, Conversation, MemorySeenStore, Prepare, RecordBounds, SeenBlock

BLOCK = SeenBlock(b"A" * 16, "Doc_A", 1, 100)


def serve(store: MemorySeenStore, chat: str, tenant: str | None = None) -> None:
    conversation = Conversation(tenant, chat)
    store.execute(Prepare(conversation, f"plan of {chat}", {BLOCK.fingerprint: BLOCK.label}))
    store.execute(Commit(conversation, f"plan of {chat}", [BLOCK]))


def remembered(store: MemorySeenStore, *chats: str) -> list[str]:
    return [chat for chat in chats if store.inspect(Conversation(None, chat)) is not None]


def test_the_conversation_not_used_longest_is_dropped() -> None:
    store = MemorySeenStore(max_conversations=2)
    for chat in ("one", "two", "one", "three"):
        serve(store, chat)
    assert remembered(store, "one", "two", "three") == ["one", "three"]


def test_inspect_does_not_renew_a_conversation() -> None:
    store = MemorySeenStore(max_conversations=2)
    for chat in ("one", "two"):
        serve(store, chat)
    remembered(store, "one")
    serve(store, "three")
    assert remembered(store, "one", "two", "three") == ["two", "three"]


def test_a_plan_of_a_dropped_conversation_commits_nothing() -> None:
    store = MemorySeenStore(max_conversations=1)
    one = Conversation(None, "one")
    store.execute(Prepare(one, "p1", {}))
    serve(store, "two")
    assert not store.execute(Commit(one, "p1", [BLOCK]))
    assert store.inspect(one) is None


def test_labels_are_bounded_too() -> None:
    store = MemorySeenStore(bounds=RecordBounds(max_blocks=5))
    chat = Conversation(None, "chat")
    for turn in range(200):
        fingerprint = turn.to_bytes(16, "big")
        store.execute(Prepare(chat, str(turn), {fingerprint: str(turn)}))
        store.execute(Commit(chat, str(turn), [SeenBlock(fingerprint, str(turn), turn + 1, 1)]))
    state = store._states.get(chat)
    assert state is not None
    assert len(state.labels) <= 20


def test_label_is_kept_as_long_as_its_block() -> None:
    """Turns that were sent and not recorded take labels too, and could push out those of the record."""
    now = 0.0
    store = MemorySeenStore(bounds=RecordBounds(max_blocks=2, lease_ttl=1), clock=lambda: now)
    serve(store, "chat")
    chat = Conversation(None, "chat")
    for turn in range(20):
        store.execute(Prepare(chat, str(turn), {}))
        now += 1
        assert not store.execute(Commit(chat, str(turn), [SeenBlock(turn.to_bytes(16, "big"), str(turn), turn + 2, 1)]))
    prepared = store.execute(Prepare(chat, "next", {BLOCK.fingerprint: BLOCK.label, b"other": BLOCK.label}))
    assert set(prepared.seen) == {BLOCK.fingerprint}
    assert prepared.taken == {BLOCK.label}
    state = store._states.get(chat)
    assert state is not None
    assert len(state.labels) <= 8


def test_expired_conversations_are_dropped() -> None:
    now = 0.0
    store = MemorySeenStore(bounds=RecordBounds(ttl=10), clock=lambda: now)
    for i in range(100):
        now += 1
        serve(store, str(i))
    assert len(store._states) == 10


class Interrupted(list[SeenBlock]):
    def __iter__(self) -> Iterator[SeenBlock]:
        yield from list(self[:1])
        raise KeyboardInterrupt


def test_interrupted_commit_leaves_no_partial_record() -> None:
    store = MemorySeenStore()
    serve(store, "chat")
    chat = Conversation(None, "chat")
    store.execute(Prepare(chat, "p", {}))
    other = SeenBlock(b"B" * 16, "Doc_B", 2, 100)
    with pytest.raises(KeyboardInterrupt):
        store.execute(Commit(chat, "p", Interrupted([other, other])))
    assert store.inspect(chat) is None


def test_all_conversations_together_are_bounded() -> None:
    store = MemorySeenStore(max_conversations=1_000, max_entries=100)
    chats = [Conversation(f"tenant {i % 3}", f"chat {i}") for i in range(40)]
    for number, chat in enumerate(chats):
        for turn in range(3):
            store.execute(Prepare(chat, f"{number} {turn}", {}))
            blocks = [SeenBlock(bytes([number, turn, i]) * 5 + b"!", f"{number} {turn} {i}", 1, 9) for i in range(4)]
            assert store.execute(Commit(chat, f"{number} {turn}", blocks))
    kept = [chat for chat in chats if store.inspect(chat) is not None]
    assert kept == chats[-len(kept) :], "the conversations used last"
    assert 1 < len(kept) <= 4  # 3 turns are 12 blocks, 12 labels and 3 plans
    store.clear()
    store.execute(Prepare(chats[0], "again", {}))
    assert store.inspect(chats[0]) is not None


def test_one_conversation_alone_may_fill_the_bound() -> None:
    store = MemorySeenStore(max_entries=1)
    chat = Conversation(None, "chat")
    store.execute(Prepare(chat, "p", {}))
    assert store.execute(Commit(chat, "p", [SeenBlock(b"A" * 16, "a", 1, 9), SeenBlock(b"B" * 16, "b", 1, 9)]))
    seen = store.inspect(chat)
    assert seen is not None
    assert len(seen.blocks) == 2


@pytest.mark.parametrize("bound", ["max_conversations", "max_entries"])
@pytest.mark.parametrize("value", [0, -1])
def test_a_bound_that_is_not_positive_is_named(bound: str, value: int) -> None:
    arguments: dict[str, Any] = {bound: value}
    with pytest.raises(ValueError, match=f"^{bound} must be positive, got {value}$"):
        MemorySeenStore(**arguments)


@pytest.mark.parametrize("store", [MemorySeenStore(max_conversations=60), MemorySeenStore(max_entries=600)])
def test_tenant_that_fills_the_store_evicts_only_its_own_conversations(store: MemorySeenStore) -> None:
    own = [Conversation("small", str(number)) for number in range(10)]
    for conversation in own:
        serve(store, conversation.id, conversation.tenant)
    for number in range(500):
        serve(store, str(number), "large")
    assert all(store.inspect(conversation) is not None for conversation in own)
    assert store.inspect(Conversation("large", "0")) is None
    assert store.inspect(Conversation("large", "499")) is not None


def test_one_long_conversation_does_not_pay_for_many_short_ones() -> None:
    store = MemorySeenStore(max_conversations=100, max_entries=10_000)
    long = Conversation("small", "long")
    blocks = [SeenBlock(number.to_bytes(16, "big"), str(number), 1, 1) for number in range(500)]
    store.execute(Prepare(long, "p", {}))
    store.execute(Commit(long, "p", blocks))
    for number in range(1_000):
        serve(store, str(number), "large")
    assert store.inspect(long) is not None
