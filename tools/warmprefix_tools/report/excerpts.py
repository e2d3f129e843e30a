"""Excerpts of prompts, with what differs marked and what can't be seen made visible."""

from __future__ import annotations

import unicodedata

from warmprefix_tools.report.markup import Markup, element, join

__all__ = ["excerpt"]

_CODES_SHOWN = 12
_SIGNS = {"\n": "\u21b5", "\t": "\u2192", " ": "\u00b7", "": "\u2205"}
_UNSEEN = ("Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp", "Zs")


def excerpt(text: str, mark: tuple[int, int] | None) -> Markup:
    """The text as it was written, with the slice `mark` highlighted; an empty slice is a sign of its own.

    Where a short marked part holds more than ASCII, its code points stand below: letters can look alike.
    """
    if mark is None:
        return element("code", _spelled(text), class_="excerpt")
    start, end = mark
    part = text[start:end]
    shown = element("mark", _spelled(part) if part.strip(" ") else _blank(part))
    code = element("code", _spelled(text[:start]), shown, _spelled(text[end:]), class_="excerpt")
    if part.isascii() or len(part) > _CODES_SHOWN:
        return code
    points = " ".join(f"U+{ord(letter):04X}" for letter in part)
    return join(code, element("span", f"marked: {points}", class_="codes"))


def _blank(spaces: str) -> Markup:
    """Of nothing but spaces, or of nothing."""
    return join(*(_sign(_SIGNS[space]) for space in (spaces or [""])))


def _spelled(text: str) -> Markup:
    """With a sign for each character that can't be seen; lines stay lines, and spaces between words stay spaces."""
    return join(*map(_letter, text))


def _letter(letter: str) -> str:
    if letter == "\n":
        return join(_sign(_SIGNS[letter]), Markup("\n"))
    if letter == "\t":
        return _sign(_SIGNS[letter])
    if letter != " " and (unicodedata.category(letter) in _UNSEEN or _selects(letter)):
        return _sign(f"\u2039U+{ord(letter):04X}\u203a")
    return letter


def _selects(letter: str) -> bool:
    """Whether all it does is to select how the character before it is drawn."""
    return "\ufe00" <= letter <= "\ufe0f" or "\U000e0100" <= letter <= "\U000e01ef"


def _sign(sign: str) -> Markup:
    return element("span", sign, class_="sign")
