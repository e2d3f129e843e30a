"""The records of turns: a part of the contract of every `SeenStore`, and their form in Redis."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import redis

from warmprefix.stores import Commit, Conversation, Prepare, ReadTurn, SeenBlock, SeenStore, TurnRecord, WriteTurn
from warmprefix_redis import RedisSeenStore

pytestmark = pytest.mark.sample(3)

TURN = Conversation("acme", "resp_1")
BLOCK = SeenBlock(b"A" * 16, "Doc_A~414141", 1, 100)


class Kit(Protocol):
    def store(self, **bounds: float) -> SeenStore: ...

    def wait(self, seconds: float) -> None: ...


@pytest.fixture
def kit(kits: Any) -> Kit:
    made: Kit = kits()
    return made


@pytest.fixture
def store(kit: Kit) -> SeenStore:
    return kit.store()


def record(names: str, turn: int = 1) -> TurnRecord:
    blocks = [SeenBlock(name.encode() * 16, f"ctx-{name.encode().hex() * 3}", turn, 7) for name in names]
    return TurnRecord(turn, tuple(blocks))


def test_unknown_turn_has_no_record(store: SeenStore) -> None:
    assert store.execute(ReadTurn(TURN)) is None


@pytest.mark.parametrize(
    "written",
    [
        TurnRecord(0),
        TurnRecord(2, (), ("a", "\ud800")),
        TurnRecord(1, (BLOCK._replace(label=""),)),
        TurnRecord(1, (BLOCK,)),
        TurnRecord(
            3,
            (BLOCK, SeenBlock(b"\n\0" * 8, "", 3, 0), SeenBlock(b"\xff" * 16, "\ud800", 2, 2**32 - 1, 2**31)),
            ("a", "b"),
            True,
        ),
    ],
)
def test_record_is_read_as_written(store: SeenStore, written: TurnRecord) -> None:
    assert store.execute(WriteTurn(TURN, written))
    assert store.execute(ReadTurn(TURN)) == written


def test_writing_a_record_twice_changes_nothing(store: SeenStore) -> None:
    later = TurnRecord(1, tuple(block._replace(time=9) for block in record("AB").blocks))
    assert store.execute(WriteTurn(TURN, record("AB")))
    assert store.execute(WriteTurn(TURN, later))
    assert store.execute(ReadTurn(TURN)) == record("AB")


def test_id_with_two_records_is_unknown_from_then_on(store: SeenStore) -> None:
    store.execute(WriteTurn(TURN, record("AB")))
    for again in ("AC", "AB", ""):
        assert not store.execute(WriteTurn(TURN, record(again)))
        assert store.execute(ReadTurn(TURN)) is None


def test_tenants_and_conversations_share_no_ids_with_turns(store: SeenStore) -> None:
    store.execute(WriteTurn(TURN, record("A")))
    for tenant in (None, "", "acm", "other"):
        assert store.execute(ReadTurn(Conversation(tenant, "resp_1"))) is None
        assert store.execute(WriteTurn(Conversation(tenant, "resp_1"), record("B")))
    assert store.inspect(TURN) is None
    store.execute(Prepare(TURN, "p", {}))
    store.execute(Commit(TURN, "p", [BLOCK]))
    assert store.execute(ReadTurn(TURN)) == record("A")


def test_oldest_blocks_beyond_the_bound_are_dropped(kit: Kit) -> None:
    store = kit.store(max_blocks=2)
    store.execute(WriteTurn(TURN, record("AB")))
    assert store.execute(ReadTurn(TURN)) == record("AB")
    store.execute(WriteTurn(Conversation(None, "2"), record("ABC")))
    assert store.execute(ReadTurn(Conversation(None, "2"))) == record("BC")._replace(partial=True)


def test_record_expires_and_can_be_written_again(kit: Kit) -> None:
    store = kit.store(ttl=10)
    store.execute(WriteTurn(TURN, record("A")))
    kit.wait(60)
    assert store.execute(ReadTurn(TURN)) is None
    assert store.execute(WriteTurn(TURN, record("B")))


def test_clear_drops_turns(store: SeenStore) -> None:
    store.execute(WriteTurn(TURN, record("A")))
    store.clear()
    assert store.execute(ReadTurn(TURN)) is None


# -- in Redis ------------------------------------------------------------------------------------------------------


def stored(admin: redis.Redis) -> bytes:
    keys: Any = admin.keys()
    (key,) = keys
    assert key.endswith(b":turn")
    value: Any = admin.get(key)
    return bytes(value)


def replace_value(admin: redis.Redis, value: bytes) -> None:
    admin.set(admin.keys()[0], value)


def test_damaged_record_is_reported_and_can_be_written_again(open_store: Any, admin: redis.Redis) -> None:
    store: RedisSeenStore = open_store()
    store.execute(WriteTurn(TURN, record("AB")))
    value = stored(admin)
    other = Conversation("acme", "resp_2")
    for place in range(1, len(value)):
        changed = bytearray(value)
        changed[place] ^= 1
        replace_value(admin, bytes(changed))
        assert store.execute(ReadTurn(TURN)) == TurnRecord(0, damaged=True)
    for damaged in (b"", value[:1], value[:-1], value + b"\0"):
        replace_value(admin, damaged)
        assert store.execute(ReadTurn(TURN)) == TurnRecord(0, damaged=True)
        assert not store.breaker.is_open, "the fault is of one record, not of the server"
    assert store.execute(WriteTurn(TURN, record("AC")))
    assert store.execute(ReadTurn(TURN)) == record("AC")
    replace_value(admin, value)
    store.execute(WriteTurn(other, record("A")))
    for key in admin.scan_iter():
        admin.set(key, value)  # for one of them it is the value of another key
    assert store.execute(ReadTurn(other)) == TurnRecord(0, damaged=True)


def test_record_of_another_version_counts_as_missing(open_store: Any, admin: redis.Redis) -> None:
    store: RedisSeenStore = open_store()
    store.execute(WriteTurn(TURN, record("AB")))
    replace_value(admin, b"0" + stored(admin)[1:])
    assert store.execute(ReadTurn(TURN)) is None
    assert store.execute(WriteTurn(TURN, record("C")))
    assert store.execute(ReadTurn(TURN)) == record("C")


def test_key_of_another_type_counts_as_damaged(open_store: Any, admin: redis.Redis) -> None:
    store: RedisSeenStore = open_store()
    store.execute(WriteTurn(TURN, record("AB")))
    (key,) = admin.keys()
    admin.delete(key)
    admin.hset(key, "field", "value")
    assert store.execute(ReadTurn(TURN)) == TurnRecord(0, damaged=True)
    assert store.execute(WriteTurn(TURN, record("AB")))
    assert store.execute(ReadTurn(TURN)) == record("AB")


@pytest.mark.parametrize(
    ("block", "message"),
    [
        (SeenBlock(b"short", "ctx-000000", 1, 1), "fingerprint must be 16 bytes, got 5"),
        (SeenBlock(b"A" * 16, "a\nb", 1, 1), "label must be one line"),
    ],
)
def test_values_that_have_no_form_are_refused(open_store: Any, block: SeenBlock, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        open_store().execute(WriteTurn(TURN, TurnRecord(1, (block,))))


def test_other_labels_are_one_line_each(open_store: Any) -> None:
    with pytest.raises(ValueError, match="label must be one line"):
        open_store().execute(WriteTurn(TURN, TurnRecord(1, (), ("a\nb",))))


def test_every_record_expires(open_store: Any, admin: redis.Redis) -> None:
    store: RedisSeenStore = open_store(bounds=None)
    for names in ("A", "B", "C"):  # written, contradicted, contradicted again
        store.execute(WriteTurn(TURN, record(names)))
        assert 0 < admin.pttl(admin.keys()[0]) <= 86_400_000
