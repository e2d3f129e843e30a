"""Records of stored responses: sealed, bounded in fair shares, and for as long as the server keeps the history."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from warmprefix_gateway.turn_records import MemoryValues, SealedValues, StoredTurn, TurnRecords
from warmprefix_requests import StoredHistory

HISTORY = StoredHistory(references={"[Word for word.]": "k"})


def turn(first: str = "r1", began: float = 1_000.0, history: StoredHistory | None = HISTORY) -> StoredTurn:
    return StoredTurn("http://one/v1", "session", first, began, history)


class Store(MemoryValues):
    """Values that a test can look at."""

    def __init__(self, max_bytes: int = 1 << 20) -> None:
        super().__init__(max_bytes)
        self.written: dict[bytes, bytes] = {}

    async def put(self, name: bytes, value: bytes, *, only_present: bool = False) -> None:
        self.written[name] = value
        await super().put(name, value, only_present=only_present)


class BusyStore(MemoryValues):
    """Values that count the calls which wait for one another."""

    waiting = most = 0

    async def _wait(self) -> None:
        self.waiting += 1
        self.most = max(self.most, self.waiting)
        await asyncio.sleep(0)
        self.waiting -= 1

    async def get(self, name: bytes, *, renew: bool = False) -> bytes | None:
        await self._wait()
        return await super().get(name, renew=renew)

    async def put(self, name: bytes, value: bytes, *, only_present: bool = False) -> None:
        await self._wait()
        await super().put(name, value, only_present=only_present)


def found(records: TurnRecords, tenant: str | None, id: str) -> Any:
    return asyncio.run(records.find(tenant, id))


def keep(records: TurnRecords, tenant: str | None, id: str, kept: StoredTurn, **texts: str) -> None:
    asyncio.run(records.keep(tenant, id, kept, texts))


def test_a_record_is_found_by_its_tenant_only() -> None:
    records = TurnRecords(MemoryValues(), lambda: 1_000.0)
    keep(records, "ann", "r1", turn(), k="The text.")
    assert found(records, "ann", "r1").turn == turn()
    assert found(records, "ann", "r1").texts == {"[Word for word.]": "The text."}
    for tenant, id in (("bob", "r1"), (None, "r1"), ("", "r1"), ("ann", "r2"), ("ann", ""), ("an", "nr1")):
        assert found(records, tenant, id) is None


def test_tenants_do_not_share_texts() -> None:
    records = TurnRecords(MemoryValues(), lambda: 1_000.0)
    keep(records, "ann", "r1", turn(), k="The text.")
    keep(records, "bob", "r1", turn())
    assert found(records, "bob", "r1").texts == {"[Word for word.]": None}


def test_a_history_with_many_texts_takes_one_connection() -> None:
    store = BusyStore()
    records = TurnRecords(store, lambda: 1_000.0)
    texts = {f"k{number}": "The text." for number in range(64)}
    references = {f"[{key}]": key for key in texts}
    keep(records, "ann", "r1", turn(history=StoredHistory(references=references)), **texts)
    assert found(records, "ann", "r1").texts == dict.fromkeys(references, "The text.")
    assert store.most == 1


def test_a_history_counts_as_unseen_before_the_server_drops_it() -> None:
    now = 1_000.0
    records = TurnRecords(MemoryValues(), lambda: now)
    keep(records, None, "r1", turn())
    keep(records, None, "r9", turn())
    now += 27 * 86_400
    assert found(records, None, "r9").turn.history == HISTORY
    now += 2 * 86_400
    assert found(records, None, "r9").turn == turn(history=None)  # the upstream is still known
    now = 1_000.0 - 2 * 86_400  # the clock of the gateway that wrote it was wrong
    assert found(records, None, "r9").turn == turn(history=None)


def test_no_later_response_brings_a_deleted_history_back() -> None:
    records = TurnRecords(MemoryValues(), lambda: 1_000.0)
    keep(records, None, "r1", turn())
    keep(records, None, "r2", turn())
    asyncio.run(records.forget(None, "r1"))
    keep(records, None, "r3", turn())  # its request was under way
    assert found(records, None, "r1") is None
    assert [found(records, None, id).turn.history for id in ("r2", "r3")] == [None, None]
    asyncio.run(records.forget(None, "unknown"))


def test_a_tenant_that_fills_the_memory_loses_only_its_own() -> None:
    values = MemoryValues(100_000)
    records = TurnRecords(values, lambda: 1_000.0)
    keep(records, "small", "r1", turn(), k="The text.")
    for number in range(3_000):
        keep(records, "large", f"r{number}", turn(f"r{number}"))
    assert found(records, "small", "r1").texts == {"[Word for word.]": "The text."}
    assert found(records, "large", "r0") is None
    assert found(records, "large", "r2999").turn.history == HISTORY


def test_values_are_sealed_with_the_secret_for_their_names() -> None:
    store = Store()
    sealed = SealedValues(store, b"secret")
    asyncio.run(sealed.put(b"a" * 20, b"The text."))
    asyncio.run(sealed.put(b"b" * 20, b"Another."))
    ((name, value), (other, _)) = store.written.items()
    assert b"text" not in value
    assert asyncio.run(sealed.get(name)) == b"The text."
    assert asyncio.run(SealedValues(store, b"secrets").get(name)) is None
    asyncio.run(store.put(other, value))
    assert asyncio.run(sealed.get(other)) is None
    for at in range(len(value)):
        asyncio.run(store.put(name, value[:at] + bytes([value[at] ^ 1]) + value[at + 1 :]))
        assert asyncio.run(sealed.get(name)) is None
        asyncio.run(store.put(name, value[:at]))
        assert asyncio.run(sealed.get(name)) is None


def test_one_text_is_never_sealed_in_the_same_way_twice() -> None:
    store = Store()
    sealed = SealedValues(store, b"secret")
    seen = set()
    for _ in range(50):
        asyncio.run(sealed.put(b"a" * 20, b"The text."))
        seen.add(store.written[b"a" * 20][33:])
    assert len(seen) == 50


@pytest.mark.parametrize("id", ["r" * 1_024, "\ud800", "r\n", "\x00"])
def test_any_id_can_be_kept(id: str) -> None:
    records = TurnRecords(SealedValues(MemoryValues(), b"secret"), lambda: 1_000.0)
    keep(records, "\udcff", id, turn(id))
    assert found(records, "\udcff", id).turn == turn(id)


def test_a_history_of_another_version_is_unseen(monkeypatch: pytest.MonkeyPatch) -> None:
    records = TurnRecords(MemoryValues(), lambda: 1_000.0)
    with monkeypatch.context() as older:
        older.setattr("warmprefix_requests.stored_history._VERSION", 0)
        keep(records, None, "r1", turn())
    assert found(records, None, "r1").turn == turn(history=None)
