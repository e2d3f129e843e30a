"""Visible signs for invisible characters in text from outside."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator

__all__ = ["code_points", "signs", "visible"]

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CODED = (*range(0x80, 0xA0), *_BIDI, 0x2028, 0x2029, 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xD800, 0xE000))
_LAST_TWO = (plane + code for plane in range(0, 0x110000, 0x10000) for code in (0xFFFE, 0xFFFF))
# Code points in quotes that every font has: many fonts lack the pictures of control characters.
_VISIBLE = {code: f"\u2039U+{code:04X}\u203a" for code in (*range(0x20), 0x7F, *_CODED, *_LAST_TWO)}

_MOST_CODES = 12
_SIGNS = {"\n": "\u21b5", "\t": "\u2192", " ": "\u00b7", "": "\u2205"}
_UNSEEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")


def visible(text: str) -> str:
    r"""Return the text with a visible sign for each control character.

    Control characters are those that control a terminal, a parser or the direction of reading.

    >>> visible("cpu\x00 \u202egnp.exe")
    'cpu‹U+0000› ‹U+202E›gnp.exe'
    """
    return text.translate(_VISIBLE)


def signs(text: str, *, marked: bool = False) -> Iterator[tuple[str, bool]]:
    r"""Yield the pieces of a text, each with True if it is a sign.

    A newline is a sign too; the page breaks the line after it. Spaces between words stay spaces. Only a `marked` part
    that is blank shows its spaces, or that it is empty.

    >>> list(signs("a\tb")), list(signs("", marked=True))
    ([('a', False), ('→', True), ('b', False)], [('∅', True)])
    """
    if marked and not text.strip(" "):
        yield from ((_SIGNS[space], True) for space in (text or [""]))
        return
    plain = ""
    for letter in text:
        sign = _sign(letter)
        if sign is None:
            plain += letter
            continue
        if plain:
            yield plain, False
        yield sign, True
        plain = ""
    if plain:
        yield plain, False


def code_points(part: str) -> str:
    """Return the code points of a short part that is not ASCII; "" for others.

    >>> code_points("é"), code_points("e")
    ('U+00E9', '')
    """
    if part.isascii() or len(part) > _MOST_CODES:
        return ""
    return " ".join(f"U+{ord(letter):04X}" for letter in part)


def _sign(letter: str) -> str | None:
    """Return the sign for an invisible character; None for any other, and for a space."""
    if letter in ("\n", "\t"):
        return _SIGNS[letter]
    if letter != " " and (unicodedata.category(letter) in _UNSEEN or _is_variation_selector(letter)):
        return f"\u2039U+{ord(letter):04X}\u203a"
    return None


def _is_variation_selector(letter: str) -> bool:
    return "\ufe00" <= letter <= "\ufe0f" or "\U000e0100" <= letter <= "\U000e01ef"
