"""The messages in which vLLM and SGLang publish what their prefix caches take up and drop. Pure: bytes in, events out.

A message is `[topic, sequence number, payload]`, the payload a msgpack array `[time, [event, ...], rank]`. An event is
a map with its type under `"type"`, or, from older engines, an array that begins with it. Replies to a request for what
was missed have an empty frame in front, and no topic from older engines.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias, Union

from warmprefix.errors import MissingExtraError, WarmprefixError

try:
    import msgspec
except ImportError as error:
    raise MissingExtraError("events", "msgspec") from error

__all__ = [
    "END",
    "AllBlocksCleared",
    "BlockRemoved",
    "BlockStored",
    "EventBatch",
    "KvHash",
    "MalformedMessageError",
    "Message",
    "Sharing",
    "read_batch",
    "read_message",
    "replay_request",
]

KvHash: TypeAlias = int | bytes
"""The engine's own name for a KV block and all that stands before it: 64 bits of a digest, or all of it."""

END = -1
"""The sequence number that ends a replay."""


class MalformedMessageError(WarmprefixError, ValueError):
    """A message is not what an engine publishes, so that what it told is lost."""


class Message(NamedTuple):
    """One message, its payload not yet read."""

    topic: bytes
    """Empty where the reply to a replay request has none."""
    sequence: int
    """From 0 on, a publisher; `END` at the end of a replay."""
    payload: bytes


class Sharing(NamedTuple):
    """What must be equal beside the tokens for one request to use another's KV blocks."""

    salt: str | None
    """The `cache_salt`. Engines tell it with a prompt's first block; later ones follow from that."""
    adapter: str | None
    """The LoRA adapter's name."""
    others: Sequence[bytes] | None
    """For each block what else there is, such as images; None if there is nothing with any."""


_TAGS = ("cache_salt", "lora")
"""What some versions put in front of a salt or an adapter's name."""


class BlockStored(msgspec.Struct, gc=False):
    """The prefix cache took up a run of KV blocks, each the parent of the next."""

    block_hashes: list[KvHash]
    parent_block_hash: KvHash | None
    """Of the block before the first; None at the beginning of a prompt."""
    token_ids: list[int]
    block_size: int
    """Tokens a block."""
    lora_id: int | None = None
    medium: str | None = None
    """Where the copy is, such as `GPU` or `CPU`; None where engines know one place only."""
    lora_name: str | dict[str, Any] | None = None
    """Some versions of SGLang put a map in this place of an array, with the `cache_salt`."""
    extra_keys: list[Any] | msgspec.UnsetType | None = msgspec.UNSET
    """What else is part of each block's identity: images, and the cache salt with the first. Unset where the engine
    does not tell, or tells by leaving it out."""
    group_idx: int | None = None
    """Which of several caches of a hybrid model."""
    kv_cache_spec_kind: Any = None
    kv_cache_spec_sliding_window: Any = None
    locality: Any = None
    ownership: Any = None
    session_id: Any = None
    cache_salt: str | None = None
    """SGLang's place for it."""

    def sharing(self) -> Sharing:
        """Which requests can use these KV blocks."""
        salt, adapter = self.cache_salt, self.lora_name
        if isinstance(adapter, dict):
            salt, adapter = adapter.get("cache_salt"), None
        others: list[bytes] | None = None
        for position, parts in enumerate(() if self.extra_keys is msgspec.UNSET else self.extra_keys or ()):
            for part in parts or ():
                name = part[1] if isinstance(part, list) and len(part) == 2 and part[0] in _TAGS else part
                if name == adapter:
                    continue
                if isinstance(name, str) and position == 0 and self.parent_block_hash is None and salt is None:
                    salt = name
                    continue
                if others is None:
                    others = [b""] * len(self.block_hashes)
                if position < len(others):
                    others[position] += msgspec.msgpack.encode(part)
        return Sharing(salt, adapter, others)


class BlockRemoved(msgspec.Struct, gc=False):
    """The prefix cache dropped copies of KV blocks from one medium."""

    block_hashes: list[KvHash]
    medium: str | None = None
    group_idx: int | None = None
    locality: Any = None
    ownership: Any = None


class AllBlocksCleared(msgspec.Struct, gc=False):
    """The prefix cache is empty."""


Event: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared


class EventBatch(NamedTuple):
    """The events of one message that were understood."""

    time: float
    """When the engine put them together; seconds since 1970 by its clock."""
    events: Sequence[Event]
    rank: int | None
    """The data-parallel rank that publishes."""
    positional: bool
    """Whether events came as arrays, where a field that is not told differs from an empty one."""
    unknown: int
    """Events of unknown types, and unknown fields of others, that were skipped."""


def read_message(frames: Sequence[bytes]) -> Message:
    """The parts of a published message, or of the reply to a replay request.

    Raises:
        MalformedMessageError: There are too few or too many frames, or the second to last is no sequence number.
    """
    if not 2 <= len(frames) <= 4:
        raise MalformedMessageError(f"a message has 2 to 4 frames, this one has {len(frames)}")
    if len(frames[-2]) != 8:
        raise MalformedMessageError(f"a sequence number has 8 bytes, this one has {len(frames[-2])}")
    sequence = int.from_bytes(frames[-2], "big", signed=True)
    if sequence < END:
        raise MalformedMessageError(f"a sequence number is 0 or more, or {END}, this one is {sequence}")
    return Message(frames[-3] if len(frames) > 2 else b"", sequence, frames[-1])


def replay_request(start: int) -> list[bytes]:
    """The frames that ask for all batches from this sequence number on that the publisher still has."""
    return [b"", start.to_bytes(8, "big")]


def read_batch(payload: bytes) -> EventBatch:
    """The events of a message.

    Raises:
        MalformedMessageError: It is no batch, or an event of a known type lacks what it needs.
    """
    try:
        batch = _MAPS.decode(payload)
        return EventBatch(batch.ts, batch.events, batch.data_parallel_rank, False, 0)
    except msgspec.ValidationError:
        pass
    except msgspec.MsgspecError as error:
        raise MalformedMessageError(f"no msgpack: {error}") from error
    try:
        batch = _ARRAYS.decode(payload)
        return EventBatch(batch.ts, batch.events, batch.data_parallel_rank, True, 0)
    except msgspec.ValidationError:
        return _read_leniently(payload)


def _read_leniently(payload: bytes) -> EventBatch:
    """Event by event, what is not known left out."""
    try:
        batch = _RAW.decode(payload)
    except msgspec.MsgspecError as error:
        raise MalformedMessageError(f"no batch of events: {error}") from error
    events: list[Event] = []
    positional, unknown = False, 0
    for raw in batch.events:
        try:
            named: dict[str, msgspec.Raw] | None = _FIELDS.decode(raw)
        except msgspec.ValidationError:
            named = None
        except msgspec.MsgspecError as error:
            raise MalformedMessageError(f"no event: {error}") from error
        try:
            kind, given = _kind_and_fields(named, raw)
            known = _KNOWN.get(kind)
            if known is None:
                unknown += 1
                continue
            events.append((_LENIENT_ARRAY if named is None else _LENIENT_MAP).decode(raw))
        except msgspec.MsgspecError as error:
            raise MalformedMessageError(f"no event: {error}") from error
        if named is None:
            positional = True
            unknown += max(given - len(known), 0)
        else:
            unknown += len(named.keys() - known) - 1
    return EventBatch(batch.ts, events, batch.data_parallel_rank, positional, unknown)


def _kind_and_fields(named: dict[str, msgspec.Raw] | None, raw: msgspec.Raw) -> tuple[str, int]:
    """An event's type, and how many fields it has beside that."""
    if named is not None:
        kind = named.get("type")
        if kind is None:
            raise MalformedMessageError("an event has no type")
        return _STRING.decode(kind), len(named) - 1
    values = _VALUES.decode(raw)
    if not values:
        raise MalformedMessageError("an event has no type")
    return _STRING.decode(values[0]), len(values) - 1


_TYPES = (BlockStored, BlockRemoved, AllBlocksCleared)
_KNOWN = {kind.__name__: frozenset(kind.__struct_fields__) for kind in _TYPES}


def _union(**config: Any) -> Any:
    """The three events, written in one way."""
    return Union[  # noqa: UP007
        tuple(
            msgspec.defstruct(kind.__name__, [], bases=(kind,), tag=kind.__name__, gc=False, **config)
            for kind in _TYPES
        )
    ]


def _batch_of(event: Any) -> msgspec.msgpack.Decoder[Any]:
    fields: list[Any] = [("ts", float), ("events", list[event]), ("data_parallel_rank", int | None, None)]
    return msgspec.msgpack.Decoder(msgspec.defstruct("Batch", fields, array_like=True, gc=False))


# What holds nothing new is read at once; what does is read again, event by event, and the new things are counted.
_MAPS = _batch_of(_union(forbid_unknown_fields=True))
_ARRAYS = _batch_of(_union(forbid_unknown_fields=True, array_like=True))
_RAW = _batch_of(msgspec.Raw)
_LENIENT_MAP: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_union())
_LENIENT_ARRAY: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_union(array_like=True))
_FIELDS = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_VALUES = msgspec.msgpack.Decoder(list[msgspec.Raw])
_STRING = msgspec.msgpack.Decoder(str)
