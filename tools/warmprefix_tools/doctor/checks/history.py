"""Conversations whose past does not stay as it was sent."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import TYPE_CHECKING

from warmprefix_tools.doctor.checks.base import HistoryCheck, Spot, SpotPair
from warmprefix_tools.doctor.conversations import Change, Thread, leading
from warmprefix_tools.doctor.prompts import Draft, Message

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["REWRITTEN", "TRUNCATED", "keep_histories"]


def whole_message(survey: Survey, at: int, message: Message) -> Spot:
    """The place of a message, all of it."""
    return Spot(at, 0, len(survey.log.text(message)))


def keep_histories(survey: Survey, draft: Draft, mended: frozenset[Change]) -> None:
    """Give each request the history as its conversation had it, where what happened to it is to be mended."""
    histories: list[list[_Kept]] = []
    for index, (prompt, thread) in enumerate(zip(draft.prompts, survey.threads, strict=True)):
        start = leading(prompt)
        own = prompt[start:]
        if thread is None:
            history: list[_Kept] = [(message,) for message in own]
        else:
            history = _kept(histories[thread.earlier], own, thread, mended)
        histories.append(history)
        if thread is not None:
            draft.prompts[index] = prompt[:start] + tuple(chain.from_iterable(history))


_Kept = tuple[Message, ...]
"""What stands for one message of a request: itself, and in front of it those that it lost."""


def _kept(before: list[_Kept], own: tuple[Message, ...], thread: Thread, mended: frozenset[Change]) -> list[_Kept]:
    history: list[_Kept] = []
    lost: _Kept = ()
    new = 0
    for step in thread.steps:
        new = max(new, step.new.stop)
        if step.change == "truncated":
            if step.change in mended:
                lost += tuple(chain.from_iterable(before[i] for i in step.old))
        elif step.change == "rewritten" and len(step.old) != len(step.new):
            if step.change in mended:
                lost += tuple(chain.from_iterable(before[i] for i in step.old))
                history += [()] * len(step.new)
            else:
                history += [(own[j],) for j in step.new]
        else:
            for i, j in zip(step.old, step.new, strict=True):
                kept = step.change is None or step.change in mended
                history.append(lost + before[i][:-1] + (before[i][-1:] if kept else (own[j],)))
                lost = ()
    for message in own[new:]:
        history.append((*lost, message))
        lost = ()
    return history


def _spot_of(change: Change) -> Callable[[Survey, int, int], SpotPair | None]:
    def spot(survey: Survey, later: int, earlier: int) -> SpotPair | None:
        thread = survey.threads[later]
        if thread is None or thread.earlier != earlier:
            return None
        step = next((step for step in thread.steps if step.change == change), None)
        if step is None:
            return None
        places = []
        for request, first in ((later, step.new.start), (earlier, step.old.start)):
            messages = survey.log.requests[request].messages
            at = min(leading(messages) + first, len(messages) - 1)
            places.append(whole_message(survey, at, messages[at]))
        if change == "rewritten":
            return _narrowed(survey, later, earlier, places[0], places[1])
        return places[0], places[1]

    return spot


def _narrowed(survey: Survey, later: int, earlier: int, one: Spot, other: Spot) -> SpotPair:
    """The first character that differs."""
    texts = [
        survey.log.text(survey.log.requests[request].messages[spot.message or 0])
        for request, spot in ((later, one), (earlier, other))
    ]
    common = next((i for i, (a, b) in enumerate(zip(*texts, strict=False)) if a != b), min(map(len, texts)))
    return tuple(Spot(spot.message, common, len(text) - common) for spot, text in zip((one, other), texts, strict=True))  # type: ignore[return-value]


TRUNCATED = HistoryCheck(
    "history-truncated",
    "The history loses its front from turn to turn",
    "Every turn that drops a message computes all that follows anew. Let the history grow and drop a large part at"
    " once, seldom: half of it when the window is full.",
    "truncated",
    _spot_of("truncated"),
)

REWRITTEN = HistoryCheck(
    "history-rewritten",
    "Messages that were sent are changed in later turns",
    "Send the history as it was sent before: append, never edit. What is stripped, shortened or summarised later costs"
    " all that stands behind it.",
    "rewritten",
    _spot_of("rewritten"),
)
