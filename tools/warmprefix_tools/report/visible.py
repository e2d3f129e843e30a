"""Control characters in text from outside, replaced by visible signs."""

from __future__ import annotations

__all__ = ["visible"]

_BIDI = (0x061C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_CODED = (*range(0x80, 0xA0), *_BIDI, 0x2028, 0x2029, 0xFEFF, *range(0xFFF9, 0xFFFC), *range(0xD800, 0xE000))
_LAST_TWO = (plane + code for plane in range(0, 0x110000, 0x10000) for code in (0xFFFE, 0xFFFF))
# Code points in quotes that every font has: many fonts lack the pictures of control characters.
_VISIBLE = {code: f"\u2039U+{code:04X}\u203a" for code in (*range(0x20), 0x7F, *_CODED, *_LAST_TWO)}


def visible(text: str) -> str:
    r"""Return the text with a visible sign for each control character.

    Control characters are those that control a terminal, a parser or the direction of reading.

    >>> visible("cpu\x00 \u202egnp.exe")
    'cpu‹U+0000› ‹U+202E›gnp.exe'
    """
    return text.translate(_VISIBLE)
