"""All defects: whether a log may have each, where it shows, and what repairs it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import resources

from warmprefix_tools.doctor import order_checks, request_checks, tool_set_checks
from warmprefix_tools.doctor.cache import CacheOutcome, simulate
from warmprefix_tools.doctor.conversations import HistoryChange
from warmprefix_tools.doctor.request_log import LogMessage, LogVersion, Memo
from warmprefix_tools.doctor.survey import LogSurvey, SpotPair, word_spot
from warmprefix_tools.doctor.text_checks import TEXT_KINDS
from warmprefix_tools.doctor.tool_checks import JSON_KEYS, TOOL_ORDER, key_spot, tool_spot

__all__ = ["ADVICE", "CHECKS", "SALT_SHARED", "SHORT_PROMPT", "UNUSED_TOOLS", "Kinds", "Repairs"]

Kinds = frozenset[str]

SALT_SHARED = "salt-shared"
"""The one defect that costs no tokens, so there is no repair of it."""
SHORT_PROMPT = "short-prompt"
UNUSED_TOOLS = "tools-unused"
"""A hint: these tokens are cached like others."""


@dataclass(frozen=True, slots=True)
class Check:
    """A defect, by its kind in `CHECKS`."""

    applies: Callable[[LogSurvey], bool]
    """Whether a log may have it."""
    spot: Callable[[LogSurvey, int, int], SpotPair | None]
    """Where it shows in a later and an earlier request; None if it does not."""


def _text(kind: str) -> Check:
    return Check(lambda survey: kind in _needed_texts(survey), partial(word_spot, kind=kind))


def _needed_texts(survey: LogSurvey) -> Kinds:
    memo = survey.memos.setdefault(
        "texts", Memo[None, Kinds](lambda _: survey.rewriter.needed(kind for kind in CHECKS if kind in TEXT_KINDS))
    )
    needed: Kinds = memo[None]
    return needed


def _slots(*, personal: bool) -> Check:
    return Check(partial(order_checks.has_slots, personal=personal), partial(order_checks.slot_spot, personal=personal))


def _lists(*, memories: bool) -> Check:
    return Check(partial(order_checks.has_lists, memories=memories), partial(order_checks.list_spot, memories=memories))


def _history(change: HistoryChange) -> Check:
    return Check(
        partial(request_checks.history_changes, change=change), partial(request_checks.history_spot, change=change)
    )


CHECKS: dict[str, Check] = {
    "variable-prefix": _slots(personal=False),
    "user-text": _slots(personal=True),
    "passage-order": _lists(memories=False),
    "memory-reranked": _lists(memories=True),
    "history-rewritten": _history("rewritten"),
    "history-truncated": _history("truncated"),
    "tools-late": Check(tool_set_checks.has_late, tool_set_checks.late_spot),
    "tools-changed": Check(tool_set_checks.has_changed, tool_set_checks.changed_spot),
    **{kind: _text(kind) for kind in ("passage-scores", "position-number", "random-id")},
    **{kind: _text(kind) for kind in ("timestamp", "attribution-header", "unicode", "whitespace")},
    "json-key-order": Check(JSON_KEYS.applies, key_spot),
    "tool-order": Check(TOOL_ORDER.applies, tool_spot),
    "salt-split": Check(lambda survey: any(request.salt for request in survey.log.requests), request_checks.salt_spot),
    SHORT_PROMPT: Check(lambda survey: bool(survey.short_requests), request_checks.short_spot),
}
"""The vaguest first: where two repairs do the same, the vaguer one is left out."""

_ADVICE_FILE = resources.files("warmprefix_tools.doctor") / "advice.json"
ADVICE: dict[str, tuple[str, str]] = {
    kind: (texts["title"], texts["fix"]) for kind, texts in json.loads(_ADVICE_FILE.read_text("utf-8")).items()
}
"""Title and fix of each kind of defect."""


def _rewrite_texts(survey: LogSurvey, version: LogVersion) -> None:
    kinds = version.kinds & TEXT_KINDS
    rewritten = Memo[LogMessage, LogMessage](lambda message: survey.rewritten(message, kinds))
    version.prompts = [tuple([rewritten[message] for message in prompt]) for prompt in version.prompts]


_REPAIRS: tuple[tuple[Kinds, Callable[[LogSurvey, LogVersion], None]], ...] = (
    (frozenset({"history-truncated", "history-rewritten"}), request_checks.restore_histories),
    (frozenset({"tools-changed"}), tool_set_checks.keep_definitions),
    (frozenset({"tools-late"}), tool_set_checks.unite_tools),
    (frozenset({"tool-order"}), TOOL_ORDER.repair),
    (frozenset({"json-key-order"}), JSON_KEYS.repair),
    (TEXT_KINDS, _rewrite_texts),
    (frozenset({"memory-reranked"}), order_checks.order_memories),
    (frozenset({"passage-order"}), order_checks.order_passages),
    (frozenset({"user-text"}), partial(order_checks.move_slots, personal=True)),
    (frozenset({"variable-prefix"}), partial(order_checks.move_slots, personal=False)),
    (frozenset({"salt-split"}), request_checks.unite_salts),
    (frozenset({SHORT_PROMPT}), request_checks.count_short_prompts_by_token),
)
"""In the order in which a log is repaired, in place: histories, then texts, then the order of their parts."""


class Repairs:
    """Versions of the log with any set of defects repaired, and the hits of each."""

    def __init__(self, survey: LogSurvey, block_size: int, capacity_tokens: int | None) -> None:
        self._survey = survey
        self.outcomes = Memo[Kinds, CacheOutcome](
            lambda kinds: simulate(self._repaired(kinds), survey.pool, block_size, capacity_tokens)
        )
        """Hits with these defects repaired."""
        self._last = (Kinds(), survey.log.as_sent())

    def gain(self, kinds: Kinds) -> int:
        """Return the tokens that are saved without these defects."""
        return sum(self.outcomes[kinds].gains(self.outcomes[Kinds()]))

    def version(self, kinds: Kinds) -> LogVersion:
        """Return the log with these defects repaired; kept for the last set only, because a version is large."""
        if self._last[0] != kinds:
            self._last = (kinds, self._repaired(kinds))
        return self._last[1]

    def _repaired(self, kinds: Kinds) -> LogVersion:
        version = self._survey.log.as_sent()
        version.kinds = kinds
        for repaired, repair in _REPAIRS:
            if repaired & kinds:
                repair(self._survey, version)
        return version
