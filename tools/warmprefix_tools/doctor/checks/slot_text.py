"""Text of the user or of the request in front of what requests share."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import TYPE_CHECKING

from warmprefix_tools.doctor.checks.base import DraftCheck, Spot, SpotPair
from warmprefix_tools.doctor.prompts import Draft, Message
from warmprefix_tools.doctor.segments import EMPTY, Ids

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["USER_TEXT", "VARIABLE"]


def _move(personal: bool) -> Callable[[Survey, Draft], Draft]:
    """Put what stands in the slots at the end of the prompt, or of its message if it is personal and that will do."""

    def mend(survey: Survey, draft: Draft) -> Draft:
        for index, prompt in enumerate(draft.prompts):
            messages = list(prompt)
            moved: dict[int, list[Ids]] = {}
            for at, run in survey.slots.runs(prompt):
                if survey.slots.is_personal(run.slot) == personal:
                    goes_to = at if personal and run.near else len(prompt) - 1
                    moved.setdefault(goes_to, []).append(messages[at].ids[run.start : run.end])
                    ids = messages[at].ids[:]
                    ids[run.start : run.end] = array("I", [EMPTY] * (run.end - run.start))
                    messages[at] = messages[at].made_into(ids)
            for at, pieces in moved.items():
                message = messages[at]
                ids = message.ids[:]
                for piece in pieces:
                    ids += piece
                messages[at] = Message(message.role, ids, message.source)
            if moved:
                draft.prompts[index] = tuple(messages)
        return draft

    return mend


def _spot_of(personal: bool) -> Callable[[Survey, int, int], SpotPair | None]:
    def spot(survey: Survey, later: int, earlier: int) -> SpotPair | None:
        messages, old_messages = survey.log.requests[later].messages, survey.log.requests[earlier].messages
        old = {run.slot: (at, run) for at, run in survey.slots.runs(old_messages)}
        for at, run in sorted(survey.slots.runs(messages), key=lambda found: (found[0], found[1].start)):
            if survey.slots.is_personal(run.slot) != personal or run.slot not in old:
                continue
            old_at, old_run = old[run.slot]
            one, two = (
                Spot(place, *_extent(survey, requests[place].ids, each.start, each.end))
                for place, requests, each in ((at, messages, run), (old_at, old_messages, old_run))
            )
            texts = [
                survey.log.text(requests[place])[found.offset or 0 :][: found.length]
                for place, requests, found in ((at, messages, one), (old_at, old_messages, two))
            ]
            if texts[0] != texts[1]:
                return one, two
        return None

    return spot


def _extent(survey: Survey, ids: Ids, start: int, end: int) -> tuple[int, int]:
    before, text = survey.pool.text(ids[:start]), survey.pool.text(ids[start:end])
    return len(before) + len(text) - len(text.lstrip()), len(text.strip())


USER_TEXT = DraftCheck(
    "user-text",
    "The user's name or other text of theirs stands in front of text that all share",
    "Put what is the same for everybody first and what is about the user last: at the end of the system prompt if"
    " nothing shared follows, else in the last user message.",
    _move(True),
    _spot_of(True),
)

VARIABLE = DraftCheck(
    "variable-prefix",
    "Something that changes from request to request stands in front of text that requests share",
    "Move it behind the instructions and the context: the question, the state of the session and the like belong at the"
    " end of the prompt.",
    _move(False),
    _spot_of(False),
)
