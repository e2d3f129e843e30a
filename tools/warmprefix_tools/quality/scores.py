"""Scores of an answer. Pure."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple

__all__ = ["AnswerScores", "Measure", "normalized", "score"]

Measure = Literal["f1", "exact", "contains"]
"""The scores that arms are compared by."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION = set(string.punctuation)
_REFUSAL = re.compile(
    r"\b(unanswerable|not (mentioned|given|stated|provided|specified)|no answer|cannot (be )?(answer|determine)"
    r"|does not (contain|mention|provide|specify)|i do(n't| not) have)",
    re.IGNORECASE,
)


class AnswerScores(NamedTuple):
    """How well an answer fits the expected ones, each from 0 to 1; the best of all expected ones counts."""

    exact: float
    f1: float
    contains: float
    refused: float
    """1 if the answer is that the context holds no answer."""


def normalized(text: str) -> str:
    """Return a text as SQuAD's evaluation compares it (Rajpurkar et al., EMNLP 2016).

    Lower case, without punctuation, articles and repeated white space. Chinese and Japanese characters become words of
    their own, because no white space separates them.

    >>> normalized("The  Mariana Trench!"), normalized("马里亚纳")
    ('mariana trench', '马 里 亚 纳')
    """
    lower = unicodedata.normalize("NFKC", text).lower()
    kept = "".join([char for char in lower if char not in _PUNCTUATION and unicodedata.category(char) != "Po"])
    spaced = "".join([f" {char} " if _is_ideograph(char) else char for char in kept])
    return " ".join(_ARTICLES.sub(" ", spaced).split())


def _is_ideograph(char: str) -> bool:
    return "\u3040" <= char <= "\u30ff" or "\u3400" <= char <= "\u9fff"


def score(answer: str, expected: Sequence[str]) -> AnswerScores:
    """Return the scores of an answer; without an expected one, only a refusal is right. O(characters * expected)."""
    refused = float(bool(_REFUSAL.search(answer)) or not answer.strip())
    if not expected:
        return AnswerScores(refused, refused, refused, refused)
    given = normalized(answer)
    wanted = [normalized(each) for each in expected]
    return AnswerScores(
        max([float(given == each) for each in wanted]),
        max([_f1(given.split(), each.split()) for each in wanted]),
        max([float(bool(each) and f" {each} " in f" {given} ") for each in wanted]),
        refused,
    )


def _f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    shared = (Counter(given) & Counter(wanted)).total()
    if not given or not wanted or not shared:
        return float(list(given) == list(wanted))
    return 2 * shared / (len(given) + len(wanted))
