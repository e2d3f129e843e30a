"""Versions of the log in which some defects are mended, and what a cache makes of each."""

from __future__ import annotations

from warmprefix_tools.doctor.cache import Outcome, simulate
from warmprefix_tools.doctor.checks import DRAFT_CHECKS, HISTORY_CHECKS, MESSAGE_CHECKS
from warmprefix_tools.doctor.checks.base import MessageCheck
from warmprefix_tools.doctor.checks.history import keep_histories
from warmprefix_tools.doctor.conversations import Change
from warmprefix_tools.doctor.prompts import Draft, Message
from warmprefix_tools.doctor.survey import Survey

__all__ = ["Kinds", "Mender"]

Kinds = frozenset[str]


class Mender:
    """Mends any set of defects together, and remembers what each set brought."""

    def __init__(self, survey: Survey, block_size: int, capacity_tokens: int | None) -> None:
        self._survey = survey
        self._block_size = block_size
        self._capacity = capacity_tokens
        self._models = [request.model for request in survey.log.requests]
        self._outcomes: dict[Kinds, Outcome] = {}
        self.as_it_stands = survey.log.as_it_stands()
        self._last: tuple[Kinds, Draft] = (frozenset(), self.as_it_stands)

    def outcome(self, kinds: Kinds) -> Outcome:
        """What the cache finds with these defects mended."""
        outcome = self._outcomes.get(kinds)
        if outcome is None:
            draft = self.draft(kinds)
            outcome = simulate(draft, self._models, self._survey.pool, self._block_size, self._capacity)
            self._outcomes[kinds] = outcome
        return outcome

    def gain(self, kinds: Kinds) -> int:
        """Return the tokens that are saved without these defects."""
        return sum(self.outcome(kinds).gains(self.outcome(frozenset())))

    def mended(self, kinds: Kinds) -> Draft:
        """`draft`, remembered for the set that was asked for last."""
        if self._last[0] != kinds:
            self._last = (kinds, self.draft(kinds))
        return self._last[1]

    def draft(self, kinds: Kinds) -> Draft:
        """The log with these defects mended: histories first, then texts, then the order of things."""
        survey = self._survey
        draft = survey.log.as_it_stands()
        draft.kinds = kinds
        changes = frozenset[Change](check.change for check in HISTORY_CHECKS if check.kind in kinds)
        if changes:
            keep_histories(survey, draft, changes)
        for check in MESSAGE_CHECKS:
            if check.kind in kinds:
                self._mend_messages(draft, check)
        self._mend_wording(draft, kinds & survey.wording.all_kinds)
        for each in DRAFT_CHECKS:
            if each.kind in kinds:
                draft = each.mend(survey, draft)
        return draft

    def _mend_messages(self, draft: Draft, check: MessageCheck) -> None:
        survey, known, mend = self._survey, self._survey.mended(check), check.mend

        def mended(message: Message) -> Message:
            made = known.get(message)
            if made is None:
                made = known[message] = mend(survey, message)
            return made

        draft.prompts = [tuple(map(mended, prompt)) for prompt in draft.prompts]

    def _mend_wording(self, draft: Draft, kinds: Kinds) -> None:
        if not kinds:
            return
        wording, done = self._survey.wording, self._survey.all_mended(kinds)

        def mended(message: Message) -> Message:
            made = done.get(message)
            if made is None:
                made = done[message] = message.made_into(wording.mended(message.ids, kinds))
            return made

        draft.prompts = [tuple(map(mended, prompt)) for prompt in draft.prompts]
