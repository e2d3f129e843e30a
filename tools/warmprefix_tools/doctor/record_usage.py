"""The usage in records: of an answer in one piece, of the events of a stream, or in a field of its own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from warmprefix_openai import StreamedAnswer
from warmprefix_requests.usage import reported_usage

__all__ = ["record_usage"]

_ANSWERS = ("response", "chunks", "output", "completion", "events", "original_response")


def record_usage(record: Mapping[str, object], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the usage that a record reports next to its request, added to what was found before."""
    usage = dict(before)
    for name in _ANSWERS:
        usage = _answer_usage(record.get(name), usage)
    return reported_usage(record, usage)


def _answer_usage(answer: object, usage: dict[str, Any]) -> dict[str, Any]:
    """Add the usage of an answer, which may be text, or the list of its events."""
    if isinstance(answer, str):
        answer = _parsed(answer)
    for one in answer if isinstance(answer, list) else [answer]:
        event = _parsed(one.removeprefix("data:")) if isinstance(one, str) else one
        usage = reported_usage(event, usage)
    return usage


def _parsed(text: str) -> object:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        reader = StreamedAnswer(hide_usage=False)
        reader.feed(text.encode("utf-8", "replace"))
        reader.finish()
        return {"usage": reader.facts.usage}
