"""What the model reads beside the evidence: labels, and notes on order and location."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from string import Formatter

from warmprefix.labels import LABEL_CHARACTERS

__all__ = ["Templates"]

_MARKER = re.compile(rf"\[[{LABEL_CHARACTERS}]{{1,64}}\]")
_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"


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
        ValueError: A template lacks its placeholder, has another one, spans several lines, begins with a placeholder
            or bracket, or has a backslash before the placeholder.
    """

    order: str = "Please read the context in the following priority order: {order} and answer the question."
    """`{order}` stands for all labels, most relevant first: ``[Doc_2] > [Doc_1]``."""

    location: str = "Please refer to {label} in the previous conversation."
    """`{label}` stands for the label of a block that the conversation already holds: ``[Doc_1]``."""

    _introductions: tuple[tuple[str, int], ...] = field(init=False, repr=False, compare=False)
    """What stands before each placeholder, folded, and how far back to look for it."""

    def __post_init__(self) -> None:
        lead_ins = (_lead_in("order", self.order), _lead_in("location", self.location))
        # Twice the length leaves room for white space that folds to one blank.
        introductions = tuple((_folded(lead_in), 2 * len(lead_in) + 8) for lead_in in lead_ins)
        object.__setattr__(self, "_introductions", introductions)

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
        pieces: list[str] = []
        copied = 0
        for marker in _MARKER.finditer(text):
            start = marker.start()
            if _begins_line(text, start) or self._is_introduced(text, start):
                pieces += (text[copied:start], "\\")
                copied = start
        return "".join((*pieces, text[copied:]))

    def _is_introduced(self, text: str, position: int) -> bool:
        end = position
        while end and text[end - 1] == "\\":
            end -= 1
        return any(
            _folded(text[max(0, end - reach) : end]).endswith(introduction)
            for introduction, reach in self._introductions
        )


def _lead_in(name: str, template: str) -> str:
    """The text before the one placeholder of a template, which must be called `name`-wise right."""
    placeholder = "order" if name == "order" else "label"
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
    # Without words in front it could pass for a block's header; a backslash there would pass for our escape.
    if lead_in.lstrip()[:1] in ("", "[") or "\\" in lead_in:
        raise ValueError(
            f"{name} template needs words before {{{placeholder}}}, no bracket first, no backslash, got {template!r}"
        )
    return lead_in


def _folded(text: str) -> str:
    return " ".join(text.split()).casefold()


def _begins_line(text: str, position: int) -> bool:
    """Whether nothing but blanks, invisible characters and backslashes precedes `position` on its line."""
    while position:
        character = text[position - 1]
        if character in _LINE_BREAKS:
            return True
        if character != "\\" and not character.isspace() and unicodedata.category(character) not in ("Cc", "Cf"):
            return False
        position -= 1
    return True
