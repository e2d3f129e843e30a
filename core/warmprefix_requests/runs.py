"""Texts that stand, whole or in part, inside earlier ones. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

__all__ = [
    "RunIndex",
    "SearchBudget",
    "TextRun",
    "cut_by_lines",
    "cut_by_words",
    "json_string",
    "lines_of",
    "unique_words",
    "words_around",
]

_Source = TypeVar("_Source")

_ANCHOR_CHARACTERS = 24
"""The index holds pieces of at least this length."""

_LONG_LINE = 200
_MAX_PLACES = 4
"""Places that the index holds of each piece."""

_MAX_ANCHORS = 8
"""Pieces of a text that are looked up to find all of it."""

_MAX_BACK = 1_024
"""Characters that a run may have before the first piece that the index holds."""

_LINE = re.compile(r"[^\n]+")
_SENTENCE = re.compile(r".+?(?:[.!?](?=\s)|\\n|$)", re.DOTALL)

_WORDS = (24, 48, 96)
"""Lengths of quoted words, shortest first."""

_MAX_WORD_REST_CHARACTERS = 16
"""Quoted words end at the end of a word, unless the word goes on for longer than this."""

_MAX_WORDS = _WORDS[-1] + _MAX_WORD_REST_CHARACTERS


class SearchBudget:
    """Characters that may be searched, a multiple of those that were read: so searches stay linear in the text."""

    _TIMES = 256
    _START = 1 << 20

    def __init__(self) -> None:
        self.left = self._START
        """Characters that may be searched now."""

    def grow(self, characters: int) -> None:
        """Note that this many characters were read."""
        self.left += self._TIMES * characters

    def take(self, characters: int) -> bool:
        """Return True if this many characters may be searched, and count them."""
        if self.left < characters:
            return False
        self.left -= characters
        return True


@dataclass(frozen=True, slots=True)
class TextRun(Generic[_Source]):  # a generic NamedTuple needs Python 3.11
    """A part of a text that stands in a source as well."""

    begin: int
    end: int
    source: _Source
    at: int
    """Where it begins in the source's text."""


class RunIndex(Generic[_Source]):
    """The lines of texts, long ones cut at the ends of sentences, to find where a new text repeats them."""

    def __init__(self) -> None:
        """Begin without texts."""
        self._places: dict[str, list[tuple[_Source, str, int]]] = {}

    def add(self, source: _Source, text: str) -> None:
        """Add a text. O(characters)."""
        for begin, piece in _pieces(text):
            places = self._places.setdefault(piece, [])
            if len(places) < _MAX_PLACES:
                places.append((source, text, begin))

    def holding(self, text: str) -> Iterator[tuple[_Source, int]]:
        """Yield sources that hold all of a text, and where it begins in each. O(characters * places)."""
        seen: set[tuple[int, int]] = set()
        for number, (begin, piece) in enumerate(_pieces(text)):
            if number == _MAX_ANCHORS:
                return
            for source, held, place in self._places.get(piece, ()):
                at = place - begin
                if at >= 0 and (id(held), at) not in seen and held.startswith(text, at):
                    seen.add((id(held), at))
                    yield source, at

    def runs(self, text: str, least: int) -> Iterator[TextRun[_Source]]:
        """Yield parts of `least` or more characters that stand in an earlier text, in order. O(characters * places)."""
        done = searched = 0
        for begin, piece in _pieces(text):
            if begin < searched:  # so that many short runs do not cost more than their length
                continue
            longest: TextRun[_Source] | None = None
            for source, held, place in self._places.get(piece, ()):
                back = _common_end(text[max(done, begin - _MAX_BACK) : begin], held[max(place - _MAX_BACK, 0) : place])
                length = _common_begin(text, begin, held, place)
                if longest is None or back + length > longest.end - longest.begin:
                    longest = TextRun(begin - back, begin + length, source, place - back)
            if longest is None:
                continue
            searched = longest.end
            if longest.end - longest.begin >= least:
                yield longest
                done = longest.end


def unique_words(part: str, text: str) -> str | None:
    """Return the first words of a part of a text that stand once in it; None if these are too long."""
    return next((words for words in _first_words(part) if _stands_once(words, text)), None)


def words_around(text: str, begin: int, end: int) -> tuple[str, str] | None:
    """Return the first and the last words of a part of a text, if they identify it.

    None if the shortest words that stand once in the text are too long.
    """
    part = text[begin:end]
    first = unique_words(part, text)
    if first is None:
        return None
    backwards = _first_words(part[-_MAX_WORDS:][::-1])
    last = next((words[::-1] for words in backwards if _stands_once(words[::-1], text)), None)
    return (first, last) if last is not None and cut_by_words(text, first, last) == part else None


def _first_words(part: str) -> Iterator[str]:
    for length in _WORDS:
        rest = part[length : length + _MAX_WORD_REST_CHARACTERS]
        word_rest = len(rest.split(maxsplit=1)[0]) if rest and not rest[0].isspace() else 0
        yield part[: length + (word_rest if word_rest < len(rest) else 0)]


def _stands_once(words: str, text: str) -> bool:
    return text.find(words, text.find(words) + 1) < 0


def cut_by_words(text: str, first: str, last: str) -> str | None:
    """Return the part of a text from its first words to its last words."""
    begin = text.find(first)
    end = text.find(last, begin)
    return None if begin < 0 or end < 0 else text[begin : end + len(last)]


def lines_of(text: str, begin: int, end: int) -> tuple[int, int] | None:
    """Return the numbers of the first and the last line of a part of a text; None unless it consists of lines."""
    if (begin and text[begin - 1] != "\n") or (end < len(text) and text[end] != "\n"):
        return None
    first = text.count("\n", 0, begin) + 1
    return first, first + text.count("\n", begin, end)


def cut_by_lines(text: str, first: int, last: int) -> str | None:
    """Return the lines of a text with these numbers, counted from 1."""
    lines = text.split("\n")
    return "\n".join(lines[first - 1 : last]) if 1 <= first <= last <= len(lines) else None


def json_string(text: str) -> str:
    """Return a text as a JSON string in one line."""
    quoted = json.dumps(text, ensure_ascii=False)
    return quoted.replace("\x85", "\\u0085").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")


def _pieces(text: str) -> Iterator[tuple[int, str]]:
    """Yield the lines of a text that are long enough, with their places; longer ones sentence by sentence."""
    for line in _LINE.finditer(text):
        begin, end = line.span()
        if end - begin <= _LONG_LINE:
            if end - begin >= _ANCHOR_CHARACTERS:
                yield begin, line[0]
            continue
        for sentence in _SENTENCE.finditer(text, begin, end):
            if len(sentence[0]) >= _ANCHOR_CHARACTERS:
                yield sentence.start(), sentence[0]


def _common_begin(one: str, begin: int, other: str, place: int) -> int:
    """Return the number of characters that are the same from these places on."""
    shared, step, grows = 0, 64, True
    while step:
        piece = one[begin + shared : begin + shared + step]
        if len(piece) == step and piece == other[place + shared : place + shared + step]:
            shared += step
            step = min(2 * step, 65_536) if grows else step // 2
        else:
            grows, step = False, step // 2
    return shared


def _common_end(one: str, other: str) -> int:
    """Return the number of characters that are the same at the ends."""
    return _common_begin(one[::-1], 0, other[::-1], 0)
