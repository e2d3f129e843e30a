"""Quotes: words of a passage that stand in no other passage of its prompt, as a reader sees it."""

from __future__ import annotations

import codecs
import hashlib
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

__all__ = [
    "COMBINING",
    "INVISIBLE",
    "OPENING_BYTES",
    "OPENING_CHARACTERS",
    "QUOTATION_MARKS",
    "folded",
    "line_openings",
    "opening",
    "opening_keys",
    "quotes_of",
]

INVISIBLE = (
    r"\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Control characters, what Unicode calls default-ignorable, and the blank Braille pattern."""

COMBINING = (
    r"\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f"
    r"\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
)
"""Marks that are drawn over the character in front of them."""

QUOTATION_MARKS = '"“”„‟«»‹›「」『』〝〞〟＂'

_LEAST_BYTES = (8, 3)
"""Letters and digits of the shortest quote, in UTF-8: at first, and where no words of a text are so long and unique. A
shorter block is quoted whole."""
_MOST_BYTES = 48
_MOST_TRIES = 64
"""Places of one block at which a quote may begin, besides those inside passages that stand elsewhere too."""
OPENING_BYTES = 24
"""Letters and digits by which a reference finds the beginning of a passage, in UTF-8. Of 2,492 facts about two people,
12 are too few for a third that 24 tell apart."""
OPENING_CHARACTERS = 256
"""Characters in which they must stand."""
_MOST_PARAGRAPHS = 256
"""Paragraphs of a passage that later passages are compared with: its first and its last ones."""
_BREAKS = "\n\r\v\f\x1c-\x1e\x85\u2028\u2029"
_LINE = re.compile(rf"[{_BREAKS}][\W_]*")
"""The beginning of a line that has letters or digits, behind the end of the last such line."""
_PARAGRAPH = re.compile(rf"[\f\u2029]|[{_BREAKS}][^{_BREAKS}]*[{_BREAKS}]")
"""What there is more than the end of a line between two paragraphs."""
_MARKS = re.compile(r"(?:[\W_]*?(?:<[^<>\n]{1,200}>|\[[^\[\]\n]{1,80}\]|\d{1,4}[.):]))+")
"""Tags, labels and numbers, behind which the words of a passage begin."""
_FIRST_WORDS, _RUN_WORDS = 4, 32
_OVERLAP_WORDS = 16

_LOWER = bytes(range(256)).lower()
_NOT_WORDS = bytes(code for code in range(128) if not chr(code).isalnum())
_NOT_WORDS_OR_BREAKS = _NOT_WORDS.replace(b"\x00", b"")
_HANDLER = "warmprefix.folded"
_NORMALIZED = 256
"""Characters that are normalised at a time: sorting their marks may take quadratic time."""

_UNSPACED = (
    r"\u0e00-\u0eff\u0f00-\u0fff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u31f0-\u31ff\u3400-\u9fff\uf900-\ufaff"
    r"\U00020000-\U0003ffff"
)
"""Scripts without spaces between words, in which any character may begin a quote."""
_VOWELS = (
    r"\u0e31\u0e34-\u0e3a\u0e47-\u0e4e\u0eb1\u0eb4-\u0ebc\u0ec8-\u0ece\u0f71-\u0f84\u102b-\u103e\u17b4-\u17d3"
    r"\u3099\u309a"
)
"""Signs that belong to the character in front of them."""
_WORD = re.compile(rf"[{_UNSPACED}][{_VOWELS}{COMBINING}]*|[^\s{_UNSPACED}]+")
_UNQUOTABLE = re.compile(
    rf"[{QUOTATION_MARKS}‘‚‛`＂＇\\＼|\[\]{{}}<>［］｛｝＜＞〈〉《》【】〔〕﹇﹈{INVISIBLE}\ud800-\udfff]|(?<!\w)['’]|['’](?!\w)"
)
"""What could end a quote, or be lost on its way to the model: quotation marks, brackets, invisible characters."""


def folded(text: str) -> bytes:
    r"""Return the letters and digits that a reader sees, in lower case, compatible plain characters and UTF-8.

    White space, signs and invisible characters are left out. The folds of two texts together are the fold of both
    texts joined. O(len(text)), and about 1 ns for each ASCII character.

    >>> folded("**Most**\trele\u200bvant\nabove: Ｆｉｇ. 1").decode()
    'mostrelevantabovefig1'
    """
    return text.encode("ascii", _HANDLER).translate(_LOWER, _NOT_WORDS)


def _folded_rest(error: UnicodeError) -> tuple[bytes, int]:
    """Fold the characters of a text that are not ASCII."""
    assert isinstance(error, UnicodeEncodeError)
    rest = error.object[error.start : error.end]
    pieces = [
        unicodedata.normalize("NFKD", rest[begin : begin + _NORMALIZED]) for begin in range(0, len(rest), _NORMALIZED)
    ]
    letters = "".join(filter(str.isalnum, "".join(pieces))).casefold()
    # Hangul fillers are letters that show nothing.
    return letters.replace("\u115f", "").replace("\u1160", "").encode("utf-8", "surrogatepass"), error.end


codecs.register_error(_HANDLER, _folded_rest)


def quotes_of(
    texts: Sequence[str], number: int, lead_ins: Sequence[bytes] = (), escaped: Callable[[str], str] = str
) -> list[str]:
    """Return words of each of the first `number` texts that stand in no other text.

    A quote is part of one line, begins and ends at the end of a word, and has no quotation mark, bracket, backslash or
    invisible character. It is the beginning of its text where possible. No other text holds it, nor do two texts where
    they meet, in whatever order they stand, however a reader treats case, white space, signs and invisible characters.
    Ends before the first text without such words, which repeats parts of other texts only.

    A prompt shows a text `escaped` if its fold holds one of the `lead_ins`.

    >>> quotes_of(["The sky is blue.", "The sky is blue at noon.", "Grass"], 3)
    []
    >>> quotes_of(["The sky is blue at noon.", "The sky is blue.", "Grass"], 3)
    ['The sky is blue at']
    """
    folds = _folds(texts)
    found: list[str] = []
    for i, text in enumerate(texts[:number]):
        if [lead_in for lead_in in lead_ins if lead_in in folds[i]]:
            text = escaped(text)
        passage = _Passage(folds, i)
        quote = _quote(text, passage, _LEAST_BYTES[0]) or _quote(text, passage, _LEAST_BYTES[1])
        if quote is None:
            break
        found.append(quote)
    return found


def _folds(texts: Sequence[str]) -> Sequence[bytes]:
    """Return the fold of each text, in one pass unless a text holds the sign between them."""
    together = "\x00".join(texts).encode("ascii", _HANDLER).translate(_LOWER, _NOT_WORDS_OR_BREAKS)
    folds = together.split(b"\x00")
    return folds if len(folds) == len(texts) else [folded(text) for text in texts]


def opening(text: str) -> str:
    r"""Return the first words of a text, as a reference quotes them; empty if it has too few.

    Signs that could end the quote, and words of signs only, are left out. O(1).

    >>> opening("## Ada\n\n[Lovelace] wrote the first published algorithm.")
    'Ada Lovelace wrote the first'
    >>> opening("Yes.")
    ''
    """
    head = " ".join(_UNQUOTABLE.sub(" ", text[:OPENING_CHARACTERS]).split())
    pieces: list[str] = []
    fold = end = 0
    for word in _WORD.finditer(head):
        length = len(folded(word[0]))
        if length:
            pieces += "" if end == word.start() else " ", word[0]
            fold, end = fold + length, word.end()
        if fold >= OPENING_BYTES:
            return "".join(pieces).strip(" .,;:!?…。、，")
    return ""


def opening_keys(text: str) -> list[str]:
    r"""Return a digest of the letters and digits that each paragraph of a text begins with; empty for a short one.

    A passage begins with the `opening` of another only if both have the same key, however a reader treats case, white
    space, signs and invisible characters. A paragraph that begins with a tag, label or number has a second key, without
    it. The first key is that of the text itself. No label can be one. O(len(text)).

    >>> [key != "" for key in opening_keys("The first paragraph of a text.\n\nThe second one, which is long.\n\nEnd.")]
    [True, True, False]
    """
    starts = [found.span() for found in _LINE.finditer(text) if _PARAGRAPH.search(found[0].replace("\r\n", "\n"))]
    if len(starts) > _MOST_PARAGRAPHS:
        starts = [*starts[: _MOST_PARAGRAPHS // 2], *starts[-_MOST_PARAGRAPHS // 2 :]]
    folds = [fold for start in ((0, 0), *starts) for fold in _beginnings(text, *start)]
    return [
        "" if len(fold) < OPENING_BYTES else f"^{hashlib.blake2b(fold, digest_size=6).hexdigest()}" for fold in folds
    ]


def line_openings(text: str) -> Iterator[bytes]:
    """Yield the first letters and digits of each line, as far as references look; O(len(text)).

    A line that begins with a tag, label or number is yielded a second time, without it.
    """
    yield from _beginnings(text, 0, 0)
    for found in _LINE.finditer(text):
        yield from _beginnings(text, *found.span())


def _beginnings(text: str, start: int, end: int) -> Iterator[bytes]:
    fold = folded(text[end : end + OPENING_CHARACTERS])[:OPENING_BYTES]
    yield fold
    marks = _MARKS.match(text, start)
    if marks is not None:
        rest = folded(text[marks.end() : marks.end() + OPENING_CHARACTERS])[:OPENING_BYTES]
        if rest != fold:
            yield rest


class _Passage:
    """The fold of one text, and those of the others in its prompt."""

    def __init__(self, folds: Sequence[bytes], number: int) -> None:
        self.fold = folds[number]
        self._all = folds
        self._others = b"\n".join([fold for i, fold in enumerate(folds) if i != number])

    def is_only_here(self, fold: bytes) -> bool:
        """Return True if no other text holds `fold`, and no two texts where they meet."""
        if fold in self._others:
            return False
        beginnings = tuple([fold[:cut] for cut in range(1, len(fold))])
        ends = [text for text in self._all if text.endswith(beginnings)]
        if ends:
            for before in beginnings:
                if [text for text in ends if text.endswith(before)] and self._is_joint(before, fold[len(before) :]):
                    return False
        return True

    def _is_joint(self, before: bytes, behind: bytes) -> bool:
        """Return True if a text ends with `before`, and another one or several could go on with `behind`."""
        ends = {i for i, fold in enumerate(self._all) if fold.endswith(before)}
        begins = {
            i for i, fold in enumerate(self._all) if fold and (fold.startswith(behind) or behind.startswith(fold))
        }
        return bool(ends and begins) and len(ends | begins) > 1

    def shared_bytes(self, begin: int, fold: bytes) -> int:
        """Return how many bytes from `begin` on stand in another text too, at the first place that has `fold`."""
        at = self._others.find(fold)
        if at < 0:  # where two texts meet
            return len(fold)
        low, high = len(fold), len(self.fold) - begin + 1
        while high - low > 1:
            middle = (low + high) // 2
            if self.fold[begin : begin + middle] == self._others[at : at + middle]:
                low = middle
            else:
                high = middle
        return low


def _quote(text: str, passage: _Passage, least: int) -> str | None:
    """Return the first words of a text that stand in no other one; None if no such words were found."""
    least = min(least, len(passage.fold))
    opening = next(_runs(text, _FIRST_WORDS), None)
    piece = None if opening is None else next(_pieces(text, opening, least), None)
    if piece is not None and passage.is_only_here(piece[1]):  # as below, for the first words of most texts
        return piece[0]
    shared_to = tries = 0
    folded_to = at = 0  # a place in the text, and the length of the fold before it
    for run in _runs(text, _RUN_WORDS):
        for first, (start, _) in enumerate(run):
            at += len(folded(text[folded_to:start])) if start >= folded_to else -len(folded(text[start:folded_to]))
            folded_to = start
            if at + _MOST_BYTES <= shared_to:
                continue
            more = _pieces(text, run[first:], least)
            pieces = [*islice(more, 1)]
            if not pieces:
                continue
            if passage.is_only_here(pieces[0][1]):
                return pieces[0][0]
            pieces += more
            if passage.is_only_here(pieces[-1][1]):
                return next(quote for quote, fold in pieces if passage.is_only_here(fold))
            tries += 1
            if tries == _MOST_TRIES:
                return None
            shared_to = at + passage.shared_bytes(at, pieces[-1][1])
    return None


def _pieces(text: str, words: Sequence[tuple[int, int]], least: int) -> Iterator[tuple[str, bytes]]:
    """Yield the quotes that begin with the first of these words, with their folds, the shortest first."""
    start, _ = words[0]
    for _, end in words:
        fold = folded(text[start:end])
        if not fold or len(fold) > _MOST_BYTES:
            break
        if len(fold) >= least:
            yield text[start:end].rstrip(".,;:!?…。、，"), fold


def _runs(text: str, most: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the places of words that can be quoted together; long runs in parts that overlap."""
    run: list[tuple[int, int]] = []
    fresh = False
    for word in _WORD.finditer(text):
        is_quotable = _UNQUOTABLE.search(word[0]) is None
        if run and (not is_quotable or text[run[-1][1] : word.start()] not in ("", " ")):
            if fresh:
                yield run
            run, fresh = [], False
        if is_quotable:
            run.append(word.span())
            fresh = True
            if len(run) == most:
                yield run
                run, fresh = run[-_OVERLAP_WORDS:], False
    if fresh:
        yield run
