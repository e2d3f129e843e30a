"""The messages in which vLLM and SGLang publish changes of their prefix caches, and their order. Pure: no I/O.

A message is `[topic, sequence number, payload]`, the payload a msgpack array `[time, [event, ...], rank]`. An event is
a map with its type under `"type"`, or, from older engines, an array that begins with it. Replies to a replay request
have an empty frame in front, and no topic from older engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple, TypeAlias, Union

from warmprefix.errors import MissingExtraError, WarmprefixError

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("events", "msgspec") from error

__all__ = [
    "END",
    "AllBlocksCleared",
    "Arrival",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "KvHash",
    "KvMessage",
    "MalformedMessageError",
    "SequenceTracker",
    "SharingKey",
    "read_batch",
    "read_message",
    "replay_request",
]

KvHash: TypeAlias = int | bytes
"""The engine's own name for a KV block with its whole prefix: 64 bits of a digest, or all of it."""

END = -1
"""The sequence number that ends a replay."""


class MalformedMessageError(WarmprefixError, ValueError):
    """A message could not be decoded, so its events are lost."""


class KvMessage(NamedTuple):
    """One message, its payload not yet decoded."""

    topic: bytes
    """Empty where the reply to a replay request has none."""
    sequence: int
    """Counts from 0 per publisher; `END` ends a replay."""
    payload: bytes


class SharingKey(NamedTuple):
    """The values, besides the tokens, that requests with common KV blocks have in common."""

    salt: str | None
    """The `cache_salt`. Engines send it with the first block of a prompt; later blocks inherit it."""
    adapter: str | None
    """Name of the LoRA adapter."""
    extras: Sequence[bytes] | None
    """Further identity of each block, such as images; None if no block has any."""


_TAGS = ("cache_salt", "lora")
"""Tags that some versions put in front of a salt or an adapter's name."""


class BlockStored(msgspec.Struct, gc=False):
    """The prefix cache stored a run of KV blocks, each the parent of the next."""

    block_hashes: list[KvHash]
    parent_block_hash: KvHash | None
    """Block before the first one; None at the beginning of a prompt."""
    token_ids: list[int]
    block_size: int
    """Tokens per block."""
    lora_id: int | None = None
    medium: str | None = None
    """Place of the copy, such as `GPU` or `CPU`; None from engines with a single place."""
    lora_name: str | dict[str, Any] | None = None
    """Some versions of SGLang send a map with the `cache_salt` at this position of an array."""
    extra_keys: list[Any] | msgspec.UnsetType | None = msgspec.UNSET
    """Further parts of each block's identity: images, and with the first block the cache salt. Unset if left out."""
    group_idx: int | None = None
    """Index among the caches of a hybrid model."""
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None
    ownership: Any = None
    session_id: Any = None
    cache_salt: str | None = None
    """Sent here by SGLang."""
    lookahead_token_ids: list[list[int]] | None = None
    """Tokens behind each block that its hash covers too, for the drafts of EAGLE and MTP; None without them."""

    def sharing_key(self) -> SharingKey:
        """Return the key that requests need to use these KV blocks."""
        salt, adapter = self.cache_salt, self.lora_name
        if isinstance(adapter, dict):
            salt, adapter = adapter.get("cache_salt"), None
        extras: list[bytes] | None = None
        for position, parts in enumerate(() if self.extra_keys is msgspec.UNSET else self.extra_keys or ()):
            for part in parts or ():
                name = part[1] if isinstance(part, list) and len(part) == 2 and part[0] in _TAGS else part
                if name == adapter:
                    continue
                if isinstance(name, str) and position == 0 and self.parent_block_hash is None and salt is None:
                    salt = name
                    continue
                if extras is None:
                    extras = [b""] * len(self.block_hashes)
                if position < len(extras):
                    extras[position] += msgspec.msgpack.encode(part)
        return SharingKey(salt, adapter, extras)


class BlockRemoved(msgspec.Struct, gc=False):
    """The prefix cache dropped copies of KV blocks from one medium."""

    block_hashes: list[KvHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None


class AllBlocksCleared(msgspec.Struct, gc=False):
    """The prefix cache is empty."""


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(NamedTuple):
    """The decoded events of one message."""

    time: float
    """Timestamp of the batch, in seconds since 1970 by the engine's clock."""
    events: Sequence[KvEvent]
    rank: int | None
    """Data-parallel rank of the publisher."""
    positional: bool
    """True if events came as arrays; a missing field then means that the engine does not send it."""
    unknown: int
    """Number of skipped events of unknown types, and of skipped unknown fields."""


def read_message(frames: Sequence[bytes]) -> KvMessage:
    """Return the parts of a published message or of a replayed one; raise MalformedMessageError if it is not valid."""
    if not 2 <= len(frames) <= 4:
        raise MalformedMessageError(f"frames must be 2 to 4, got {len(frames)}")
    if len(frames[-2]) != 8:
        raise MalformedMessageError(f"a sequence number must have 8 bytes, got {frames[-2]!r}")
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    if sequence < END:
        raise MalformedMessageError(f"a sequence number must be {END} or more, got {sequence}")
    return KvMessage(frames[-3] if len(frames) > 2 else b"", sequence, frames[-1])


def replay_request(start: int) -> list[bytes]:
    """Return the frames that request all batches from this number on that the publisher still has."""
    return [b"", start.to_bytes(8, "big")]


def read_batch(payload: bytes) -> EventBatch:
    """Decode the payload of a message; unknown events and fields are skipped and counted.

    Raises:
        MalformedMessageError: It is not a batch, or an event lacks a required field.
    """
    try:
        batch = _MAPS.decode(payload)
        return EventBatch(batch.ts, batch.events, batch.data_parallel_rank, False, 0)
    except msgspec.ValidationError:
        pass
    except msgspec.MsgspecError as error:
        raise MalformedMessageError(f"payload must be msgpack: {error}") from error
    try:
        batch = _ARRAYS.decode(payload)
        return EventBatch(batch.ts, batch.events, batch.data_parallel_rank, True, 0)
    except msgspec.ValidationError:
        return _read_leniently(payload)


def _read_leniently(payload: bytes) -> EventBatch:
    """Decode event by event, and skip unknown types and fields."""
    try:
        batch = _RAW.decode(payload)
    except msgspec.MsgspecError as error:
        raise MalformedMessageError(f"payload must be a batch of events: {error}") from error
    events: list[KvEvent] = []
    positional, skipped = False, 0
    for raw in batch.events:
        try:
            named: dict[str, msgspec.Raw] | None = None
            with suppress(msgspec.ValidationError):
                named = _MAP_OF_RAW.decode(raw)
            values: list[msgspec.Raw] = [] if named is not None else _LIST_OF_RAW.decode(raw)
            kind = values[0] if values else (named or {}).get("type")
            if kind is None:
                raise MalformedMessageError("an event has no type")
            fields = _FIELD_NAMES.get(_STRING.decode(kind))
            if fields is None:
                skipped += 1
                continue
            events.append((_LENIENT_ARRAY if named is None else _LENIENT_MAP).decode(raw))
        except msgspec.MsgspecError as error:
            raise MalformedMessageError(f"an event could not be decoded: {error}") from error
        if named is None:
            positional = True
            skipped += max(len(values) - 1 - len(fields), 0)
        else:
            skipped += len(named.keys() - fields) - 1
    return EventBatch(batch.ts, events, batch.data_parallel_rank, positional, skipped)


class Arrival(Enum):
    """The relation of a live message to the messages applied before it."""

    NEXT = "next"
    """It follows the last applied message."""
    SEEN = "seen"
    """It was applied before, from a replay."""
    GAP = "gap"
    """Messages before it are missing."""
    RESTART = "restart"
    """The publisher restarted: it counts from 0 again, with an empty cache."""


class SequenceTracker:
    """Tracks which messages of one publisher were applied.

    Publishers count their messages from 0 and do not announce a restart. Live messages arrive in order, so a number
    that is not above the previous live one means a restart. A number that is not above the last *replayed* one was
    applied before, unless its batch is newer.
    """

    def __init__(self) -> None:
        self.applied: int | None = None
        """Number of the last applied message; None if the state is unknown."""
        self.applied_time = 0.0
        """Timestamp of its batch."""
        self._live: int | None = None

    def arrive(self, number: int, time: float) -> Arrival:
        """Note the arrival of a live message whose batch has this timestamp, and classify it."""
        before, self._live = self._live, number
        if self.applied is None:
            return Arrival.NEXT if number == 0 else Arrival.GAP
        if before is not None and number <= before:
            return Arrival.RESTART
        if number > self.applied:
            return Arrival.NEXT if number == self.applied + 1 else Arrival.GAP
        return Arrival.RESTART if time > self.applied_time else Arrival.SEEN

    def apply(self, number: int, time: float) -> None:
        """Note that every message up to this one was applied, or given up."""
        self.applied, self.applied_time = number, time

    def reset(self) -> None:
        """Forget which messages were applied; live messages are still compared with earlier live ones."""
        self.applied, self.applied_time = None, 0.0


_TYPES = (BlockStored, BlockRemoved, AllBlocksCleared)
_FIELD_NAMES = {kind.__name__: frozenset(kind.__struct_fields__) for kind in _TYPES}


def _union(**config: Any) -> Any:
    """Return the union of the three events, encoded in one way."""
    config["gc"] = False
    kinds = [msgspec.defstruct(kind.__name__, [], bases=(kind,), tag=kind.__name__, **config) for kind in _TYPES]
    return Union[tuple(kinds)]  # noqa: UP007


def _batch_of(event: Any) -> msgspec.msgpack.Decoder[Any]:
    fields: list[Any] = [("ts", float), ("events", list[event]), ("data_parallel_rank", int | None, None)]
    return msgspec.msgpack.Decoder(msgspec.defstruct("Batch", fields, array_like=True, gc=False))


# A batch without unknown fields is decoded at once. Any other is decoded again, event by event, to count them.
_MAPS = _batch_of(_union(forbid_unknown_fields=True))
_ARRAYS = _batch_of(_union(forbid_unknown_fields=True, array_like=True))
_RAW = _batch_of(msgspec.Raw)
_LENIENT_MAP: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_union())
_LENIENT_ARRAY: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_union(array_like=True))
_MAP_OF_RAW = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_LIST_OF_RAW = msgspec.msgpack.Decoder(list[msgspec.Raw])
_STRING = msgspec.msgpack.Decoder(str)
