"""What the model reads beside the evidence: labels, and notes on order and location."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from string import Formatter

from warmprefix.labels import LABEL_CHARACTERS

__all__ = ["Templates", "header_labels"]

_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
_INVISIBLE = (
    r"\x00-\x08\x0e-\x1b\x7f-\x84\x86-\x9f\xad\u034f\u061c\u115f\u1160\u17b4\u17b5\u180b-\u180f\u200b-\u200f"
    r"\u202a-\u202e\u2060-\u206f\u2800\u3164\ufe00-\ufe0f\ufeff\uffa0\ufff0-\ufffb"
    r"\U0001bca0-\U0001bca3\U0001d173-\U0001d17a\U000e0000-\U000e0fff"
)
"""Control characters, what Unicode calls default-ignorable, and the blank Braille pattern."""

_BLANKS = rf"[ \t\x1f\xa0\u1680\u2000-\u200a\u202f\u205f\u3000{_INVISIBLE}\\]*"
_MARKER = rf"(?=\[((?:[{_INVISIBLE}]*[{LABEL_CHARACTERS}]){{1,64}}[{_INVISIBLE}]*)\])"
_HEADER = rf"(?:\A|[{_BREAKS}]){_BLANKS}{_MARKER}"
"""The start of a line that shows a label first, but for blanks, invisible characters and backslashes."""

_HEADER_AT_START = re.compile(rf"\A{_BLANKS}{_MARKER}")
_HEADER_AFTER = {line_break: re.compile(f"{line_break}{_BLANKS}{_MARKER}") for line_break in _BREAKS}
"""One pattern a line break: `re` looks for a single first character many times faster than for one of several."""

_UNSEEN = re.compile(f"[{_INVISIBLE}]")


def header_labels(text: str) -> Iterator[str]:
    r"""The labels that lines of a text begin with, to the eye, as a block's first line does. Escaped ones don't count.

    >>> list(header_labels("[Doc_1] First, which cites [Doc_2].\u2028 [Doc\u200b_3] Second.\n\\[Doc_4] Third."))
    ['Doc_1', 'Doc_3']
    """
    if "[" not in text:
        return
    at_start = _HEADER_AT_START.match(text)
    headers = [] if at_start is None else [at_start]
    for line_break, header in _HEADER_AFTER.items():
        if line_break in text:
            headers += header.finditer(text)
    for found in headers:
        if not _UNSEEN.sub("", found[0]).endswith("\\"):
            yield _UNSEEN.sub("", found[1])


@dataclass(frozen=True, slots=True)
class Templates:
    r"""The wording of the annotations, by default the papers' own (ContextPilot, sections 4 and 5).

    A block is rendered as ``[label] text``. A line of its text that could pass for such a header, or a phrase that
    could pass for an annotation, has a backslash put before its bracket, so that every ``[label]`` in those places is
    ours. That depends on the text alone, and distinct texts stay distinct.

    >>> Templates().block("Doc_1", "First line.\n[Doc_2] Not a header.")
    '[Doc_1] First line.\n\\[Doc_2] Not a header.'

    Raises:
        TypeError: A template is no str.
        ValueError: A template lacks its placeholder, has another one, spans several lines, begins with the placeholder,
            or has a bracket or backslash before it.
    """

    order: str = "Please read the context in the following priority order: {order} and answer the question."
    """`{order}` stands for all labels, most relevant first: ``[Doc_2] > [Doc_1]``."""

    location: str = "Please refer to {label} in the previous conversation."
    """`{label}` stands for the label of a block that the conversation already holds: ``[Doc_1]``."""

    _telling_words: tuple[str, ...] = field(init=False, repr=False, compare=False)
    """Words of the templates, folded, of which every forgery of an annotation holds one."""

    _forged: re.Pattern[str] = field(init=False, repr=False, compare=False)
    """What in a block's text could pass for a header or an annotation, up to its bracket."""

    def __post_init__(self) -> None:
        lead_ins = [
            _lead_in("order", "order", self.order).split(),
            _lead_in("location", "label", self.location).split(),
        ]
        phrases = "|".join(rf"[\s{_INVISIBLE}]+".join(map(re.escape, words)) for words in lead_ins)
        shared = [word for word in lead_ins[0] if word in lead_ins[1]]
        telling = [max(words, key=len).casefold() for words in ([shared] if shared else lead_ins)]
        object.__setattr__(self, "_telling_words", tuple(telling))
        object.__setattr__(self, "_forged", re.compile(rf"{_HEADER}|(?i:{phrases})[\s{_INVISIBLE}\\]*{_MARKER}"))

    def order_annotation(self, labels: Iterable[str]) -> str:
        """The note that restores the relevance order.

        >>> Templates().order_annotation(["Doc_2", "Doc_1", "Doc_4"])
        'Please read the context in the following priority order: [Doc_2] > [Doc_1] > [Doc_4] and answer the question.'
        """
        return self.order.format(order=" > ".join([f"[{label}]" for label in labels]))

    def location_annotation(self, label: str) -> str:
        """The note that stands for a block which the conversation already holds.

        >>> Templates().location_annotation("Doc_1")
        'Please refer to [Doc_1] in the previous conversation.'
        """
        return self.location.format(label=f"[{label}]")

    def block(self, label: str, text: str) -> str:
        """A block as it stands in the prompt: the same bytes for the same label and text, always."""
        return f"[{label}] {self._escaped(text)}"

    def _escaped(self, text: str) -> str:
        if "[" not in text:
            return text
        folded = text.casefold()  # unlike `lower`, it folds a letter alike wherever it stands
        if any(word in folded for word in self._telling_words):
            return self._forged.sub(r"\g<0>\\", text)
        # Searching for headers alone is many times faster, and nearly always enough.
        text = _HEADER_AT_START.sub(r"\g<0>\\", text)
        for line_break, header in _HEADER_AFTER.items():
            if line_break in text:
                text = header.sub(r"\g<0>\\", text)
        return text


def _lead_in(name: str, placeholder: str, template: str) -> str:
    """Check a template, and return the words before its placeholder."""
    if not isinstance(template, str):
        raise TypeError(f"{name} template must be a str, got {type(template).__name__}")
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise ValueError(f"{name} template has unbalanced braces: {template!r}") from error
    fields = [(field, spec, conversion) for _, field, spec, conversion in pieces if field is not None]
    if fields != [(placeholder, "", None)]:
        raise ValueError(f"{name} template must hold {{{placeholder}}} once and no other field, got {template!r}")
    if template.splitlines() != [template]:
        raise ValueError(f"{name} template must be one line, got {template!r}")
    lead_in = template.format(**{placeholder: "\n"}).partition("\n")[0]
    # Without words in front it could pass for a block's header; a backslash there would pass for our escape, and a
    # forged phrase could hide a forged header in its own brackets.
    if not lead_in.strip() or "[" in lead_in or "\\" in lead_in:
        raise ValueError(
            f"{name} template needs words before {{{placeholder}}}, no bracket, no backslash, got {template!r}"
        )
    return lead_in
