"""Prompts that are too short for the cache."""

from __future__ import annotations

from typing import TYPE_CHECKING

from warmprefix_tools.doctor.checks.base import DraftCheck, Spot, SpotPair
from warmprefix_tools.doctor.prompts import Draft

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["CHECK"]


def _mend(survey: Survey, draft: Draft) -> Draft:
    draft.token_granular = survey.short_requests
    return draft


def _spot(survey: Survey, later: int, earlier: int) -> SpotPair | None:
    if later not in survey.short_requests:
        return None
    one, other = (Spot(len(survey.log.requests[request].messages) - 1, 0, 0) for request in (later, earlier))
    return one, other


CHECK = DraftCheck(
    "short-prompt",
    "Prompts are no longer than one KV block, the least that can be shared",
    "Nothing of them is ever found in the cache. Ask several such questions in one prompt, or run the engine with"
    " smaller KV blocks if most of your prompts are like that.",
    _mend,
    _spot,
)
