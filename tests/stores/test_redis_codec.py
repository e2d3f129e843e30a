"""Lua and Python unpack each other's values: random records travel both ways through a real server."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmprefix.stores import Commit, Conversation, Prepare, PreparedTurn, SeenBlock, Snapshot
from warmprefix_redis import RedisSeenStore, unpack_hash
from warmprefix_redis.wire import pack_sent, read_info, unpack_prepared

LARGEST = 2**32 - 1
texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)  # lone surrogates, too
labels = st.one_of(texts, texts.map(lambda text: text * 50))
blocks = st.builds(
    SeenBlock, st.binary(min_size=16, max_size=16), labels, st.just(1), st.sampled_from([0, 1, 255, 65_536, LARGEST])
)
distinct_blocks = st.lists(blocks, unique_by=(lambda block: block.fingerprint, lambda block: block.label), max_size=40)
once = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=settings().max_examples // 3)


@once
@given(
    tenant=st.none() | texts, id=texts, plans=st.lists(texts, min_size=3, max_size=3, unique=True), sent=distinct_blocks
)
def test_blocks_survive_the_round_trip(
    open_store: Callable[..., RedisSeenStore],
    admin: redis.Redis,
    tenant: str | None,
    id: str,
    plans: list[str],
    sent: list[SeenBlock],
) -> None:
    admin.flushall()
    store = open_store()
    conversation = Conversation(tenant, id)
    first, second, third = plans
    proposed = {block.fingerprint: block.label for block in sent}
    assert store.execute(Prepare(conversation, first, proposed)) == PreparedTurn(0, {}, frozenset())
    assert store.execute(Commit(conversation, first, sent))
    recorded = {block.fingerprint: block for block in sent}
    assert store.execute(Prepare(conversation, second, proposed)) == PreparedTurn(1, recorded, frozenset())
    others = {bytes(byte ^ 255 for byte in block.fingerprint): block.label for block in sent}
    expected = frozenset(label for fingerprint, label in others.items() if fingerprint not in proposed)
    assert store.execute(Prepare(conversation, third, others)).taken == expected
    assert store.inspect(conversation) == Snapshot(0, 1, tuple(sent), (second, third))


@once
@given(sent=distinct_blocks.filter(bool), which=st.sets(st.integers(0, 39)))
def test_each_seen_block_is_matched_to_its_proposal(
    open_store: Callable[..., RedisSeenStore], admin: redis.Redis, sent: list[SeenBlock], which: set[int]
) -> None:
    """However many bytes are between them in the answer."""
    admin.flushall()
    store = open_store()
    conversation = Conversation("acme", "chat")
    recorded = [block for i, block in enumerate(sent) if i in which]
    store.execute(Prepare(conversation, "p1", {}))
    store.execute(Commit(conversation, "p1", recorded))
    prepared = store.execute(Prepare(conversation, "p2", {block.fingerprint: block.label for block in sent}))
    assert list(prepared.seen.values()) == recorded


def test_script_and_info_agree_on_server_identity(
    open_store: Callable[..., RedisSeenStore], admin: redis.Redis
) -> None:
    store = open_store()
    raw: list[Any] = []
    client = store._clients.sync()
    execute = client.execute_command
    client.execute_command = lambda *command: raw.append(execute(*command)) or raw[-1]  # type: ignore[func-returns-value]
    store.execute(Prepare(Conversation("acme", "chat"), "p1", {}))
    answer = unpack_prepared(raw[-1], {}, b"p1")
    assert answer is not None
    from_script = answer.server
    from_info = read_info(admin.info("server"), admin.info("replication"))
    assert from_script.identity == from_info.identity
    assert from_script.promoted == from_info.promoted
    assert from_script.uptime == from_info.uptime
    assert len(from_script.identity) == 40


def test_invalid_records_are_treated_as_missing() -> None:
    record = b"\x01" + bytes(20)
    good = record + hashlib.sha1(record).hexdigest()[:8].encode()
    assert unpack_hash({b"m": good, b"p": b"", b"c": b""}) == Snapshot(0, 0, (), ())
    for packed in (b"\x02" + good[1:], good[:-1] + b"x", good[:9] + b"x" + good[10:], good + b"x", record):
        assert unpack_hash({b"m": packed, b"p": b"", b"c": b""}) is None
    for fields in ({}, {b"m": good}, {b"m": good, b"p": b""}, {b"m": good, b"p": b"x", b"c": b""}):
        assert unpack_hash(fields) is None


def test_token_counts_are_capped_at_four_bytes() -> None:
    """A commit that always fails would be retried for ever."""
    _, tokens = pack_sent([SeenBlock(b"A" * 16, "Doc_A", 1, 1 << 40)])
    assert tokens == b"\xff" * 4
