"""The same text in another Unicode form."""

from __future__ import annotations

import unicodedata

from warmprefix_tools.doctor.checks.base import TextCheck

__all__ = ["CHECK", "plain_characters"]

_PLAIN = {
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f\ufe0e\ufe0f"), None),
    **dict.fromkeys(map(ord, "\u2018\u2019\u201a\u2032\u02bc"), "'"),
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\u2033\u00ab\u00bb"), '"'),
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u202f\u2007\u2009\u3000"), " "),
    ord("\u2026"): "...",
}


def plain_characters(segment: str) -> str:
    r"""The segment in NFC, with plain quotes, dashes and blanks, and nothing invisible.

    >>> plain_characters("\u201cCafe\u0301\u201d\u200b \u2013 100\u00a0%") == '"Caf\u00e9" - 100 %'
    True
    """
    return segment if segment.isascii() else unicodedata.normalize("NFC", segment.translate(_PLAIN))


CHECK = TextCheck(
    "unicode",
    "The same text comes with other Unicode characters",
    "Normalise once, where text comes in: unicodedata.normalize('NFC', text), one kind of quotes and dashes, no"
    " zero-width characters.",
    plain_characters,
    "everywhere",
)
