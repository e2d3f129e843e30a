"""New texts in the bytes of a JSON body. Pure: no I/O."""

from __future__ import annotations

import json
from typing import Any

from warmprefix_requests.repeats import Rewritten

__all__ = ["distinct", "refuse_constant", "spliced", "survives"]

_MAX_SEARCHES = 64
"""Times that a body is read in search of its texts. More are needed only where some are escaped and others not."""


def spliced(content: bytes, rewritten: Rewritten) -> bytes | None:
    """Return a JSON text with new texts in place of old ones; None if it cannot be written with the same meaning.

    The client's own bytes stay wherever the body does. O(bytes).
    """
    edited = _edited(content, rewritten)
    if edited is not None and json.loads(edited) == rewritten.body:
        return edited
    # A text stands elsewhere too, or is escaped in another way.
    return json.dumps(rewritten.body, separators=(",", ":")).encode() if survives(content) else None


def _edited(content: bytes, rewritten: Rewritten) -> bytes | None:
    """Return the client's own bytes with the new texts; None if an old one was not found."""
    pieces: list[bytes | memoryview] = []
    whole = memoryview(content)
    done = searched = 0
    most = _MAX_SEARCHES * len(content)
    is_ascii = content.isascii()
    for result in rewritten.repeated:
        found = _find(content, result.text, searched, is_ascii=is_ascii)
        if found is None:
            return None
        start, end, bytes_read = found
        most -= bytes_read
        if most < 0:
            return None
        searched = end
        if result.reference is not None:
            pieces += (whole[done:start], json.dumps(result.reference).encode())
            done = searched
    return b"".join([*pieces, whole[done:]])


def _find(content: bytes, text: str, begin: int, *, is_ascii: bool) -> tuple[int, int, int] | None:
    """Return where a JSON text has this string as a value, from `begin` on, and how many bytes were read for that."""
    bytes_read = 0
    for escapes in (True,) if is_ascii or text.isascii() else (False, True):
        try:
            written = json.dumps(text, ensure_ascii=escapes).encode()
        except UnicodeEncodeError:  # a lone surrogate
            continue
        at = content.find(written, begin)
        while at >= 0 and content[at - 1 : at] == b"\\":  # an escaped quote opens no string
            at = content.find(written, at + 1)
        end = at + len(written)
        bytes_read += (end if at >= 0 else len(content)) - begin
        if at >= 0:
            return at, end, bytes_read
    return None


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
