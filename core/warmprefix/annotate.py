"""Annotations in the prompt: labels of blocks, and notes on order and location."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Literal, get_args

from warmprefix.errors import check_count
from warmprefix.labels import LABEL_CHARACTERS

__all__ = [
    "Annotate",
    "Annotation",
    "Templates",
    "annotation_for",
    "bracketed",
    "check_annotate",
    "check_template",
    "has_bracket",
    "has_labels",
    "header_labels",
]

Annotation = Literal["note", "labels", "both", "none"]
"""What a prompt shows of the relevance order.

`"note"`: where the order changed, a note names the most relevant blocks by their places. `"labels"`: each block begins
with its label, and there is no note. `"both"`: each block begins with its label, and where the order changed, a note
names the labels of the most relevant blocks. `"none"`: neither."""

Annotate = Literal["auto", Annotation]
"""An `Annotation`, or `"auto"`: the cheapest one that shows a change of the order."""

_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_INVISIBLE = (
    r"\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Control characters, what Unicode calls default-ignorable, and the blank Braille pattern."""

_COMBINING = (
    r"\u0300-\u036f\u0483-\u0489\u0591-\u05bd\u0610-\u061a\u064b-\u065f"
    r"\u1ab0-\u1aff\u1dc0-\u1dff\u20d0-\u20ff\ufe20-\ufe2f"
)
"""Marks that are drawn over the character in front of them."""

_BLANKS = rf" \t\x1f\xa0\u1680\u2000-\u200a\u202f\u205f\u3000{_INVISIBLE}{_COMBINING}\\"
_BLANK = f"[{_BLANKS}]"
"""Characters in front of a label that still looks like the beginning of its line; a backslash marks an escaped line."""

_OPENING = "[\uff3b\ufe47"
_BRACKETED = re.compile(r"[\[\uff3b\ufe47]([^\[\]\uff3b\uff3d\ufe47\ufe48]*)[\]\uff3d\ufe48]")
"""A text in brackets, full-width ones included."""

_HEADER_AT_START = re.compile(rf"\A{_BLANK}*(?={_BRACKETED.pattern})")
_HEADER_AFTER = {line_break: re.compile(f"{line_break}{_BLANK}*(?={_BRACKETED.pattern})") for line_break in _BREAKS}
"""One pattern per line break: `re` finds one fixed first character many times faster than one of several."""

_ONE_BLANK = re.compile(_BLANK)
_UNSEEN = re.compile(f"[{_INVISIBLE}{_COMBINING}]")
_LABEL = re.compile(rf"[{LABEL_CHARACTERS}]{{1,64}}")
_IN_NOTE = re.compile(rf"\[([{LABEL_CHARACTERS}]{{1,64}})\]")
_NOTED = rf"{_IN_NOTE.pattern}(?:(?:, | > )\[[{LABEL_CHARACTERS}]{{1,64}}\])*"
_JOINING = re.compile(rf"(?:[\n\r\v\f,;>&{_BLANKS}]|and)*")
"""Text between two labels of one note. No character can match in two ways, which keeps the search linear."""

_MAX_LABEL_CHARACTERS = 64
_BEFORE_LABEL = ":\"'“”‘’("
"""Characters between the words of a note and its first label."""


def bracketed(text: str) -> list[str]:
    """Return the visible content of all brackets in a text."""
    return [_seen(inner) for inner in _BRACKETED.findall(text)] if has_bracket(text) else []


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
    for line_break, header in _HEADER_AFTER.items():
        if line_break in text:
            headers += header.finditer(text)
    for found in headers:
        label = _seen(found[1])
        if _LABEL.fullmatch(label) and not _UNSEEN.sub("", found[0]).endswith("\\"):
            yield label


@dataclass(frozen=True, slots=True)
class Templates:
    r"""The wording of the annotations; notes with labels by default as in ContextPilot (sections 4 and 5).

    A labelled block is rendered as ``[label] text``. If a line of its text begins with a label of this very prompt, or
    an annotation in it names one, a backslash is added before the bracket. Everything else keeps its bytes.

    >>> Templates().block("Doc_1", "First line.\n[Doc_2] Not a header.\n[ERROR] Not one either.", {"Doc_2"})
    '[Doc_1] First line.\n\\[Doc_2] Not a header.\n[ERROR] Not one either.'

    Raises:
        TypeError: A template is not a str, or `most_named` is not an int.
        ValueError: `most_named` is below 1, or a template lacks its placeholder, has another one, or spans several
            lines. `order` and `location` must not begin with it, nor have a bracket or backslash before it.
    """

    order: str = "Please read the context in the following priority order: {order} and answer the question."
    """`{order}` is replaced by all labels, most relevant first: ``[Doc_2] > [Doc_1]``."""

    places: str = "Most relevant passages above: {places}."
    """`{places}` is replaced by the places of the most relevant blocks, the best first: ``4, 1, 7``."""

    most_named: int | None = 3
    """Most blocks that a note names, the most relevant ones; None for all. If these open the context in relevance order
    already, there is no note."""

    location: str = "Please also use the context labelled {labels} above in this conversation."
    """`{labels}` is replaced by the labels of blocks that the conversation holds: ``[Doc_1], [Doc_2]``."""

    _lead_ins: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The words before each placeholder, folded for `_reads_backwards`."""

    _before: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """The same words, not folded."""

    def __post_init__(self) -> None:
        check_template("places", self.places, ["places"])
        check_count("most_named", self.most_named, optional=True)
        lead_ins = (_lead_in("order", "order", self.order), _lead_in("location", "labels", self.location))
        object.__setattr__(self, "_lead_ins", tuple([_words(lead_in) for lead_in in lead_ins]))
        object.__setattr__(self, "_before", lead_ins)

    def order_annotation(self, labels: Iterable[str]) -> str:
        """Return the note that restores the relevance order.

        >>> Templates().order_annotation(["Doc_2", "Doc_1", "Doc_4"])
        'Please read the context in the following priority order: [Doc_2] > [Doc_1] > [Doc_4] and answer the question.'
        """
        return self.order.format(order=_listed(labels, " > "))

    def order_note(self, annotation: Annotation, ranks: Sequence[int | None], labels: Sequence[str]) -> str | None:
        """Return the note that a planned order needs; None if it needs none. O(blocks).

        >>> Templates().order_note("note", [3, 0, 1, 2], ["Doc_4", "Doc_1", "Doc_2", "Doc_3"])
        'Most relevant passages above: 2, 3, 4.'

        Args:
            annotation: What the prompt shows.
            ranks: For each block in planned order, its place in relevance order; distinct. None for a block that
                continues a run: a note names a run by its first block, because the order within it is a fact.
            labels: The label of each, in planned order.
        """
        if annotation not in ("note", "both"):
            return None
        ranked = sorted([(rank, place) for place, rank in enumerate(ranks) if rank is not None])
        named = [place for _, place in ranked[: self.most_named]]
        if named == sorted(place for _, place in ranked)[: len(named)]:
            return None
        if annotation == "note":
            return self.places.format(places=", ".join([str(place + 1) for place in named]))
        return self.order_annotation([labels[place] for place in named])

    def location_annotation(self, labels: Iterable[str]) -> str:
        """Return the note that replaces blocks which the conversation already holds.

        >>> Templates().location_annotation(["Doc_1", "Doc_2"])
        'Please also use the context labelled [Doc_1], [Doc_2] above in this conversation.'
        """
        return self.location.format(labels=_listed(labels, ", "))

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
        """Return a block as the prompt shows it.

        Args:
            label: Its own label.
            text: Its text.
            names: All labels of this prompt and its conversation: only imitations of these are escaped.
        """
        if has_bracket(text):
            own = names if isinstance(names, frozenset) and label in names else frozenset((label, *names))
            text = self._escaped(text, own)
        return f"[{label}] {text}"

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
        for place, seen in self._imitations(text):
            piece = text[copied:place]
            if not shown.startswith(piece, at):
                return None
            at, copied = at + len(piece), place
            if _LABEL.fullmatch(seen):
                at += shown.startswith("\\", at)  # the text has a bracket here, so the backslash was added by escaping
        return at + len(text) - copied if shown.startswith(text[copied:], at) else None

    def _escaped(self, text: str, names: frozenset[str]) -> str:
        """Escape each bracket that seems to open a header or a note with one of `names`.

        O(len(text)); only one pass of a compiled pattern if no bracket contains a name.
        """
        inners = _BRACKETED.findall(text)
        if names.isdisjoint(inners) and not any(_seen(inner) in names for inner in _unusual(inners)):
            return text
        pieces: list[str] = []
        copied = 0
        for place, seen in self._imitations(text):
            if seen in names:
                pieces += text[copied:place], "\\"
                copied = place
        return "".join([*pieces, text[copied:]])

    def _imitations(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield place and content of each bracket that opens a line or an apparent note."""
        noted_until = 0
        for found in _BRACKETED.finditer(text):
            start = found.start()
            is_in_note = (noted_until and _JOINING.fullmatch(text, noted_until, start)) or self._ends_in_lead_in(
                text, start
            )
            noted_until = found.end() if is_in_note else 0
            if is_in_note or _opens_line(text, start):
                yield start, _seen(found[1])

    def _ends_in_lead_in(self, text: str, end: int) -> bool:
        """Return True if the text before `end` reads like the beginning of a note."""
        return any(_reads_backwards(text, end, lead_in) for lead_in in self._lead_ins)


def annotation_for(annotate: Annotate, placement: str) -> Annotation:
    """Return what a prompt shows. With placement `tail` it has labels, because references name them."""
    if placement == "tail":
        return "labels" if annotate in ("labels", "none") else "both"
    return "note" if annotate == "auto" else annotate


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


def _folded(text: str) -> str:
    """Return the text in lower case and without spaces, to compare how it reads."""
    return "".join(_plain(text).casefold().split())


def _words(lead_in: str) -> str:
    """Return the folded words of a note, without characters in front of a label."""
    return _folded(lead_in).rstrip(_BEFORE_LABEL)


def _reads_backwards(text: str, end: int, folded: str) -> bool:
    """Return True if the text before `end` reads like `folded` at its end."""
    left = folded
    while end and (text[end - 1] in _BEFORE_LABEL or text[end - 1].isspace() or _ONE_BLANK.match(text, end - 1)):
        end -= 1
    while left:
        if not end:
            return False
        end -= 1
        character = text[end]
        if character.isspace() or _ONE_BLANK.match(character):
            continue
        seen = _folded(character)
        if not left.endswith(seen):
            return False
        left = left[: len(left) - len(seen)]
    return True


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
    if not _words(lead_in) or any(sign in lead_in for sign in (*_OPENING, "\\")):
        needed = f"words without brackets and backslashes before {{{placeholder}}}"
        raise ValueError(f"{name} must have {needed}, got {template!r}")
    return lead_in
