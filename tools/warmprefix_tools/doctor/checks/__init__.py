"""Everything that the doctor looks for: a defect a file."""

from __future__ import annotations

from warmprefix_tools.doctor.checks import (
    history,
    item_order,
    json_keys,
    passage_scores,
    position_number,
    random_id,
    salts,
    short_prompt,
    slot_text,
    spelling,
    timestamp,
    tool_order,
    whitespace,
)
from warmprefix_tools.doctor.checks.base import Check, DraftCheck, HistoryCheck, MessageCheck, TextCheck

__all__ = [
    "ALL_KINDS",
    "DRAFT_CHECKS",
    "HISTORY_CHECKS",
    "MESSAGE_CHECKS",
    "SALT_SHARED",
    "SHORT_PROMPT",
    "TEXT_CHECKS",
    "VAGUEST_FIRST",
    "by_kind",
]

MESSAGE_CHECKS: tuple[MessageCheck, ...] = (tool_order.CHECK, json_keys.CHECK)

TEXT_CHECKS: tuple[TextCheck, ...] = (
    spelling.CHECK,
    whitespace.CHECK,
    position_number.CHECK,
    passage_scores.CHECK,
    timestamp.CHECK,
    random_id.CHECK,
)
"""In the order in which a text is mended."""

HISTORY_CHECKS: tuple[HistoryCheck, ...] = (history.TRUNCATED, history.REWRITTEN)
DRAFT_CHECKS: tuple[DraftCheck, ...] = (
    item_order.MEMORIES,
    item_order.PASSAGES,
    slot_text.USER_TEXT,
    slot_text.VARIABLE,
    salts.SPLIT,
    short_prompt.CHECK,
)
"""In the order in which a log is mended, once its texts are."""

SALT_SHARED = salts.SHARED
SHORT_PROMPT = short_prompt.CHECK.kind

VAGUEST_FIRST = (
    slot_text.VARIABLE.kind,
    slot_text.USER_TEXT.kind,
    item_order.PASSAGES.kind,
    item_order.MEMORIES.kind,
    history.REWRITTEN.kind,
    history.TRUNCATED.kind,
    passage_scores.CHECK.kind,
    position_number.CHECK.kind,
    random_id.CHECK.kind,
    timestamp.CHECK.kind,
    spelling.CHECK.kind,
    whitespace.CHECK.kind,
    json_keys.CHECK.kind,
    tool_order.CHECK.kind,
    salts.SPLIT.kind,
    short_prompt.CHECK.kind,
)
"""Where two mends do the same, the one that says less goes first."""

_CHECKS: tuple[Check, ...] = (*MESSAGE_CHECKS, *TEXT_CHECKS, *HISTORY_CHECKS, *DRAFT_CHECKS, SALT_SHARED)
ALL_KINDS = tuple(check.kind for check in _CHECKS)


def by_kind(kind: str) -> Check:
    """The check of that name."""
    return next(check for check in _CHECKS if check.kind == kind)
