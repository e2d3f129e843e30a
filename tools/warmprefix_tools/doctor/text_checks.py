"""Defects of wording: equal text that is written differently, and text that differs from request to request."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from warmprefix_tools.doctor.lists import without_number

__all__ = ["TEXT_CHECKS", "TextCheck", "mask_ids", "mask_scores", "mask_times", "plain_characters", "plain_space"]


@dataclass(frozen=True, slots=True)
class TextCheck:
    """A defect that is repaired segment by segment."""

    kind: str
    rewrite: Callable[[str], str]
    """Repairs a segment, and returns one without the defect as it is. Idempotent; never splits or joins segments."""
    part: Literal["outside", "inside", "headers", "everywhere"]
    """Segments that `rewrite` repairs: outside of lists, inside, the first ones of list items, or all."""
    elsewhere: Callable[[str], str] = str
    """The same for all other segments."""


_PLAIN = {
    **dict.fromkeys(map(ord, "\u200b\u200c\u200d\u2060\ufeff\u00ad\u200e\u200f\ufe0e\ufe0f"), None),
    **dict.fromkeys(map(ord, "\u2018\u2019\u201a\u2032\u02bc"), "'"),
    **dict.fromkeys(map(ord, "\u201c\u201d\u201e\u2033\u00ab\u00bb"), '"'),
    **dict.fromkeys(map(ord, "\u2010\u2011\u2012\u2013\u2014\u2212"), "-"),
    **dict.fromkeys(map(ord, "\u00a0\u202f\u2007\u2009\u3000"), " "),
    ord("\u2026"): "...",
}


def plain_characters(segment: str) -> str:
    r"""Return the segment in NFC, with plain quotes, dashes and blanks, and nothing invisible.

    >>> plain_characters("\u201cCafe\u0301\u201d\u200b \u2013 100\u00a0%") == '"Caf\u00e9" - 100 %'
    True
    """
    return segment if segment.isascii() else unicodedata.normalize("NFC", segment.translate(_PLAIN))


_SPACE = re.compile(r"[ \t\r\n\f\v]+")
_ODD_SPACE = re.compile(r"[\t\r\f\v]|  |\n[ \n]|[ \n]\Z")


def plain_space(segment: str) -> str:
    r"""Return the segment with one blank or line feed for each run of white space, and none at its end.

    >>> plain_space("\r\n\n  Rules:\t none "), plain_space("\n\n")
    ('\n Rules: none', '')
    """
    return _SPACE.sub(_plain_run, segment).rstrip(" \n") if _ODD_SPACE.search(segment) else segment


def _plain_run(run: re.Match[str]) -> str:
    space = run[0]
    if "\n" not in space:
        return " "
    return "\n " if run.start() == 0 and space[-1] in " \t" else "\n"  # an indented first line stays indented


_MONTH = (
    r"(?:Jan(?:uary)?|Feb(?:ruary)?|Mar(?:ch)?|Apr(?:il)?|May|June?|July?|Aug(?:ust)?|Sept?(?:ember)?|Oct(?:ober)?"
    r"|Nov(?:ember)?|Dec(?:ember)?)"
)
_DAY = r"(?:Mon|Tues?|Wed(?:nes)?|Thu(?:rs)?|Fri|Sat(?:ur)?|Sun)(?:day)?"
_ZONE = r"(?:\s?(?:Z|UTC|GMT|CES?T|[ECMP][SD]T|[+-]\d{2}:?\d{2})\b)?"
_TIME = re.compile(
    rf"""(?<![\w.-])(?:
    \d{{4}}[-/.]\d{{2}}[-/.]\d{{2}}(?:[T\s_]\d{{2}}:?\d{{2}}(?::?\d{{2}}(?:[.,]\d+)?)?{_ZONE})?
    | \d{{1,2}}[/.]\d{{1,2}}[/.]\d{{2,4}}
    | {_DAY},?\s+\d{{1,2}}\.?(?:st|nd|rd|th)?\s+{_MONTH}\.?,?(?:\s+\d{{4}})?
    | (?:{_DAY},?\s+)?{_MONTH}\.?\s+\d{{1,2}}(?:st|nd|rd|th)?\b(?:,?\s+\d{{4}})?
    | \d{{1,2}}\.?(?:st|nd|rd|th)?\s+{_MONTH}\.?,?\s+\d{{4}}
    | {_DAY}(?=[\s,.;:!)]|\Z)
    | \d{{1,2}}:\d{{2}}(?::\d{{2}}(?:[.,]\d+)?)?(?:\s?[AaPp]\.?[Mm]\b\.?)?{_ZONE}
    | \d{{1,2}}\s?[AaPp][Mm]\b
    | 1[5-9]\d{{8}}(?:\.\d+|\d{{3}})?(?!\d)
    )(?![\w-])""",
    re.VERBOSE,
)
_SEVERAL_TIMES = re.compile(r"<time>(?:[\s,]*(?:at|T|the|-)?[\s,]*<time>)+")
_SHORT_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_TIME_HINT = re.compile(
    rf"\d[:/.-]\d|day\b|\d\s?[AaPp][Mm]\b|\d{{10}}|\d\S{{0,3}}\s{_SHORT_MONTH}|{_SHORT_MONTH}[a-z.]*\s\d"
)


def mask_times(segment: str) -> str:
    """Return the segment with one placeholder for each date, time of day, or both together.

    >>> mask_times("Now: Tuesday, March 4, 2025 at 10:32:07 UTC.")
    'Now: <time>.'
    """
    return _SEVERAL_TIMES.sub("<time>", _TIME.sub("<time>", segment)) if _TIME_HINT.search(segment) else segment


_ID = re.compile(
    r"""(?<![\w-])(?:
    [0-9a-fA-F]{8}-?(?:[0-9a-fA-F]{4}-?){3}[0-9a-fA-F]{12}
    | (?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{12,}
    | (?=[0-9A-F]*[A-F])(?=[0-9A-F]*\d)[0-9A-F]{12,}
    | (?=[A-Za-z0-9_-]*\d[A-Za-z0-9_-]*\d)(?=[A-Za-z0-9_-]*[A-Za-z])[A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*(?<=[\w-]{16})
    | (?i:req|request|sess|session|trace|span|run|call|chatcmpl|conv|conversation|thread|msg|job|task)
      [-_:\#](?=[A-Za-z-]*\d)[A-Za-z0-9-]{4,}
    | \d{6,}
    )(?![\w-])""",
    re.VERBOSE,
)
_ID_HINT = re.compile(r"\d[\w-]{4}|[\w-]{4}\d")


def mask_ids(segment: str) -> str:
    """Return the segment with a placeholder for each UUID or other random id.

    >>> mask_ids("Session 123e4567-e89b-12d3-a456-426614174000, request req-81f9c2.")
    'Session <id>, request <id>.'
    """
    return _ID.sub("<id>", segment) if _ID_HINT.search(segment) else segment


_SCORE = re.compile(
    r"""(?ix)\b(?:(?:relevance|similarity|confidence|match|rerank(?:er|ing)?|cosine|vector|bm25|search|retrieval)
    [ _-]?)*
    (?:score|relevance|relevancy|similarity|distance|confidence|rank|weight|cosine|bm25)
    (["']?\s*(?:[:=]|is|of)\s*["']?|\s+(?=\d*\.\d|\d+\s*%))[-+]?\d+(?:\.\d+)?(?:e-?\d+)?(?:\s?%|\s?/\s?\d+)?"""
)
_SCORE_WORDS = ("score", "relevan", "similarity", "distance", "confidence", "rank", "weight", "cosine", "bm25")
_SCORE_HINT = re.compile(r"[:= ([|+-]\.?\d")
_BARE_SCORE = re.compile(r"(?<=[(\[|])\s*(?:~|≈)?(?:[01]?\.\d{2,}|\d{1,3}(?:\.\d+)?\s?%)\s*(?=[)\]|])")
_AGO = re.compile(
    r"(?i)\b(?:\d+|an?|one) (?:second|minute|hour|day|week|month|year)s? ago\b|\byesterday\b|\bjust now\b"
)


def mask_scores(segment: str) -> str:
    """Return the segment with placeholders for scores, ranks, dates and ages.

    >>> mask_scores("[Doc_7] (score: 0.8312, retrieved 2 hours ago) Tides rise.")
    '[Doc_7] (<score>, retrieved <time>) Tides rise.'
    """
    if "ago" in segment or "day" in segment or "now" in segment:
        segment = _AGO.sub("<time>", segment)
    return mask_times(_mask_numbers(segment))


def _mask_numbers(segment: str) -> str:
    if not _SCORE_HINT.search(segment):
        return segment
    folded = segment.lower()
    if any(word in folded for word in _SCORE_WORDS):
        segment = _SCORE.sub("<score>", segment)
    return _BARE_SCORE.sub("<score>", segment)


TEXT_CHECKS = (
    TextCheck("unicode", plain_characters, "everywhere"),
    TextCheck("whitespace", plain_space, "everywhere"),
    TextCheck("position-number", without_number, "headers"),
    # Not every passage stands in a list that is recognised, so scores count elsewhere too.
    TextCheck("passage-scores", mask_scores, "inside", elsewhere=_mask_numbers),
    TextCheck("timestamp", mask_times, "outside"),
    TextCheck("random-id", mask_ids, "everywhere"),
)
"""In the order in which a text is repaired."""
