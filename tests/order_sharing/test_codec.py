from __future__ import annotations

import re
import struct
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix.order_sharing import MAX_BLOCKS, MAX_TOKENS, LearnedOrder
from warmprefix.plan import Scope
from warmprefix_redis.order_codec import MAX_ORDERS, WORKER_BYTES, decode, encode, orders_in, pack, stream_key

KEYS = st.binary(min_size=16, max_size=16)


@st.composite
def learned_orders(draw: st.DrawFn) -> LearnedOrder:
    keys = draw(st.lists(KEYS, min_size=1, max_size=20, unique=True))
    count = len(keys)
    tokens = draw(st.lists(st.integers(0, MAX_TOKENS), min_size=count, max_size=count))
    ranks = draw(st.lists(st.integers(0, 65_535), min_size=count, max_size=count, unique=True))
    return LearnedOrder(keys, tuple(tokens), tuple(ranks))


WORKERS = st.binary(min_size=WORKER_BYTES, max_size=WORKER_BYTES)
BATCHES = st.lists(learned_orders(), min_size=1, max_size=8)


@given(WORKERS, BATCHES)
def test_decode_inverts_encode(worker: bytes, batch: list[LearnedOrder]) -> None:
    payload = encode(worker, [pack(order) for order in batch])
    assert decode(payload) == (worker, batch)
    assert orders_in(payload) == len(batch)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\1")
def test_foreign_bytes_raise_only_value_error(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - whatever its message
        decode(payload)
    orders_in(payload)


@given(WORKERS, BATCHES, st.data())
def test_damage_is_detected(worker: bytes, batch: list[LearnedOrder], data: st.DataObject) -> None:
    payload = encode(worker, [pack(order) for order in batch])
    at = data.draw(st.integers(0, len(payload) - 1))
    flipped = payload[at] ^ data.draw(st.integers(1, 255))
    for damaged in (
        payload[:at] + bytes([flipped]) + payload[at + 1 :],
        payload[:at],
        payload + data.draw(st.binary(min_size=1, max_size=30)),
    ):
        with pytest.raises(ValueError):  # noqa: PT011
            decode(damaged)


def signed(count: int, body: bytes, version: int = 1) -> bytes:
    """Return an entry with a valid checksum, whatever else is wrong with it."""
    head = struct.pack(">B8sH", version, b"worker 1", count)
    return head + zlib.crc32(body, zlib.crc32(head + bytes(4))).to_bytes(4, "big") + body


def block_list(keys: list[bytes], tokens: list[int], ranks: list[int], count: int | None = None) -> bytes:
    n = len(keys)
    count = n if count is None else count
    return struct.pack(">H", count) + b"".join(keys) + struct.pack(f">{n}I{n}H", *tokens, *ranks)


A, B = b"a" * 16, b"b" * 16
GOOD = block_list([A, B], [1, 2], [1, 0])


def test_layout_is_stable() -> None:
    assert decode(signed(1, GOOD)) == (b"worker 1", [LearnedOrder([A, B], (1, 2), (1, 0))])


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(signed(1, GOOD, version=2), id="another version"),
        pytest.param(signed(0, b""), id="no order"),
        pytest.param(signed(2, GOOD), id="fewer orders than the header has"),
        pytest.param(signed(1, GOOD + GOOD), id="more orders than the header has"),
        pytest.param(signed(1, GOOD + b"\0"), id="half a length more"),
        pytest.param(signed(MAX_ORDERS + 1, GOOD * (MAX_ORDERS + 1)), id="too many orders"),
        pytest.param(signed(1, b"\0\0"), id="an order of no blocks"),
        pytest.param(signed(1, b""), id="no length"),
        pytest.param(signed(1, block_list([A], [1], [0], count=2)), id="fewer blocks than the length"),
        pytest.param(signed(1, b"\xff\xff" + bytes(22 * 65_535)), id="too many blocks"),
        pytest.param(signed(1, block_list([A, A], [1, 2], [0, 1])), id="a block twice"),
        pytest.param(signed(1, block_list([A, B], [1, 2], [0, 0])), id="a rank twice"),
        pytest.param(signed(1, block_list([A], [MAX_TOKENS + 1], [0])), id="too long a block"),
    ],
)
def test_decode_refuses_invalid_orders(payload: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        decode(payload)


@given(st.integers(0, 65_535), st.binary(max_size=400))
def test_valid_checksum_does_not_make_an_entry_valid(count: int, body: bytes) -> None:
    try:
        entry = decode(signed(count, body))
    except ValueError:
        return
    assert len(entry.orders) == count
    for order in entry.orders:
        assert pack(order)


@pytest.mark.parametrize(
    "order",
    [
        LearnedOrder([], [], []),
        LearnedOrder([A, A], [1, 1], [0, 1]),
        LearnedOrder([A, B], [1, 1], [0, 0]),
        LearnedOrder([A], [1, 2], [0]),
        LearnedOrder([A], [1], []),
        LearnedOrder([A[:15]], [1], [0]),
        LearnedOrder([A], [-1], [0]),
        LearnedOrder([A], [MAX_TOKENS + 1], [0]),
        LearnedOrder([A], [1], [65_536]),
        LearnedOrder([A], [1], [-1]),
        LearnedOrder([i.to_bytes(16, "big") for i in range(MAX_BLOCKS + 1)], [1] * (MAX_BLOCKS + 1), range(2_000)),
    ],
)
def test_pack_refuses_invalid_orders(order: LearnedOrder) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        pack(order)


def test_the_bounds_themselves_are_allowed() -> None:
    keys = [i.to_bytes(16, "big") for i in range(MAX_BLOCKS)]
    order = LearnedOrder(keys, (MAX_TOKENS,) * MAX_BLOCKS, tuple(range(65_535, 65_535 - MAX_BLOCKS, -1)))
    assert decode(encode(b"worker 1", [pack(order)] * MAX_ORDERS)).orders == [order] * MAX_ORDERS


NAMES = st.one_of(st.none(), st.text(st.characters(exclude_categories=()), max_size=10))
SCOPES = st.builds(Scope, NAMES, NAMES, st.one_of(st.none(), KEYS))


@given(st.lists(SCOPES, unique=True, max_size=20))
@example([Scope(None, None, None), Scope("", None, None), Scope(None, "", None), Scope("", "", b"")])
@example([Scope("ab", "c", None), Scope("a", "bc", None), Scope("abc", "", None)])
@example([Scope("a}{b", "{}", None), Scope("a", "\ud800", None)])
def test_stream_keys_are_distinct_and_opaque(scopes: list[Scope]) -> None:
    keys = [stream_key("wp", scope) for scope in scopes]
    assert len(set(keys)) == len(keys)
    assert all(re.fullmatch(rb"wp:\{[0-9a-f]{32}\}:orders", key) for key in keys)
