"""JSON bodies that begin with bytes that were read before: only what follows is read. Pure: no I/O."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from warmprefix_requests.prompts import Path, items_name
from warmprefix_requests.splicing import changed_places, distinct, nested, refuse_constant, skipped, written

__all__ = ["NOTHING", "Beginning", "ReadBody", "lengthened", "read_body", "separators"]

_BYTES_PER_SEPARATOR = 128
"""Memory of a value of a message, or of a list around it, without its text. An object takes it twice."""
_MOST_PIECES, _BYTES_PER_PIECE = 64, 64

_value_at = json.JSONDecoder().raw_decode
_strict_value_at = json.JSONDecoder(object_pairs_hook=distinct, parse_constant=refuse_constant).raw_decode


class Beginning(NamedTuple):
    """The beginning of a body up to the end of a message. Immutable; values are shared with the bodies that have it."""

    pieces: tuple[bytes, ...]
    """Its bytes, in pieces: a copy of all of them for each request would take most of the time."""
    length: int
    """Number of its bytes."""
    fields: tuple[tuple[str, Any], ...]
    """The fields in front of the messages."""
    items: tuple[Any, ...]
    """The messages."""
    separators: int
    """What `separators` returns for the content."""
    size: int
    """Bytes in memory, as an upper bound."""

    def begins(self, content: bytes) -> bool:
        """Return True if a body begins with it. O(bytes)."""
        at = 0
        for piece in self.pieces:
            if not content.startswith(piece, at):
                return False
            at += len(piece)
        return True


NOTHING = Beginning((), 0, (), (), 0, 0)
"""The beginning of a body that begins like no other."""


class ReadBody(NamedTuple):
    """A JSON object with messages, and where they stand."""

    body: dict[str, Any]
    name: str
    """Field of the messages."""
    fields: tuple[tuple[str, Any], ...]
    """The fields in front of it."""
    known: Beginning
    """The part that was read before."""
    text: str
    """The part that was read now."""
    places: list[tuple[int, int]]
    """Begin and end of each message in it."""

    @property
    def new(self) -> dict[str, Any]:
        """The body without the messages that were read before."""
        return {**self.body, self.name: self.body[self.name][len(self.known.items) :]}

    def beginning(self, items: int) -> Beginning:
        """Return the beginning with this many messages, of which some are not known. O(bytes)."""
        text = self.text[: self._end(items)]
        content = text.encode()
        known = self.known
        return Beginning(
            lengthened(known.pieces, content),
            known.length + len(content),
            self.fields,
            (*known.items, *self.body[self.name][len(known.items) : items]),
            known.separators + (new := separators(content)),
            known.size
            + _BYTES_PER_PIECE
            + len(content)
            + sys.getsizeof(text)
            + (new + content.count(b"{")) * _BYTES_PER_SEPARATOR,
        )

    def spliced(self, texts: Mapping[Path, str], items: int) -> tuple[bytes, bytes]:
        """Return what was read now with new texts in place of old ones: up to the end of this message, and the rest."""
        first, end = len(self.known.items), self._end(items)
        changes: Mapping[Any, Any] = nested(texts).get(self.name, {})  # type: ignore[assignment]
        places = [
            place
            for number, inner in changes.items()
            for place in changed_places(self.text, self.places[number - first][0], inner)
        ]
        front = [place for place in places if place[0] < end]
        return written(self.text, front, 0, end), written(self.text, places[len(front) :], end, len(self.text))

    def _end(self, items: int) -> int:
        new = items - len(self.known.items)
        return self.places[new - 1][1] if new else 0


def read_body(route: str, content: bytes, known: Beginning, *, strictly: bool) -> ReadBody | None:
    """Return a body that begins with `known`; None if it must be read in another way. O(bytes behind that).

    It is what `json.loads` returns for all of the content. `strictly`: a repeated key and a constant that JSON does not
    have are not read.
    """
    name = items_name(route)
    value_at = _strict_value_at if strictly else _value_at
    pairs, items, places = [*known.fields], [*known.items], list[tuple[int, int]]()
    try:
        text = content[known.length :].decode()
        at = 0
        if known.items:
            at = _read_items(text, at, value_at, items, places)
            pairs.append((name, items))
        elif text[at := skipped(text, 0)] == "{":
            at += 1
        else:
            return None
        while text[at := skipped(text, at)] != "}":
            if pairs:
                if text[at] != ",":
                    return None
                at = skipped(text, at + 1)
            key, at = value_at(text, at)
            if not isinstance(key, str) or text[at := skipped(text, at)] != ":":
                return None
            at = skipped(text, at + 1)
            if key == name and text[at] == "[":
                at = _read_items(text, at + 1, value_at, items, places)
                pairs.append((key, items))
            else:
                value, at = value_at(text, at)
                pairs.append((key, value))
        body = dict(pairs)
        if text[at + 1 :].strip(" \t\n\r") or len(body) < len(pairs) or body.get(name) is not items:
            return None
        if strictly and ("\\ud" in text or "\\uD" in text):
            json.dumps(body, ensure_ascii=False).encode()  # fails for one half of a surrogate pair
    except (ValueError, IndexError, RecursionError):
        return None
    return ReadBody(body, name, tuple(pairs[: list(body).index(name)]), known, text, places)


def _read_items(text: str, at: int, value_at: Any, items: list[Any], places: list[tuple[int, int]]) -> int:
    """Read the rest of a list; return its end."""
    while text[at := skipped(text, at)] != "]":
        if items:
            if text[at] != ",":
                raise ValueError(at)
            at = skipped(text, at + 1)
        item, end = value_at(text, at)
        items.append(item)
        places.append((at, end))
        at = end
    return at + 1


def lengthened(pieces: tuple[bytes, ...], new: bytes) -> tuple[bytes, ...]:
    """Return bytes in a bounded number of pieces with new ones behind them. Amortised O(new bytes + pieces)."""
    return (*pieces, new) if len(pieces) < _MOST_PIECES else (b"".join((*pieces, new)),)


def separators(content: bytes) -> int:
    """Return the number of lists, objects and commas in a JSON text, and in the texts of its strings."""
    return sum(map(content.count, (b",", b"[", b"{")))
