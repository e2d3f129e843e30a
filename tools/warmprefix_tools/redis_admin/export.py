"""The same for other programs. docs/operations.md is its contract."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from warmprefix import __version__
from warmprefix.stores import Conversation
from warmprefix_tools.redis_admin.conversation import Record
from warmprefix_tools.redis_admin.survey import Survey

__all__ = ["record_as_json", "survey_as_json"]


def record_as_json(conversation: Conversation, record: Record | None) -> dict[str, Any]:
    """A conversation's record, or that there is none."""
    named = {"warmprefix": __version__, "conversation": conversation.id, "tenant": conversation.tenant}
    if record is None:
        return {**named, "known": False}
    fields = asdict(record)
    fields["blocks"] = [
        {"fingerprint": block.fingerprint.hex(), "label": block.label, "turn": block.turn, "tokens": block.tokens}
        for block in record.blocks
    ]
    return {**named, "known": record.readable, **fields}


def survey_as_json(survey: Survey) -> dict[str, Any]:
    """A survey whole, with the warnings that follow from it."""
    fields = asdict(survey)
    for told, server in zip(fields["servers"], survey.servers, strict=True):
        told["warnings"] = list(server.warnings)
    return {"warmprefix": __version__, **fields}
