"""Places in two requests where a defect shows."""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix_tools.doctor.request_log import LogMessage
from warmprefix_tools.doctor.rewriting import TEXT_KINDS
from warmprefix_tools.doctor.segments import common_length
from warmprefix_tools.doctor.survey import LogSurvey

__all__ = ["Spot", "SpotPair", "items_spot", "word_spot"]


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a request: characters of a message's text, or a field."""

    message: int | None = None
    """Index into the prompt's messages, tools included."""
    offset: int = 0
    length: int = 0
    """Characters that matter."""
    path: str | None = None
    text: str = ""
    """Text to show of a field."""


SpotPair = tuple[Spot, Spot]
"""In the later request, and in the earlier."""


def items_spot(survey: LogSurvey, at: int, message: LogMessage, start: int, end: int) -> Spot:
    """Return the place of the segments `start` to `end` of a message, without white space around them."""
    before, text = survey.pool.text(message.ids[:start]), survey.pool.text(message.ids[start:end])
    return Spot(at, len(before) + len(text) - len(text.lstrip()), len(text.strip()))


def word_spot(survey: LogSurvey, kind: str, later: int, earlier: int) -> SpotPair | None:
    """Return the first segment that differs between two requests because of one defect of wording."""
    others = TEXT_KINDS - {kind}

    def segments(request: int) -> list[tuple[int, int, int, int, int]]:
        return [
            (plain, rough, segment, at, index)
            for at, message in enumerate(survey.log.requests[request].messages)
            for index, (plain, rough, segment) in enumerate(
                zip(survey.plain(message).ids, survey.rewriter.rewritten(message.ids, others), message.ids, strict=True)
            )
        ]

    old: dict[int, tuple[int, int, int, int]] = {}
    for plain, rough, segment, at, index in segments(earlier):
        old.setdefault(plain, (rough, segment, at, index))
    for plain, rough, segment, at, index in segments(later):
        match = old.get(plain)
        if match is not None and rough != match[0] and segment != match[1]:
            requests, texts = survey.log.requests, survey.pool.texts
            ids, old_ids = requests[later].messages[at].ids, requests[earlier].messages[match[2]].ids
            before, old_before = survey.pool.text(ids[:index]), survey.pool.text(old_ids[: match[3]])
            start, end, old_end = _differing(texts[segment], texts[match[1]])
            return (
                Spot(at, len(before) + start, end - start),
                Spot(match[2], len(old_before) + start, old_end - start),
            )
    return None


def _differing(text: str, other: str) -> tuple[int, int, int]:
    """Return where two texts begin to differ, and where each of them stops."""
    start = common_length(text, other)
    tail = common_length(text[start:][::-1], other[start:][::-1])
    return start, len(text) - tail, len(other) - tail
