from __future__ import annotations

import re
import struct
import zlib

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from warmprefix.order_sharing import MAX_BLOCKS, MAX_TOKENS, LearnedOrder
from warmprefix.plan import Scope
from warmprefix_redis.order_codec import SENDER_BYTES, decode, encode, stream_key

KEYS = st.binary(min_size=16, max_size=16)


@st.composite
def learned_orders(draw: st.DrawFn) -> LearnedOrder:
    keys = draw(st.lists(KEYS, min_size=1, max_size=20, unique=True))
    count = len(keys)
    tokens = draw(st.lists(st.integers(0, MAX_TOKENS), min_size=count, max_size=count))
    ranks = draw(st.lists(st.integers(0, 65_535), min_size=count, max_size=count, unique=True))
    return LearnedOrder(keys, tuple(tokens), tuple(ranks))


SENDERS = st.binary(min_size=SENDER_BYTES, max_size=SENDER_BYTES)


@given(SENDERS, learned_orders())
def test_decode_inverts_encode(sender: bytes, order: LearnedOrder) -> None:
    assert decode(encode(sender, order)) == (sender, order)


@given(st.binary(max_size=200))
@example(b"")
@example(b"\1")
def test_foreign_bytes_are_no_entry(entry: bytes) -> None:
    assert decode(entry) is None


@given(SENDERS, learned_orders(), st.data())
def test_damage_is_detected(sender: bytes, order: LearnedOrder, data: st.DataObject) -> None:
    entry = encode(sender, order)
    at = data.draw(st.integers(0, len(entry) - 1))
    flipped = entry[at] ^ data.draw(st.integers(1, 255))
    for damaged in (
        entry[:at] + bytes([flipped]) + entry[at + 1 :],
        entry[:at],
        entry + data.draw(st.binary(min_size=1, max_size=30)),
    ):
        assert decode(damaged) is None


def signed(count: int, body: bytes, version: int = 1) -> bytes:
    """Return an entry with a valid checksum, whatever else is wrong with it."""
    sender = b"sender 1" + count.to_bytes(2, "big")
    checksum = zlib.crc32(body, zlib.crc32(bytes([version, 0, 0, 0, 0]) + sender))
    return bytes([version]) + checksum.to_bytes(4, "big") + sender + body


def block_list(keys: list[bytes], tokens: list[int], ranks: list[int]) -> bytes:
    return b"".join(keys) + struct.pack(f">{len(keys)}I{len(keys)}H", *tokens, *ranks)


A, B = b"a" * 16, b"b" * 16
GOOD = block_list([A, B], [1, 2], [1, 0])


def test_layout_is_stable() -> None:
    assert decode(signed(2, GOOD)) == (b"sender 1", LearnedOrder([A, B], (1, 2), (1, 0)))


@pytest.mark.parametrize(
    "entry",
    [
        pytest.param(signed(2, GOOD, version=2), id="another version"),
        pytest.param(signed(0, b""), id="an order of no blocks"),
        pytest.param(signed(3, GOOD), id="fewer blocks than the header has"),
        pytest.param(signed(1, GOOD), id="more blocks than the header has"),
        pytest.param(signed(2, GOOD + b"\0"), id="a byte more"),
        pytest.param(signed(65_535, bytes(22 * 65_535)), id="too many blocks"),
        pytest.param(signed(2, block_list([A, A], [1, 2], [0, 1])), id="a block twice"),
        pytest.param(signed(2, block_list([A, B], [1, 2], [0, 0])), id="a rank twice"),
        pytest.param(signed(1, block_list([A], [MAX_TOKENS + 1], [0])), id="too long a block"),
    ],
)
def test_decode_refuses_invalid_orders(entry: bytes) -> None:
    assert decode(entry) is None


@given(st.integers(0, 65_535), st.binary(max_size=400))
def test_valid_checksum_does_not_make_an_entry_valid(count: int, body: bytes) -> None:
    decoded = decode(signed(count, body))
    if decoded is not None:
        assert encode(*decoded) == signed(count, body)


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
def test_encode_refuses_invalid_orders(order: LearnedOrder) -> None:
    with pytest.raises(ValueError):  # noqa: PT011
        encode(b"sender 1", order)


def test_the_bounds_themselves_are_allowed() -> None:
    keys = [i.to_bytes(16, "big") for i in range(MAX_BLOCKS)]
    order = LearnedOrder(keys, (MAX_TOKENS,) * MAX_BLOCKS, tuple(range(65_535, 65_535 - MAX_BLOCKS, -1)))
    assert decode(encode(b"sender 1", order)) == (b"sender 1", order)


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
