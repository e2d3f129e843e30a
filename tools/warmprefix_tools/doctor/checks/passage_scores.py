"""Scores, ranks and times of retrieval in the text of passages."""

from __future__ import annotations

import re

from warmprefix_tools.doctor.checks.base import TextCheck
from warmprefix_tools.doctor.checks.timestamp import mask_times

__all__ = ["CHECK", "mask_scores"]

_SCORE = re.compile(
    r"""(?ix)\b(?:(?:relevance|similarity|confidence|match|rerank(?:er|ing)?|cosine|vector|bm25|search|retrieval)
    [ _-]?)*
    (?:score|relevance|relevancy|similarity|distance|confidence|rank|weight|cosine|bm25)
    (["']?\s*(?:[:=]|is|of)\s*["']?|\s+(?=\d*\.\d|\d+\s*%))[-+]?\d+(?:\.\d+)?(?:e-?\d+)?(?:\s?%|\s?/\s?\d+)?"""
)
_WORDS = ("score", "relevan", "similarity", "distance", "confidence", "rank", "weight", "cosine", "bm25")
_NUMBER = re.compile(r"[:= ([|+-]\.?\d")
_BARE = re.compile(r"(?<=[(\[|])\s*(?:~|≈)?(?:[01]?\.\d{2,}|\d{1,3}(?:\.\d+)?\s?%)\s*(?=[)\]|])")
_AGO = re.compile(
    r"(?i)\b(?:\d+|an?|one) (?:second|minute|hour|day|week|month|year)s? ago\b|\byesterday\b|\bjust now\b"
)


def mask_scores(segment: str) -> str:
    """The segment with placeholders for scores, ranks, dates and ages.

    >>> mask_scores("[Doc_7] (score: 0.8312, retrieved 2 hours ago) Tides rise.")
    '[Doc_7] (<score>, retrieved <time>) Tides rise.'
    """
    if "ago" in segment or "day" in segment or "now" in segment:
        segment = _AGO.sub("<time>", segment)
    return mask_times(_mask_numbers(segment))


def _mask_numbers(segment: str) -> str:
    if not _NUMBER.search(segment):
        return segment
    folded = segment.lower()
    if any(word in folded for word in _WORDS):
        segment = _SCORE.sub("<score>", segment)
    return _BARE.sub("<score>", segment)


CHECK = TextCheck(
    "passage-scores",
    "Scores, ranks or dates of retrieval stand in the text of passages",
    "Leave them out of the passage: the order says what the score says. If the model must know, put them behind the"
    " context, with the question.",
    mask_scores,
    "inside",
    elsewhere=_mask_numbers,  # not every passage stands in what is recognised as a list
)
