"""New values in the bytes of a JSON body. Pure: no I/O."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from warmprefix_requests.prompts import Path

__all__ = [
    "changed_places",
    "distinct",
    "nested",
    "refuse_constant",
    "skipped",
    "spliced",
    "survives",
    "written",
]

_value_at = json.JSONDecoder().raw_decode
_SPACE = re.compile(r"[ \t\n\r]*")

NewValue = str | list[Any]
_Changes = NewValue | dict[str | int, "_Changes"]
"""A new value, or the changes inside an object or a list."""


def spliced(content: bytes, texts: Mapping[Path, NewValue]) -> bytes:
    """Return a JSON text with new texts or lists on these paths. The client's own bytes stay everywhere else. O(bytes).

    Raises:
        LookupError: Nothing stands on a path.
        ValueError: This is no JSON in UTF-8.
    """
    text = content.decode()
    places = changed_places(text, skipped(text, 0), nested(texts))
    if len(places) < len(texts):
        raise LookupError("the JSON text has no value on a path")
    return written(text, places, 0, len(text))


_Place = tuple[int, int, NewValue]
"""Begin and end of a value, and what takes its place."""


def nested(texts: Mapping[Path, NewValue]) -> dict[str | int, _Changes]:
    """Return new texts as a tree of the steps of their paths."""
    changes: dict[str | int, Any] = {}
    for path, text in texts.items():
        inner = changes
        for step in path[:-1]:
            inner = inner.setdefault(step, {})
        inner[path[-1]] = text
    return changes


def changed_places(text: str, begin: int, changes: _Changes) -> list[_Place]:
    """Return the places of the changes to the JSON value that begins here, in their order."""
    places: list[_Place] = []
    _find(text, begin, changes, places)
    return sorted(places)


def written(text: str, places: list[_Place], begin: int, end: int) -> bytes:
    """Return a part of a text with the new texts in these places."""
    pieces: list[str] = []
    for start, behind, new in places:
        pieces += (text[begin:start], json.dumps(new))
        begin = behind
    return "".join([*pieces, text[begin:end]]).encode()


def _find(text: str, at: int, changes: _Changes | None, found: list[_Place]) -> int:
    """Add the places to change in the value that begins here; return its end."""
    if not isinstance(changes, dict) or text[at] not in "{[":
        end = _value_at(text, at)[1]
        if isinstance(changes, str | list):
            found.append((at, end, changes))
        return end
    is_object = text[at] == "{"
    places: dict[str | int, list[_Place]] = {}
    step: str | int = -1
    at = skipped(text, at + 1)
    while text[at] not in "}]":
        if is_object:
            step, at = _value_at(text, at)
            at = skipped(text, skipped(text, at) + 1)
        else:
            step += 1  # type: ignore[operator]
        inner = changes.get(step)
        if inner is None:
            at = _value_at(text, at)[1]
        else:
            places[step] = []  # of a repeated key, the last one counts
            at = _find(text, at, inner, places[step])
        at = skipped(text, at)
        if text[at] == ",":
            at = skipped(text, at + 1)
    for inside in places.values():
        found += inside
    return at + 1


def skipped(text: str, at: int) -> int:
    """Return the next place that is no white space."""
    return at if text[at] not in " \t\n\r" else _SPACE.match(text, at).end()  # type: ignore[union-attr]


def survives(content: bytes) -> bool:
    """Return True if a JSON text means the same after it was read and written again."""
    try:
        json.loads(
            content,
            object_pairs_hook=distinct,
            parse_constant=refuse_constant,
            parse_float=_exact_float,
            parse_int=_exact_int,
        )
    except ValueError:
        return False
    return True


def distinct(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of these pairs.

    Raises:
        ValueError: A key is repeated.
    """
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key is there twice")
    return found


def refuse_constant(name: str) -> None:
    """Refuse `NaN` and the infinities.

    Raises:
        ValueError: Always.
    """
    raise ValueError(name)


def _exact_float(text: str) -> float:
    number = float(text)
    if repr(number) != text:
        raise ValueError(text)
    return number


def _exact_int(text: str) -> int:
    number = int(text)
    if str(number) != text:
        raise ValueError(text)
    return number
