"""Questions about a user's own documents, in the words of the documents, whatever their language."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from warmprefix_tools.demo.documents import Passage
from warmprefix_tools.demo.questions import USERS, QuestionWording, UserQuestion, Wordings, ask_about
from warmprefix_tools.retriever import content_words

__all__ = ["Subject", "ask_about_documents", "subjects"]

_LEAST_OF_A_TOPIC = 3
_MOST_PHRASES = 12
_MOST_WORDS = 10
_MOST_LETTERS = 60
_MOST_LETTERS_WITHOUT_SPACES = 24
_LEAST_LETTERS = 5
_LEAST_SHARE_OF_LETTERS = 0.85
_CLAUSE_ENDS = re.compile(
    r"""[.,:](?=\s|$)|[;!?()\[\]{}<>"“”„«»|*`#=~^\\…。，；：！？、（）【】《》「」『』।؟،؛—–]|\s-+\s|\n\s*\n"""
)


class Subject(NamedTuple):
    """A passage that questions are about, and its phrases."""

    passage: Passage
    phrases: tuple[str, ...]


def subjects(passages: Sequence[Passage]) -> list[Subject]:
    """Return the passages that contain a phrase; a table of numbers, for example, has none."""
    found = (Subject(passage, _phrases(passage.block.text)) for passage in passages)
    return [subject for subject in found if subject.phrases]


def ask_about_documents(
    about: Sequence[Subject], questions: int, seed: int, users: int = USERS
) -> tuple[UserQuestion, ...]:
    """Return this number of questions, as `ask_about` does; a topic is a document, or several short ones in a row.

    A question is a phrase of its passage. The query of a follow-up names the passage's title too.
    """
    return ask_about(
        _topics(about), Wordings(_first, _follow_up, lambda other, previous: _follow_up(other)), questions, seed, users
    )


def _first(subject: Subject) -> list[QuestionWording]:
    return [QuestionWording(f"{phrase}?", f"{phrase}?") for phrase in subject.phrases]


def _follow_up(subject: Subject) -> list[QuestionWording]:
    title = subject.passage.title
    return [QuestionWording(f"{phrase}?", f"{title}: {phrase}") for phrase in subject.phrases]


def _phrases(text: str) -> tuple[str, ...]:
    """Return the first clauses of a text that a retriever can look for, shortened.

    >>> _phrases("Refunds take five days; see https://a.example/x_1. 退款需要五个工作日，周末除外。")
    ('Refunds take five days', '退款需要五个工作日')
    """
    found: dict[str, None] = {}
    for clause in _CLAUSE_ENDS.split(text):
        phrase = _shortened(" ".join(clause.split()).strip(" .,:-"))
        if _is_plain(phrase) and len(set(content_words(phrase))) > 1:
            found[phrase] = None
    return tuple(found)[:_MOST_PHRASES]


def _shortened(clause: str) -> str:
    words = clause.split(" ")[:_MOST_WORDS]
    while len(words) > 1 and len(" ".join(words)) > _MOST_LETTERS:
        words.pop()
    return " ".join(words) if len(words) > 1 else words[0][:_MOST_LETTERS_WITHOUT_SPACES]


def _is_plain(phrase: str) -> bool:
    """Return True if a phrase is long enough and nearly all letters, their marks and spaces; no single English word."""
    if phrase.isascii() and " " not in phrase:
        return False
    letters = sum(unicodedata.category(letter)[0] in "LM" or letter == " " for letter in phrase)
    return len(phrase) >= _LEAST_LETTERS and letters >= _LEAST_SHARE_OF_LETTERS * len(phrase) and phrase.isprintable()


def _topics(about: Sequence[Subject]) -> list[list[Subject]]:
    topics: list[list[Subject]] = [[]]
    for _, document in groupby(about, key=lambda subject: subject.passage.document):
        if len(topics[-1]) >= _LEAST_OF_A_TOPIC:
            topics.append([])
        topics[-1] += document
    if len(topics) > 1 and len(topics[-1]) < _LEAST_OF_A_TOPIC:
        topics[-2:] = [topics[-2] + topics[-1]]
    return topics
