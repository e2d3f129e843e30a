"""Defects of wording: equal text that is written differently, and text that changes from request to request."""

from __future__ import annotations

import re
import unicodedata
from array import array
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress

from warmprefix_tools.doctor.lists import ItemList, without_number
from warmprefix_tools.doctor.request_log import Ids, LogMessage, Memo, PerSegment, SegmentPool

__all__ = ["TEXT_CHECKS", "TEXT_KINDS", "CheckedSegments", "Rewriter", "TextCheck"]


_INSIDE, _OUTSIDE, _HEADER = 1, 2, 4
_EVERYWHERE = _INSIDE | _OUTSIDE | _HEADER


@dataclass(frozen=True, slots=True)
class TextCheck:
    """A defect that is repaired segment by segment."""

    kind: str
    rewrite: Callable[[str], str]
    """Repairs a segment, and returns one without the defect as it is. Idempotent; never splits or joins segments."""
    parts: int
    """Where `rewrite` repairs: outside of lists, inside, in the first segments of items, or in several of these."""
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
_COMPACT_DAY = r"20\d{2}(?:0[1-9]|1[0-2])(?:0[1-9]|[12]\d|3[01])"
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
    | \d{{1,2}}h[0-5]\d
    | \d{{1,2}}/{_MONTH}/\d{{4}}(?::\d{{2}}:\d{{2}}:\d{{2}}{_ZONE})?
    | {_COMPACT_DAY}(?:[T_-]?[0-2]\d[0-5]\d(?:[0-5]\d)?(?:\.\d+|\d{{3}})?)?Z?
    | \d{{4}}-W\d{{2}}(?:-\d)?
    | datetime\.datetime\([\d, ]+(?:,\ tzinfo=[\w.]+)?\)
    | 1[5-9]\d{{8}}(?:\.\d+|\d{{3}}|\d{{6}}|\d{{9}})?(?!\d)
    )(?![\w-])
    | \d{{4}}\s?[\u5e74\ub144]\s?\d{{1,2}}\s?[\u6708\uc6d4]\s?\d{{1,2}}\s?[\u65e5\uc77c]
      (?:\s?\d{{1,2}}\s?[\u6642\u65f6\uc2dc])?(?:\s?\d{{1,2}}\s?[\u5206\ubd84])?""",
    re.VERBOSE,
)
_SEVERAL_TIMES = re.compile(r"<time>(?:[\s,]*(?:at|T|the|-)?[\s,]*<time>)+")


_SHORT_MONTH = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_TIME_HINT = re.compile(
    rf"\d(?:[:/.-]\d|\s?[AaPp][Mm]\b|\d{{7}}|h\d|-W\d|, \d|\s?[\u5e74\ub144]|\S{{0,3}}\s{_SHORT_MONTH})"
    rf"|day\b|{_SHORT_MONTH}[a-z.]*\s\d"
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
    | (?:0x)?(?=[0-9a-f]*[a-f])(?=[0-9a-f]*\d)[0-9a-f]{7,}
    | (?:0x)?(?=[0-9A-F]*[A-F])(?=[0-9A-F]*\d)[0-9A-F]{7,}
    | (?=[\w-]*\d)(?=[\w-]*[A-Za-z])(?=[\w-]*\d[\w-]*\d|(?=[\w-]*[a-z])[\w-]*[A-Z])
      [A-Za-z0-9]+(?:[_-][A-Za-z0-9]+)*(?<=[\w-]{16})
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


_ATTRIBUTION = re.compile(r"(x-anthropic-billing-header:)[^\n]*")


def mask_attribution(segment: str) -> str:
    """Return the segment with a placeholder for the header that Claude Code writes into its system prompt.

    >>> mask_attribution("x-anthropic-billing-header: cc_version=2.1.197.709; cc_entrypoint=cli;")
    'x-anthropic-billing-header: <version>'
    """
    return _ATTRIBUTION.sub(r"\1 <version>", segment)


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
    TextCheck("unicode", plain_characters, _EVERYWHERE),
    TextCheck("whitespace", plain_space, _EVERYWHERE),
    TextCheck("position-number", without_number, _HEADER),
    # Not every passage stands in a list that is recognised, so scores count elsewhere too.
    TextCheck("passage-scores", mask_scores, _INSIDE, elsewhere=_mask_numbers),
    TextCheck("attribution-header", mask_attribution, _EVERYWHERE),
    TextCheck("timestamp", mask_times, _OUTSIDE),
    TextCheck("random-id", mask_ids, _EVERYWHERE),
)
"""In the order in which a text is repaired."""


TEXT_KINDS = frozenset(check.kind for check in TEXT_CHECKS)

_REWRITES = [check.rewrite for check in TEXT_CHECKS if check.rewrite is not mask_times]
"""Functions that change every segment with a defect: `mask_scores` masks times too."""

_SUSPECT = re.compile(r"[^ -/:-~]")


class CheckedSegments:
    """Results of the text checks for the segments of a pool. Each is computed once, wherever the segment stands."""

    def __init__(self, pool: SegmentPool) -> None:
        self.pool = pool
        self.defective = PerSegment(pool.texts, _is_defective)
        """Returns for each segment whether a check could change it."""
        self.results = Memo[Callable[[str], str], Memo[int, int]](
            lambda rewrite: Memo(lambda number: pool.intern(rewrite(pool.texts[number])))
        )
        """For each function, what it makes of a segment."""


class Rewriter:
    """Segments without their defects."""

    def __init__(self, checked: CheckedSegments, lists: Mapping[LogMessage, Sequence[ItemList]] | None = None) -> None:
        """Create a rewriter of all segments of a pool.

        Args:
            checked: The segments; the results are added.
            lists: The lists of each message. Without them, all segments count as standing inside and outside of lists.
        """
        self._checked = checked
        self._parts = bytearray() if lists is None else _parts_of(len(checked.pool), lists)
        self._default_parts = _OUTSIDE if lists is not None else _INSIDE | _OUTSIDE
        self._searched = 0
        self._defective: list[tuple[int, list[tuple[str, Memo[int, int]]]]] = []
        """Of the first `_searched` segments those with defects, each with the kinds and their repairs."""
        self._changed: defaultdict[frozenset[str], dict[int, int]] = defaultdict(dict)
        """For each set of defects, the segments that change without them."""
        self._done: Counter[frozenset[str]] = Counter()
        """For each set of defects, how many of the defective segments were rewritten."""

    def rewritten(self, ids: Ids, kinds: frozenset[str] = TEXT_KINDS) -> Ids:
        """Return the segments without these defects; the same array if there are none."""
        if len(ids) and max(ids) >= self._searched:
            self._search()
        changed = self._changed[kinds]
        for number, repairs in self._defective[self._done[kinds] :]:
            repaired = number
            for kind, results in repairs:
                if kind in kinds:
                    repaired = results[repaired]
            if repaired != number:
                changed[number] = repaired
        self._done[kinds] = len(self._defective)
        if changed.keys().isdisjoint(ids):
            return ids
        numbers = ids.tolist()
        return array("I", list(map(changed.get, numbers, numbers)))

    def _search(self) -> None:
        parts, results, defective = self._parts, self._checked.results, self._checked.defective()
        size = len(defective)
        found = list(compress(range(self._searched, size), defective[self._searched :]))
        plain = [results[plain_space][results[plain_characters][number]] for number in found]
        together: Counter[int] = Counter()
        for number, text in zip(found, plain, strict=True):  # all spellings of a text stand where any of them stands
            together[text] |= parts[number] if number < len(parts) else 0
            if text != number:  # odd white space may only look like a list
                together[text] |= _OUTSIDE
        for number, text in zip(found, plain, strict=True):
            everywhere = together[text] or self._default_parts
            if repairs := list(self._repairs(number, text, everywhere)):
                self._defective.append((number, repairs))
        self._searched = size

    def _repairs(self, number: int, plain: int, parts: int) -> Iterator[tuple[str, Memo[int, int]]]:
        """Yield the kinds that change a segment, in plain characters or without the defects repaired before."""
        repaired = number
        for check in TEXT_CHECKS:
            results = self._checked.results[check.rewrite if parts & check.parts else check.elsewhere]
            before, repaired = repaired, results[repaired]
            if repaired != before or results[plain] != plain:
                yield check.kind, results


def _parts_of(size: int, lists: Mapping[LogMessage, Sequence[ItemList]]) -> bytearray:
    """Return for each segment whether it stands in list items, opens one, or stands elsewhere."""
    parts = bytearray(size)
    for message, found in lists.items():
        ids = message.ids
        end = 0
        for each in found:
            for number in ids[end : each.start]:
                parts[number] |= _OUTSIDE
            for number in ids[each.start : each.end]:
                parts[number] |= _INSIDE
            for item in each.items:
                parts[ids[item.start]] |= _HEADER
            end = max(end, each.end)
        for number in ids[end:]:
            parts[number] |= _OUTSIDE
    return parts


def _is_defective(segment: str) -> bool:
    """Return whether a check changes a segment in any part."""
    return _is_suspect(segment) and any(rewrite(segment) != segment for rewrite in _REWRITES)


def _is_suspect(segment: str) -> bool:
    """Return whether a check could find anything in a segment; in most there is nothing."""
    return bool(segment) and (
        _SUSPECT.search(segment, segment[0] in " \n") is not None
        or "  " in segment
        or "day" in segment
        or "ago" in segment
        or "now" in segment
        or segment[-1] in " \n"
    )
