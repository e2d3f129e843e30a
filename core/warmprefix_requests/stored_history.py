"""The part of a conversation that a server keeps: what references in the next request may name. Pure: no I/O."""

from __future__ import annotations

import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import NamedTuple

from warmprefix_requests.prompts import HistoryCut, MadeCall, tool_events
from warmprefix_requests.transcript import shown_call

__all__ = [
    "MAX_REFERENCES",
    "MAX_TEXT_BYTES",
    "StoredCall",
    "StoredHistory",
    "StoredResult",
    "has_hidden_items",
    "text_key",
]

_VERSION = 1
_MAX_EVENTS = 512
"""Calls and results of one history; the bound of its size, with that of a call's text."""
_KEPT_EVENTS = _MAX_EVENTS * 7 // 8
"""Events that are kept when there are too many, so that few requests have to choose."""
MAX_REFERENCES = 64
MAX_TEXT_BYTES = 256 << 10
"""UTF-8 bytes of a text that references in a server's history may stand for: it is kept as long as they are."""
_MAX_ID_CHARACTERS = 64
_MAX_DECODED_BYTES = 1 << 20
_FILTER_BYTES = 1 << 12
_FILTER_HASHES = 3


class StoredCall(NamedTuple):
    """A tool call that the server keeps."""

    id: str
    shown: str
    """The call as references show it."""
    place: int
    """Position among all calls of the history, from 1 on."""


class StoredResult(NamedTuple):
    """A tool's result that the server keeps."""

    id: str
    key: str | None
    """Stands for the text; None if no reference may name it."""


@dataclass(frozen=True, slots=True)
class StoredHistory:
    """What a server's history holds up to and including one response. Without arguments, a history that begins.

    `rewrite` takes it as the part of the prompt in front of a body, and returns it with this body's part; `with_output`
    adds the answer. Digests stand for texts. The newest 512 calls and results can be named. Of older ones, a filter
    keeps how they were shown, so that no reference can mean two of them; some calls that were never made pass it too,
    and are not named either.
    """

    calls: int = 0
    """Number of calls so far."""
    events: tuple[StoredCall | StoredResult, ...] = ()
    """Calls and results that can be named, oldest first: of calls that are shown in one way all or none, but for
    calls that wait for their result."""
    forgotten: bytes = b""
    """A Bloom filter of how the other calls are shown; empty without any."""
    references: Mapping[str, str] = field(default_factory=dict)
    """The references in the history, and the key of the text that each stands for."""

    def can_name(self, shown: str) -> bool:
        """Return False for calls that look like one that was forgotten."""
        forgotten = self.forgotten
        return not forgotten or not all(forgotten[at // 8] >> at % 8 & 1 for at in _filter_places(shown))

    def extended(
        self, events: Iterable[MadeCall | StoredResult | HistoryCut], references: Mapping[str, str] | None = None
    ) -> StoredHistory | None:
        """Return the history with more calls and results, and with all its references. O(events).

        Returns:
            None if it is not what the server has, as a result's call is missing or two calls have one id, and with too
            many references.
        """
        calls, forgotten, held = self.calls, self.forgotten, list(self.events)
        ids = {kept.id for kept in held}
        for event in events:
            if isinstance(event, HistoryCut):
                held, forgotten = _without(held, forgotten, None)
                ids = {kept.id for kept in held}
            elif isinstance(event, StoredResult):
                if event.id not in ids:
                    return None
                held.append(event)
            else:
                if event.id is None or event.id in ids or len(event.id) > _MAX_ID_CHARACTERS:
                    return None
                calls += 1
                ids.add(event.id)
                held.append(StoredCall(event.id, shown_call(event.name, event.arguments), calls))
        if len(held) > _MAX_EVENTS:
            held, forgotten = _without(held, forgotten, _oldest(held))
            if len(held) > _MAX_EVENTS:
                return None
        known = self.references if references is None else references
        return StoredHistory(calls, tuple(held), forgotten, known) if len(known) <= MAX_REFERENCES else None

    def with_output(self, output: object) -> StoredHistory | None:
        """Return the history with the items of a response's output; None if they are not understood."""
        if not isinstance(output, list) or has_hidden_items(output):
            return None
        events = tool_events("responses", {"input": output}, 0, None)
        return self.extended([event for event in events if isinstance(event, MadeCall | HistoryCut)])

    def unnamed(self) -> StoredHistory:
        """Return the history without what references may name: the server may have dropped it, or not."""
        held, forgotten = _without(self.events, self.forgotten, None)
        return StoredHistory(self.calls, tuple(held), forgotten, self.references)

    def encode(self) -> bytes:
        """Return the history as bytes, some kilobytes at most."""
        events = [event if isinstance(event, StoredCall) else event[:2] for event in self.events]
        parts = [_VERSION, self.calls, events, self.forgotten.hex(), self.references]
        return zlib.compress(json.dumps(parts, separators=(",", ":")).encode())

    @classmethod
    def decode(cls, content: bytes) -> StoredHistory:
        """Return the history of these bytes.

        Raises:
            ValueError: They are damaged, or of another version.
        """
        try:
            unpacking = zlib.decompressobj()
            text = unpacking.decompress(content, _MAX_DECODED_BYTES)
            version, calls, events, forgotten, references = json.loads(text)
            if (
                version != _VERSION
                or not unpacking.eof
                or not isinstance(calls, int)
                or not isinstance(references, dict)
            ):
                raise ValueError(version)
            read = [StoredCall(*event) if len(event) == 3 else StoredResult(*event) for event in events]
            if len(forgotten) not in (0, 2 * _FILTER_BYTES):
                raise ValueError("filter")
            return cls(calls, tuple(read), bytes.fromhex(forgotten), references)
        except (ValueError, TypeError, zlib.error, RecursionError) as error:
            raise ValueError("a stored history is damaged, or of another version") from error


def text_key(text: str) -> str:
    """Return the key that stands for a result's text."""
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def has_hidden_items(items: object) -> bool:
    """Return True if a list of items names items that the server has stored, which may be calls."""
    return isinstance(items, list | tuple) and any(
        isinstance(item, Mapping)
        and (item.get("type") == "item_reference" or (item.get("type") is None and "role" not in item))
        for item in items
    )


def _filter_places(shown: str) -> list[int]:
    digest = blake2b(shown.encode("utf-8", "surrogatepass"), digest_size=2 * _FILTER_HASHES).digest()
    return [int.from_bytes(digest[at : at + 2], "big") % (8 * _FILTER_BYTES) for at in range(0, len(digest), 2)]


def _oldest(events: Iterable[StoredCall | StoredResult]) -> Collection[str]:
    """Return the calls to forget, as they are shown: a call made all the time, then the oldest."""
    shown_of: dict[str, str] = {}
    sizes: dict[str, int] = {}
    for event in events:
        if isinstance(event, StoredCall):
            shown_of[event.id] = event.shown
            sizes[event.shown] = sizes.pop(event.shown, 0) + 1  # the latest call of each kind stands last
        else:
            sizes[shown_of[event.id]] += 1
    left, gone = sum(sizes.values()), set[str]()
    for shown in sorted(sizes, key=lambda shown: sizes[shown] <= _MAX_EVENTS // 2):
        if left <= _KEPT_EVENTS:
            break
        gone.add(shown)
        left -= sizes[shown]
    return gone


def _without(
    events: Iterable[StoredCall | StoredResult], forgotten: bytes, gone: Collection[str] | None
) -> tuple[list[StoredCall | StoredResult], bytes]:
    """Return the events without calls that are shown in these ways, and the filter with them; None stands for all.

    Calls that wait for their result stay, because it will come.
    """
    events = list(events)
    answered = {event.id for event in events if isinstance(event, StoredResult)}
    dropped = set[str]()
    bits = bytearray(forgotten or bytes(_FILTER_BYTES))
    for event in events:
        if isinstance(event, StoredCall) and (gone is None or event.shown in gone):
            for at in _filter_places(event.shown):
                bits[at // 8] |= 1 << at % 8
            if event.id in answered:
                dropped.add(event.id)
    return [event for event in events if event.id not in dropped], bytes(bits) if any(bits) else b""
