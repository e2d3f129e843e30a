"""Dates and times of day in front of what could be shared."""

from __future__ import annotations

import re

from warmprefix_tools.doctor.checks.base import TextCheck

__all__ = ["CHECK", "mask_times"]

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
_SEVERAL = re.compile(r"<time>(?:[\s,]*(?:at|T|the|-)?[\s,]*<time>)+")
_NAMED = "(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_HINT = re.compile(rf"\d[:/.-]\d|day\b|\d\s?[AaPp][Mm]\b|\d{{10}}|\d\S{{0,3}}\s{_NAMED}|{_NAMED}[a-z.]*\s\d")


def mask_times(segment: str) -> str:
    """The segment with one placeholder for each date, time of day, or both together.

    >>> mask_times("Now: Tuesday, March 4, 2025 at 10:32:07 UTC.")
    'Now: <time>.'
    """
    if not _HINT.search(segment):
        return segment
    return _SEVERAL.sub("<time>", _TIME.sub("<time>", segment))


CHECK = TextCheck(
    "timestamp",
    "A date or time stands in front of text that requests share",
    "Move it behind the context, into the last user message, or give it a coarser grain: a date instead of a second"
    " changes the prompt once a day.",
    mask_times,
    "outside",
)
