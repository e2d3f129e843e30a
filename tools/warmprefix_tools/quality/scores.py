"""Scores of an answer. Pure."""

from __future__ import annotations

import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import NamedTuple

from warmprefix.errors import WarmprefixError

__all__ = [
    "JUDGE",
    "MEASURES",
    "AnswerScores",
    "ScoreError",
    "Scorer",
    "citations",
    "normalized",
    "score",
    "scorer_named",
]

Scorer = Callable[[str, Sequence[str]], float]
"""Returns the score, from 0 to 1, of an answer, given the expected ones."""

JUDGE = "judge"
"""The measure whose scores a model has given; see `judging.py`."""

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_LABEL = re.compile(r"\s*\[(ctx-[0-9a-f]{6})\]")
_PUNCTUATION = set(string.punctuation)
_REFUSAL = re.compile(
    r"\b(unanswerable|not (mentioned|given|stated|provided|specified)|no answer|cannot (be )?(answer|determine)"
    r"|does not (contain|mention|provide|specify)|i do(n't| not) have)",
    re.IGNORECASE,
)


class ScoreError(WarmprefixError, ValueError):
    """A measure is unknown, or its function returned something else than a score."""


class AnswerScores(NamedTuple):
    """How well an answer fits the expected ones, from 0 to 1; the best of all expected ones counts."""

    contains: float
    """1 if an expected answer stands in it, in whatever sentence."""
    span: float
    """Token F1 of the part of the answer that fits best."""
    f1: float
    exact: float
    refused: float
    """1 if the answer is that the context holds no answer."""
    words: float
    """Number of words, after normalisation."""


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
    # "A" may be the answer to a question with choices
    return " ".join(_ARTICLES.sub(" ", spaced).split() or spaced.split())


def _is_ideograph(char: str) -> bool:
    return "\u3040" <= char <= "\u30ff" or "\u3400" <= char <= "\u9fff"


def score(answer: str, expected: Sequence[str]) -> AnswerScores:
    """Return the scores of an answer; without an expected one, only a refusal is right. O(characters * expected)."""
    refused = float(bool(_REFUSAL.search(answer)) or not answer.strip())
    given = normalized(_LABEL.sub("", answer))
    words = given.split()
    if not expected:
        return AnswerScores(refused, refused, refused, refused, refused, len(words))
    wanted = [normalized(each) for each in expected]
    return AnswerScores(
        max([float(bool(each) and f" {each} " in f" {given} ") for each in wanted]),
        max([_span(words, each.split()) for each in wanted]),
        max([_f1(words, each.split()) for each in wanted]),
        max([float(given == each) for each in wanted]),
        refused,
        len(words),
    )


def _f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    shared = (Counter(given) & Counter(wanted)).total()
    if not given or not wanted or not shared:
        return float(list(given) == list(wanted))
    return 2 * shared / (len(given) + len(wanted))


def _span(given: Sequence[str], wanted: Sequence[str]) -> float:
    """Return the highest F1 of a run of words. O(words * squared wanted words)."""
    best, counts = _f1(given, wanted), Counter(wanted)
    for start, first in enumerate(given):
        if first in counts:
            left, shared = counts.copy(), 0
            for length, word in enumerate(given[start:], 1):
                if 2 * len(wanted) <= best * (length + len(wanted)):
                    break  # no run of this length or longer can be better
                if left[word] > 0:
                    left[word] -= 1
                    shared += 1
                best = max(best, 2 * shared / (length + len(wanted)))
    return best


MEASURES = {
    "contains": "answers that contain an expected one",
    "span": "token F1 of the best part",
    "f1": "token F1",
    "exact": "exact match",
}
"""What each measure is, by its field in `AnswerScores`; the first one decides."""


def scorer_named(measure: str) -> Scorer:
    """Return the function of a measure: one of ours, or that of `module:function`.

    Raises:
        ScoreError: There is no such measure. The returned function raises it for a result that is no score.
    """
    if measure in MEASURES:
        return lambda answer, expected: float(getattr(score(answer, expected), measure))
    module, colon, name = measure.partition(":")
    if not colon:
        raise ScoreError(f"measure must be {', '.join([*MEASURES, JUDGE])} or module:function, got {measure!r}")
    try:
        function: Scorer = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ScoreError(f"the measure {measure!r} can't be imported: {error}") from error

    def checked(answer: str, expected: Sequence[str]) -> float:
        found = function(answer, expected)
        if isinstance(found, bool | int | float) and 0 <= found <= 1:
            return float(found)
        raise ScoreError(f"{measure} must return a number from 0 to 1, got {found!r}")

    return checked


def citations(answer: str) -> set[str]:
    """Return the labels of passages that an answer names.

    >>> citations("In 1912 [ctx-0123ab].")
    {'ctx-0123ab'}
    """
    return set(_LABEL.findall(answer))
