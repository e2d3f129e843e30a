"""What a check is: a defect, how a log without it would read, and where it shows in two requests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from warmprefix_tools.doctor.conversations import Change
from warmprefix_tools.doctor.prompts import Draft, Message

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["Check", "DraftCheck", "HistoryCheck", "MessageCheck", "Part", "Spot", "SpotPair", "TextCheck"]

Part = Literal["outside", "inside", "headers", "everywhere"]
"""Of the text: what stands outside of lists, what inside, the first segments of list items, or all of it."""


@dataclass(frozen=True, slots=True)
class Spot:
    """A place in a request: an offset in a message's text, or a field."""

    message: int | None = None
    """Index into the prompt's messages, tools included."""
    offset: int | None = None
    length: int = 0
    """Characters that matter."""
    path: str | None = None
    text: str | None = None
    """What to show of a field."""


SpotPair = tuple[Spot, Spot]
"""In the later request, and in the earlier."""


@dataclass(frozen=True, slots=True)
class Check:
    """A defect; `kind` names it for good."""

    kind: str
    title: str
    fix: str


@dataclass(frozen=True, slots=True)
class TextCheck(Check):
    """A defect of wording: mended segment by segment."""

    rewrite: Callable[[str], str]
    """A segment without it; the same segment if it has none. Idempotent, and never a cut or a join of segments."""
    part: Part
    elsewhere: Callable[[str], str] | None = None
    """The same for segments of other parts; None leaves them alone."""


@dataclass(frozen=True, slots=True)
class MessageCheck(Check):
    """A defect of a message as a whole: mended message by message."""

    mend: Callable[[Survey, Message], Message]
    spot: Callable[[Survey, int, int], SpotPair | None]


@dataclass(frozen=True, slots=True)
class HistoryCheck(Check):
    """A defect of conversations: mended by sending the history as it was."""

    change: Change
    spot: Callable[[Survey, int, int], SpotPair | None]


@dataclass(frozen=True, slots=True)
class DraftCheck(Check):
    """A defect of requests as they follow one another: mended log by log."""

    mend: Callable[[Survey, Draft], Draft]
    """Changes the draft that it is given."""
    spot: Callable[[Survey, int, int], SpotPair | None]
