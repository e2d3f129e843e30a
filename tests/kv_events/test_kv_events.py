"""Decoding of KV event messages."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kv_publisher import removed, stored
from warmprefix_kv_events.kv_events import (
    END,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    MalformedMessageError,
    read_batch,
    read_message,
    replay_request,
)

encode = msgspec.msgpack.encode
SEVEN = (7).to_bytes(8, "big")
LAST = (-1).to_bytes(8, "big", signed=True)


@pytest.mark.parametrize(
    ("frames", "topic", "sequence"),
    [
        ([b"kv", SEVEN, b"x"], b"kv", 7),
        ([b"", SEVEN, b"x"], b"", 7),  # without a topic, or a reply of vLLM before 0.26 and of SGLang
        ([b"", b"kv", SEVEN, b"x"], b"kv", 7),  # a reply of vLLM since 0.26
        ([SEVEN, b"x"], b"", 7),
        ([b"", b"", LAST, b""], b"", END),
        ([b"", LAST, b""], b"", END),
    ],
)
def test_messages_and_replies(frames: list[bytes], topic: bytes, sequence: int) -> None:
    message = read_message(frames)
    assert (message.topic, message.sequence, message.payload) == (topic, sequence, frames[-1])


@pytest.mark.parametrize(
    "frames",
    [
        [],
        [b"x"],
        [b"kv", b"short", b"x"],
        [b"a", b"b", b"c", SEVEN, b"x"],
        [b"kv", (-2).to_bytes(8, "big", signed=True), b""],
    ],
)
def test_malformed_frames_are_refused(frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessageError):
        read_message(frames)


def test_replay_requests_have_the_frames_of_a_router() -> None:
    assert replay_request(258) == [b"", b"\0\0\0\0\0\0\1\2"]


def test_events_as_maps_are_decoded() -> None:
    batch = read_batch(
        encode([1.5, [stored([1, 2], None, [5, 6, 7, 8], 2), removed(3, 4), {"type": "AllBlocksCleared"}], 3])
    )
    first, second, third = batch.events
    assert (batch.time, batch.rank, batch.positional, batch.unknown) == (1.5, 3, False, 0)
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.parent_block_hash, first.token_ids, first.block_size, first.medium) == (
        [1, 2],
        None,
        [5, 6, 7, 8],
        2,
        "GPU",
    )
    assert isinstance(second, BlockRemoved)
    assert second.block_hashes == [3, 4]
    assert isinstance(third, AllBlocksCleared)


def test_hashes_may_be_bytes_or_negative() -> None:
    digest = bytes(range(32))
    events = read_batch(encode([1, [stored([digest, -5], digest, [1, 2], 1), removed(digest)]])).events
    assert isinstance(events[0], BlockStored)
    assert (events[0].block_hashes, events[0].parent_block_hash) == ([digest, -5], digest)
    assert isinstance(events[1], BlockRemoved)
    assert events[1].block_hashes == [digest]


@pytest.mark.parametrize(
    "fields",
    [
        [[1], None, [5, 6], 2, None],  # SGLang 0.4, vLLM 0.9
        [[1], None, [5, 6], 2, None, "GPU"],
        [[1], None, [5, 6], 2, None, "GPU", None],
        [[1], None, [5, 6], 2, None, "GPU", None, [None], 0],  # vLLM 0.23
    ],
)
def test_arrays_may_lack_their_last_fields(fields: list[Any]) -> None:
    batch = read_batch(encode([1.0, [["BlockStored", *fields], ["BlockRemoved", [1]], ["AllBlocksCleared"]]]))
    first = batch.events[0]
    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.token_ids, first.block_size) == ([1], [5, 6], 2)
    assert (len(batch.events), batch.positional, batch.rank, batch.unknown) == (3, True, None, 0)


def test_unknown_types_and_fields_are_skipped_and_counted() -> None:
    event = stored([1], None, [1, 2], 2)
    batch = read_batch(encode([1.0, [event | {"new": 1, "newer": {}}, {"type": "Moved", "x": [1]}, removed(1)], 0]))
    assert [type(item) for item in batch.events] != []
    assert (len(batch.events), batch.unknown) == (2, 3)
    arrays = [["BlockRemoved", [1], "GPU", 0, None, None, "new"], ["Moved", 1], ["AllBlocksCleared"]]
    batch = read_batch(encode([1.0, arrays, 0, "a field of the batch"]))
    assert (len(batch.events), batch.unknown, batch.positional) == (2, 2, True)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x93\x01",
        encode({}),
        encode([1.0]),
        encode(["now", []]),
        encode([1.0, [7]]),
        encode([1.0, [[]]]),
        encode([1.0, [{"block_hashes": []}]]),
        encode([1.0, [{"type": 7}]]),
        encode([1.0, [["BlockStored", [1]]]]),
        encode([1.0, [{"type": "BlockRemoved", "block_hashes": 1}]]),
        encode([1.0, [stored([1], None, [1], 1) | {"token_ids": "no"}]]),
        encode([1.0, [{"type": "Moved"}, {"type": "BlockStored"}]]),
        encode([1.0, []]) + b"\x00",
    ],
)
def test_malformed_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(MalformedMessageError):
        read_batch(payload)


@given(st.binary(max_size=64))
def test_arbitrary_bytes_raise_only_malformed_message_error(payload: bytes) -> None:
    with suppress(MalformedMessageError):
        read_batch(payload)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.text(max_size=8) | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(st.sampled_from(["BlockStored", "BlockRemoved", "AllBlocksCleared", "Other"]), st.lists(VALUES, max_size=9))
def test_arbitrary_events_raise_only_malformed_message_error(kind: str, fields: list[Any]) -> None:
    names = ["block_hashes", "parent_block_hash", "token_ids", "block_size", "extra_keys", "medium", "new"]
    for event in ([kind, *fields], {"type": kind} | dict(zip(names, fields, strict=False))):
        with suppress(MalformedMessageError):
            for event_read in read_batch(encode([1.0, [event]])).events:
                if isinstance(event_read, BlockStored):
                    event_read.sharing_key()


@pytest.mark.parametrize(
    ("fields", "salt", "adapter", "has_extras"),
    [
        ({"extra_keys": [["s"], None]}, "s", None, False),
        ({"extra_keys": [[["cache_salt", "s"]], None]}, "s", None, False),
        ({"extra_keys": [["a", "s"], ["a"]], "lora_name": "a"}, "s", "a", False),
        ({"extra_keys": [[["lora", "a"]], [["lora", "a"]]], "lora_name": "a"}, None, "a", False),
        ({"extra_keys": [["s"], [["image", 3]]]}, "s", None, True),
        ({"extra_keys": None, "cache_salt": "s"}, "s", None, False),  # SGLang
        ({"lora_name": {"cache_salt": "s"}}, "s", None, False),  # its arrays
    ],
)
def test_sharing_key_of_a_stored_block(
    fields: dict[str, Any], salt: str | None, adapter: str | None, has_extras: bool
) -> None:
    event = read_batch(encode([1.0, [stored([1, 2], None, [1, 2], 1, **fields)]])).events[0]
    assert isinstance(event, BlockStored)
    sharing = event.sharing_key()
    assert (sharing.salt, sharing.adapter, sharing.extras is not None) == (salt, adapter, has_extras)


def test_a_text_after_the_first_block_is_not_a_salt() -> None:
    event = read_batch(encode([1.0, [stored([2], 1, [1], 1, extra_keys=[["digest"]])]])).events[0]
    assert isinstance(event, BlockStored)
    sharing = event.sharing_key()
    assert sharing.salt is None
    assert sharing.extras == [encode("digest")]
