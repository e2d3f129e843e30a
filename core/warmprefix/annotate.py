"""Annotations in the prompt: labels, notes on order and location, and the escapes of evidence that imitates them."""

from __future__ import annotations

import re
import unicodedata
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from string import Formatter
from typing import Literal, NamedTuple, get_args

from warmprefix.errors import check_count
from warmprefix.labels import LABEL_CHARACTERS
from warmprefix.quotes import COMBINING, INVISIBLE, OPENING_BYTES, QUOTATION_MARKS, folded

__all__ = [
    "Annotate",
    "Annotation",
    "Templates",
    "bracketed",
    "check_annotate",
    "check_template",
    "has_bracket",
    "has_labels",
    "header_labels",
]

Annotation = Literal["note", "labels", "both", "none"]
"""What a prompt shows of the relevance order.

`"note"`: where the order changed, a note quotes the most relevant blocks. `"labels"`: each block begins
with its label, and there is no note. `"both"`: each block begins with its label, and where the order changed, a note
names the labels of the most relevant blocks. `"none"`: neither."""

Annotate = Literal["auto", Annotation]
"""An `Annotation`, or `"auto"`: the cheapest one that shows a change of the order."""

_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_BLANKS = rf" \t\x1f\xa0\u1680\u2000-\u200a\u202f\u205f\u3000{INVISIBLE}{COMBINING}\\"
_BLANK = f"[{_BLANKS}]"
"""Characters in front of a label that still looks like the beginning of its line; a backslash marks an escaped line."""

_OPENING = "[\uff3b\ufe47"
_BRACKETED = re.compile(r"[\[\uff3b\ufe47]([^\[\]\uff3b\uff3d\ufe47\ufe48]*)[\]\uff3d\ufe48]")
"""A text in brackets, full-width ones included."""

_HEADER_AT_START = re.compile(rf"\A{_BLANK}*(?={_BRACKETED.pattern})")

_ONE_BLANK = re.compile(_BLANK)
_UNSEEN = re.compile(f"[{INVISIBLE}{COMBINING}]")
_LABEL = re.compile(rf"[{LABEL_CHARACTERS}]{{1,64}}")
_IN_NOTE = re.compile(rf"\[([{LABEL_CHARACTERS}]{{1,64}})\]")
_NOTED = rf"{_IN_NOTE.pattern}(?:(?:, | > )\[[{LABEL_CHARACTERS}]{{1,64}}\])*"
_JOINING = re.compile(rf"(?:[\n\r\v\f,;>&{_BLANKS}]|and)*")
"""Text between two labels of one note. No character can match in two ways, which keeps the search linear."""

_MAX_LABEL_CHARACTERS = 64
_QUOTING = 2
"""Notes that quote, the first of the `lead_ins`."""
_BEFORE_QUOTE = re.compile(rf"[{_BLANKS}\n\r\v\f:'‘’(]*[{QUOTATION_MARKS}]")
"""Text between the words of a note and its first quote."""


def bracketed(text: str) -> list[str]:
    """Return the visible content of all brackets in a text."""
    return [_seen(inner) for inner in _BRACKETED.findall(text)] if has_bracket(text) else []


@cache
def _header_after(line_break: str) -> re.Pattern[str]:
    return re.compile(f"{line_break}{_BLANK}*(?={_BRACKETED.pattern})")


def header_labels(text: str) -> Iterator[str]:
    r"""Yield the labels that lines visibly begin with, like the first line of a block.

    Escaped lines are left out.

    >>> list(header_labels("[Doc_1] First, which cites [Doc_2].\u2028 [Doc\u200b_3] Second.\n\\[Doc_4] Third."))
    ['Doc_1', 'Doc_3']
    """
    if not has_bracket(text):
        return
    at_start = _HEADER_AT_START.match(text)
    headers = [] if at_start is None else [at_start]
    for line_break in _BREAKS:  # `re` finds one fixed first character many times faster than one of several
        if line_break in text:
            headers += _header_after(line_break).finditer(text)
    for found in headers:
        label = _seen(found[1])
        if _LABEL.fullmatch(label) and not _UNSEEN.sub("", found[0]).endswith("\\"):
            yield label


class _ApparentNotes(NamedTuple):
    """What in a text reads like the beginning of a note."""

    begins: Sequence[int]
    """Where a line begins like a note, or a note that quotes begins in a line; ascending."""
    places: Sequence[int]
    """The place in the text of each byte of its fold."""
    ends: Collection[int]
    """The bytes of the fold in front of which the words of a note end."""

    def ends_at(self, place: int) -> bool:
        """Return True if only signs stand between the words of a note and this place."""
        return bisect_left(self.places, place) in self.ends


_NO_NOTES = _ApparentNotes((), (), ())


@dataclass(frozen=True, slots=True)
class Templates:
    r"""The wording of the annotations; notes with labels by default as in ContextPilot (sections 4 and 5).

    A labelled block is rendered as ``[label] text``. In its text, a backslash is added in front of a line that begins
    like one of the notes, and in front of a bracket where a line begins with a label of this very prompt, or a note
    names one. Everything else keeps its bytes.

    >>> Templates().block("Doc_1", "First line.\n[Doc_2] Not a header.\n[ERROR] Not one either.", {"Doc_2"})
    '[Doc_1] First line.\n\\[Doc_2] Not a header.\n[ERROR] Not one either.'

    Raises:
        TypeError: A template is not a str, or `most_quoted` or `most_named` is not an int.
        ValueError: One of these numbers is below 1, or a template lacks its placeholder, has another one, or spans
            several lines. A template must not begin with it, nor have a bracket, backslash or quotation mark before it.
    """

    order: str = "Please read the context in the following priority order: {order} and answer the question."
    """`{order}` is replaced by all labels, most relevant first: ``[Doc_2] > [Doc_1]``."""

    quotes: str = "Most relevant above: the passage with {quotes}."
    """`{quotes}` is replaced by words of the most relevant blocks, the best first: ``"The sky is" > "Grass is"``."""

    most_quoted: int | None = 1
    """Most blocks that a note quotes, the most relevant ones; None for all. If these open the context in relevance
    order already, there is no note."""

    most_named: int | None = 3
    """The same for a note that names labels, which cost fewer tokens than quotes."""

    again: str = "Also use the passages above that begin with {openings}."
    """`{openings}` is replaced by the first words of blocks that the conversation holds: ``"The sky", "Grass is"``."""

    location: str = "Please also use the context labelled {labels} above in this conversation."
    """The same with labels; `{labels}` is replaced by ``[Doc_1], [Doc_2]``."""

    lead_ins: tuple[bytes, ...] = field(init=False, repr=False, compare=False)
    """The folded words before each placeholder; those of `quotes` and `again` first."""

    _before: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The words of `order` and `location` before the placeholder."""

    def __post_init__(self) -> None:
        check_count("most_quoted", self.most_quoted, optional=True)
        check_count("most_named", self.most_named, optional=True)
        quoting = (_lead_in("quotes", "quotes", self.quotes), _lead_in("again", "openings", self.again))
        lead_ins = (_lead_in("order", "order", self.order), _lead_in("location", "labels", self.location))
        object.__setattr__(self, "lead_ins", tuple(map(folded, (*quoting, *lead_ins))))
        object.__setattr__(self, "_before", lead_ins)

    def order_annotation(self, labels: Iterable[str]) -> str:
        """Return the note that restores the relevance order.

        >>> Templates().order_annotation(["Doc_2", "Doc_1", "Doc_4"])
        'Please read the context in the following priority order: [Doc_2] > [Doc_1] > [Doc_4] and answer the question.'
        """
        return self.order.format(order=_listed(labels, " > "))

    def location_annotation(self, labels: Iterable[str]) -> str:
        """Return the note that replaces blocks which the conversation already holds.

        >>> Templates().location_annotation(["Doc_1", "Doc_2"])
        'Please also use the context labelled [Doc_1], [Doc_2] above in this conversation.'
        """
        return self.location.format(labels=_listed(labels, ", "))

    def again_annotation(self, openings: Iterable[str]) -> str:
        """Return the same note for blocks without labels.

        >>> Templates().again_annotation(["The sky is", "Grass is"])
        'Also use the passages above that begin with "The sky is", "Grass is".'
        """
        return self.again.format(openings=", ".join([f'"{words}"' for words in openings]))

    def begins_like_note(self, text: str) -> bool:
        """Return True if a text begins with the words of a note, as far as references look."""
        return folded(text).startswith(tuple([lead_in[:OPENING_BYTES] for lead_in in self.lead_ins]))

    def without_quotes(self, text: str) -> str:
        """Return a text without the quotes of notes in it."""
        for template in (self.quotes, self.again):
            before = template.partition("{")[0]
            if before in text:
                text = re.sub(f'{re.escape(before)}"[^"\n]*"(?:(?:, | > )"[^"\n]*")*', "", text)
        return text

    def noted_labels(self, text: str) -> Iterator[str]:
        r"""Yield the labels that annotations in a text name.

        >>> list(Templates().noted_labels("[a] x\n\nPlease also use the context labelled [b], [c] above."))
        ['b', 'c']
        """
        for before in self._before:
            if before in text:
                for note in re.finditer(re.escape(before) + _NOTED, text):
                    yield from _IN_NOTE.findall(note[0], len(before))

    def block(self, label: str, text: str, names: Collection[str] = ()) -> str:
        """Return a labelled block as the prompt shows it.

        Args:
            label: Its own label.
            text: Its text.
            names: All labels of this prompt and its conversation: only imitations of these are escaped.
        """
        own = names if isinstance(names, frozenset) and label in names else frozenset((label, *names))
        return f"[{label}] {self.escaped(text, own)}"

    def escaped(self, text: str, names: frozenset[str] = frozenset()) -> str:
        r"""Return a text in which nothing passes for a note, or for a block or note with one of `names`.

        O(len(text)); a few fast searches in most texts.

        >>> print(Templates().escaped("The sky.\n**Most relevant above:** the passage with 'Grass'"))
        The sky.
        **\Most relevant above:** the passage with 'Grass'
        """
        notes = self._apparent_notes(text)
        if not notes.begins:
            if not names or not has_bracket(text):
                return text
            inners = _BRACKETED.findall(text)
            if names.isdisjoint(inners) and not any(_seen(inner) in names for inner in _unusual(inners)):
                return text
        pieces: list[str] = []
        copied = 0
        for place, seen in self._imitations(text, notes):
            if seen is None or seen in names:
                pieces += text[copied:place], "\\"
                copied = place
        return "".join([*pieces, text[copied:]])

    def matching_end(self, shown: str, start: int, label: str, text: str) -> int | None:
        r"""Return the end of this block in `shown`; None if it does not begin at `start`.

        Any line of its text may be escaped, depending on the labels in its prompt. O(len(text)).

        >>> Templates().matching_end("[a] x\n\\[b] y", 0, "a", "x\n[b] y")
        12
        """
        header = f"[{label}] "
        if not shown.startswith(header, start):
            return None
        at = start + len(header)
        if shown.startswith(text, at):
            return at + len(text)
        copied = 0
        for place, seen in self._imitations(text, self._apparent_notes(text)):
            piece = text[copied:place]
            if not shown.startswith(piece, at):
                return None
            at, copied = at + len(piece), place
            if seen is None or _LABEL.fullmatch(seen):
                at += shown.startswith("\\", at)  # the text has another sign here, so escaping added the backslash
        return at + len(text) - copied if shown.startswith(text[copied:], at) else None

    def _imitations(self, text: str, notes: _ApparentNotes) -> list[tuple[int, str | None]]:
        """Return the place of each apparent note, and place and content of each bracket that opens a line or a name."""
        found: list[tuple[int, str | None]] = [(place, None) for place in notes.begins]
        noted_until = 0
        for bracket in _BRACKETED.finditer(text):
            start = bracket.start()
            is_in_note = (noted_until and _JOINING.fullmatch(text, noted_until, start)) or notes.ends_at(start)
            noted_until = bracket.end() if is_in_note else 0
            if is_in_note or _opens_line(text, start):
                found.append((start, _seen(bracket[1])))
        return sorted(found, key=lambda imitation: imitation[0])

    def _apparent_notes(self, text: str) -> _ApparentNotes:
        fold = folded(text)
        if not any(lead_in in fold for lead_in in self.lead_ins):
            return _NO_NOTES
        places = [place for place, character in enumerate(text) for _ in folded(character)]
        begins: set[int] = set()
        ends: set[int] = set()
        for number, lead_in in enumerate(self.lead_ins):
            at = fold.find(lead_in)
            while at >= 0:
                begin, behind = places[at], places[at + len(lead_in) - 1] + 1
                ends.add(at + len(lead_in))
                if _is_line(text, begin, behind) or (number < _QUOTING and _BEFORE_QUOTE.match(text, behind)):
                    begins.add(begin)
                at = fold.find(lead_in, at + 1)
        return _ApparentNotes(sorted(begins), places, ends)


def has_labels(annotation: Annotation) -> bool:
    """Return True if each block begins with its label."""
    return annotation in ("labels", "both")


def check_annotate(annotate: Annotate) -> None:
    """Check an argument `annotate`.

    Raises:
        ValueError: It has another value.
    """
    allowed = ("auto", *get_args(Annotation))
    if annotate not in allowed:
        raise ValueError(f"annotate must be one of {', '.join(allowed)}, got {annotate!r}")


def _listed(labels: Iterable[str], separator: str) -> str:
    if isinstance(labels, str):
        raise TypeError(f"labels must be a sequence of str, got one str, {labels!r}")
    return separator.join([f"[{label}]" for label in labels])


def has_bracket(text: str) -> bool:
    """Return True if a text has a bracket that could enclose a label."""
    return "[" in text or (not text.isascii() and any(bracket in text for bracket in _OPENING))


def _unusual(inners: Sequence[str]) -> Iterable[str]:
    """Return those that may look like a label without being equal to one."""
    together = "".join(inners)
    if together.isascii() and together.isprintable() and " " not in together:
        return ()
    return [inner for inner in inners if not inner.isascii() or not inner.isprintable() or inner != inner.strip()]


def _seen(text: str) -> str:
    """Return the visible part of a text, in compatible plain characters.

    A text that is too long for a label keeps its characters, because normalising it may take quadratic time.
    """
    if text.isascii() and text.isprintable():
        return text.strip()
    text = _UNSEEN.sub("", text).strip()
    return text if text.isascii() or len(text) > _MAX_LABEL_CHARACTERS else _plain(text)


def _plain(text: str) -> str:
    return _UNSEEN.sub("", unicodedata.normalize("NFKD", text)).strip()


def _opens_line(text: str, start: int) -> bool:
    while start and (_ONE_BLANK.match(text, start - 1) or text[start - 1] in _OPENING):
        start -= 1
    return not start or text[start - 1] in _BREAKS


def _is_line(text: str, begin: int, behind: int) -> bool:
    """Return True if a line begins with `text[begin:behind]`, and these are whole words."""
    while begin and text[begin - 1] not in _BREAKS:
        begin -= 1
        if folded(text[begin]):
            return False
    while behind < len(text) and _UNSEEN.match(text, behind):
        behind += 1
    return behind == len(text) or not folded(text[behind])


def check_template(name: str, template: str, placeholders: Sequence[str]) -> None:
    """Check a one-line template that contains each placeholder once and no other one.

    Raises:
        TypeError: `template` is not a str.
        ValueError: It is not such a template.
    """
    if not isinstance(template, str):
        raise TypeError(f"{name} must be a str, got {type(template).__name__}")
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{name} must have balanced braces, got {template!r}") from error
    found = sorted((field, spec, conversion) for _, field, spec, conversion in pieces if field is not None)
    if found != [(placeholder, "", None) for placeholder in sorted(placeholders)]:
        allowed = " and ".join(f"{{{placeholder}}}" for placeholder in placeholders)
        raise ValueError(f"{name} must contain {allowed} once, and no other placeholder, got {template!r}")
    if template.splitlines() != [template]:
        raise ValueError(f"{name} must be one line, got {template!r}")


def _lead_in(name: str, placeholder: str, template: str) -> str:
    """Check a template of an annotation, and return the words before its placeholder."""
    check_template(name, template, [placeholder])
    lead_in = template.format(**{placeholder: "\n"}).partition("\n")[0]
    # Without words in front, the note could pass for a block's header; a backslash there would pass for our escape, and
    # a forged phrase could hide a forged header in its own brackets.
    if not folded(lead_in) or any(sign in lead_in for sign in (*_OPENING, *QUOTATION_MARKS, "\\")):
        needed = f"words without brackets, quotation marks and backslashes before {{{placeholder}}}"
        raise ValueError(f"{name} must have {needed}, got {template!r}")
    return lead_in
