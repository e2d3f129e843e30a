"""Lua and Python read each other's values: random records travel both ways through a real server."""

from __future__ import annotations

from collections.abc import Callable

import redis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from warmprefix.stores import Commit, Conversation, Prepare, PreparedTurn, SeenBlock, Snapshot
from warmprefix_redis import RedisSeenStore
from warmprefix_redis.record import encode_sent

LARGEST = 2**32 - 1
texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=12)  # lone surrogates, too
labels = st.one_of(texts, texts.map(lambda text: text * 50))
blocks = st.builds(
    SeenBlock,
    st.binary(min_size=16, max_size=16),
    labels,
    turn=st.just(1),
    tokens=st.sampled_from([0, 1, 255, 65_536, LARGEST]),
    time=st.just(0),
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


def test_token_counts_are_capped_at_four_bytes() -> None:
    """A commit that always fails would be retried for ever."""
    assert encode_sent([SeenBlock(b"A" * 16, "Doc_A", 1, 1 << 40)]) == [("41" * 16, "Doc_A", LARGEST)]
