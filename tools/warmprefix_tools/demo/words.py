"""Text to the words that retrieval compares."""

from __future__ import annotations

import re

__all__ = ["content_words"]

_WORD = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])|\d+")
_STOP_WORDS = frozenset(
    re.findall(
        r"\w+",
        """
        a about an and any anything are as at be been before but by call can code could did do does else example find
        for found from good had has have here how i if in into is it its know like me mean meant module my need of off
        offer on or other otherwise out pass python rather same self should show so some somebody something standard
        start than that the their them then there these this those to too use used using usual want was way what when
        where which while will with work would write you your
        """,
    )
)


def content_words(text: str) -> list[str]:
    """Lower-case words, those within identifiers too, without stop words; a plural counts as its singular.

    >>> content_words("What does json.JSONEncoder.iterencode(o, _one_shot=False) do with Strings?")
    ['json', 'json', 'encoder', 'iterencode', 'o', 'one', 'shot', 'false', 'string']
    """
    words = [word.lower() for word in _WORD.findall(text)]
    return [_singular(word) for word in words if word not in _STOP_WORDS]


def _singular(word: str) -> str:
    return word[:-1] if len(word) > 3 and word.endswith("s") and not word.endswith("ss") else word
