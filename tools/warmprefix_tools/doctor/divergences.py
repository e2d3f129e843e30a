"""The place where two requests begin to differ."""

from __future__ import annotations

import json
from typing import Any

from warmprefix_tools.doctor.cache import shared_tokens
from warmprefix_tools.doctor.findings import Divergence, Place
from warmprefix_tools.doctor.request_log import (
    EMPTY,
    PLAIN,
    TOOLS,
    LogVersion,
    Prompt,
    RequestLog,
    common_length,
)
from warmprefix_tools.doctor.survey import LogSurvey
from warmprefix_tools.doctor.tool_repairs import tool_name

__all__ = ["divergence", "salt_divergence"]

_BEFORE, _WITHIN, _AFTER = 60, 100, 40
"""Characters of a snippet."""

_Spot = tuple[int, int]
"""Index of a message, and of a segment in it."""


def divergence(
    survey: LogSurvey, version: LogVersion, later: int, earlier: int, could_share: int | None = None
) -> Divergence:
    """Return where two requests begin to differ in a version of the log, as places in the log as it was sent.

    Args:
        survey: The log.
        version: A version with all defects repaired but the one to show.
        later: The later request.
        earlier: The earlier one.
        could_share: Tokens that they would share with all defects repaired; None for those that they share.
    """
    log = survey.log
    sent = log.as_sent()
    shared = shared_tokens(sent, log.pool, later, earlier)
    could_share = shared if could_share is None else could_share
    if version.salts[later] != version.salts[earlier]:
        return salt_divergence(log, later, earlier, shared, could_share)
    one, other = version.prompts[later], version.prompts[earlier]
    spot, other_spot = _first_difference(one, other)
    if TOOLS in (one[spot[0]].role, other[other_spot[0]].role):
        tools, others = (survey.tools_of(prompt[0]) if prompt[0].role == TOOLS else [] for prompt in (one, other))
        return Divergence(
            _tool_place(survey, earlier, others, tools), _tool_place(survey, later, tools, others), shared, could_share
        )
    text, (at, offset) = _sent_place(log, later, one, spot)
    other_text, (other_at, other_offset) = _sent_place(log, earlier, other, other_spot)
    start = common_length(text, other_text)
    tail = common_length(text[start:][::-1], other_text[start:][::-1])
    return Divergence(
        _text_place(log, earlier, other_at, other_offset + start, len(other_text) - tail - start),
        _text_place(log, later, at, offset + start, len(text) - tail - start),
        shared,
        could_share,
    )


def salt_divergence(
    log: RequestLog, later: int, earlier: int, shared: int, could_share: int | None = None
) -> Divergence:
    """Return the cache salts of two requests as the place where they differ."""

    def place(request: int) -> Place:
        entry = log.requests[request]
        salt = "no salt" if entry.salt is None else entry.salt
        text = f"{salt} ({entry.sender or 'tenant unknown'})"
        return Place(request + 1, entry.file, entry.line, path="cache_salt", snippet=_shortened(text))

    return Divergence(place(earlier), place(later), shared, shared if could_share is None else could_share)


def _first_difference(one: Prompt, other: Prompt) -> tuple[_Spot, _Spot]:
    """Return the first segments with text that differ; of a prompt that ends there, the end."""
    found = []
    for prompt in (one, other):
        segments = [
            ((at, message.role, number), (at, index))
            for at, message in enumerate(prompt)
            for index, number in enumerate(message.ids)
            if number != EMPTY
        ]
        found.append([*segments, ((-1, "", EMPTY), (len(prompt) - 1, len(prompt[-1].ids)))])
    first = common_length(*([key for key, _ in segments] for segments in found))
    spot, other_spot = (segments[min(first, len(segments) - 1)][1] for segments in found)
    return spot, other_spot


def _sent_place(log: RequestLog, request: int, prompt: Prompt, spot: _Spot) -> tuple[str, _Spot]:
    """Return the text of a segment as it was sent, and its message and first character there."""
    at, index = spot
    messages = log.requests[request].messages
    message = prompt[at]
    if message.places is not None and index < len(message.places):
        index = message.places[index]
    same = (place for place, sent in enumerate(messages) if sent is message.source)
    at = min(same, key=lambda place: abs(place - at), default=min(at, len(messages) - 1))
    ids = messages[at].ids
    return log.pool.text(ids[index : index + 1]), (at, len(log.pool.text(ids[:index])))


def _text_place(log: RequestLog, request: int, at: int, offset: int, length: int) -> Place:
    entry = log.requests[request]
    message = entry.messages[at]
    text = log.text(message)
    start, within = max(offset - _BEFORE, 0), min(max(length, 0), _WITHIN)
    end = min(offset + within + _AFTER, len(text))
    front, back = "…" if start else "", "…" if end < len(text) else ""
    mark = len(front) + offset - start
    in_messages = message.role != PLAIN and at >= entry.front
    return Place(
        request + 1,
        entry.file,
        entry.line,
        message=at - entry.front if in_messages else None,
        role=message.role if in_messages else None,
        path=None if in_messages or message.role == PLAIN else message.role,
        offset=offset,
        snippet=f"{front}{text[start:end]}{back}",
        mark=(mark, mark + within),
    )


def _tool_place(survey: LogSurvey, request: int, tools: list[Any], others: list[Any]) -> Place:
    """Return the first tool that another list of tools does not have in the same place."""
    entry = survey.log.requests[request]
    at = common_length(list(map(json.dumps, tools)), list(map(json.dumps, others)))
    path, text = "tools", f"{len(tools)} tools"
    if at < len(tools):
        text, other = json.dumps(tools[at]), json.dumps(others[at] if at < len(others) else None)
        text = text[max(common_length(text, other) - _BEFORE, 0) :]
        sent = survey.tools_of(entry.messages[0]) if entry.messages[0].role == TOOLS else []
        names = list(map(tool_name, sent))
        name = tool_name(tools[at])
        path = f"tools[{names.index(name) if name in names else at}] ({name})"
    return Place(request + 1, entry.file, entry.line, path=path, snippet=_shortened(text))


def _shortened(text: str) -> str:
    most = _BEFORE + _WITHIN + _AFTER
    return text if len(text) <= most else f"{text[:most]}…"
