"""Defects of tools and JSON: tools, and keys of objects, in changing order."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from warmprefix_tools.doctor.request_log import TOOLS, LogMessage, LogVersion, Memo, common_length
from warmprefix_tools.doctor.survey import LogSurvey, Spot, SpotPair

__all__ = [
    "JSON_KEYS",
    "TOOL_ORDER",
    "MessageRepair",
    "key_spot",
    "tool_name",
    "tool_spot",
    "tools_of",
    "with_sorted_keys",
]

_OPENING = re.compile(r"(?:^|[\n:>=(] ?|```(?:json)?\n)[ \t]*(?=\{\s*\"|\[\s*\{)")
_DECODER = json.JSONDecoder()


@dataclass(frozen=True, slots=True)
class MessageRepair:
    """A repair of each message on its own."""

    kind: str
    fix: Callable[[LogSurvey, LogMessage], LogMessage]
    """Returns the message itself if it has no defect."""

    def applies(self, survey: LogSurvey) -> bool:
        """Return whether any message of the log has the defect."""
        fixed = self._memo(survey)
        return any(fixed[message] is not message for message in survey.uses)

    def repair(self, survey: LogSurvey, version: LogVersion) -> None:
        """Repair all messages of a version in place."""
        fixed = self._memo(survey)
        version.prompts = [tuple([fixed[message] for message in prompt]) for prompt in version.prompts]

    def _memo(self, survey: LogSurvey) -> Any:
        return survey.memos.setdefault(self.kind, Memo(partial(self.fix, survey)))


def tools_of(survey: LogSurvey, message: LogMessage) -> list[Any]:
    """Return the tools that a message was made of."""
    tools: list[Any] = json.loads(survey.log.text(message))
    return tools


def tool_name(tool: Any) -> str:
    """Return the tool's name for the model, or what identifies a tool of the API's own.

    >>> tool_name({"type": "function", "function": {"name": "read"}}), tool_name({"toolSpec": {"name": "read"}})
    ('read', 'read')
    >>> tool_name({"type": "web_search"}), tool_name({"type": "mcp", "server_label": "crm"}), tool_name({"search": {}})
    ('web_search', 'mcp crm', 'search')
    """
    if not isinstance(tool, dict):
        return str(tool)
    inner = next((tool[key] for key in ("function", "toolSpec") if isinstance(tool.get(key), dict)), tool)
    if isinstance(inner.get("name"), str):
        return str(inner["name"])
    parts = [str(tool[key]) for key in ("type", "server_label") if key in tool]
    return " ".join(parts or map(str, tool))


def _sort_tools(survey: LogSurvey, message: LogMessage) -> LogMessage:
    if message.role != TOOLS:
        return message
    tools = sorted(tools_of(survey, message), key=lambda tool: f"{tool_name(tool)}\n{_sorted_json(tool)}")
    return survey.log.tools(list(map(json.dumps, tools)))


def _sorted_json(value: Any) -> str:
    return json.dumps(value, sort_keys=True)


def tool_spot(survey: LogSurvey, later: int, earlier: int) -> SpotPair | None:
    """Return the first tool that differs between two requests by name."""
    one, other = (survey.tools_message(request) for request in (later, earlier))
    if one is None or other is None:
        return None
    names, others = ([tool_name(tool) for tool in tools_of(survey, message)] for message in (one, other))
    at = common_length(names, others)
    if at == min(len(names), len(others)):
        return None
    path = f"tools[{at}].function.name"
    return Spot(path=path, text=_around(names, at)), Spot(path=path, text=_around(others, at))


def _around(names: list[str], at: int) -> str:
    return ", ".join(names[max(at - 2, 0) : at + 6])


def with_sorted_keys(text: str) -> str:
    """Return the text with the keys of all JSON objects in it sorted, where they are not.

    >>> with_sorted_keys('Result: {"b": 1, "a": {"d": 2, "c": 3}}')
    'Result: {"a": {"c": 3, "d": 2}, "b": 1}'
    """
    pieces, done = [], 0
    for start, end, value in _values(text):
        raw = text[start:end]
        if not _is_sorted(value):
            pieces += [text[done:start], _dumped(_sorted(value), raw)]
            done = end
    return "".join([*pieces, text[done:]]) if pieces else text


def _values(text: str) -> Iterator[tuple[int, int, Any]]:
    """Yield start, end and value of each JSON object or array in a text."""
    done = 0
    for opening in _OPENING.finditer(text):
        if opening.end() < done:
            continue
        try:
            value, done = _DECODER.raw_decode(text, opening.end())
        except (ValueError, RecursionError):
            continue
        yield opening.end(), done, value


def _is_sorted(value: Any) -> bool:
    if isinstance(value, dict):
        keys = list(value)
        return keys == sorted(keys) and all(map(_is_sorted, value.values()))
    if isinstance(value, list):
        return all(map(_is_sorted, value))
    inner = _inner(value)
    return inner is None or _is_sorted(inner)


def _sorted(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(each) for each in value]
    inner = _inner(value)
    return value if inner is None else json.dumps(_sorted(inner))


def _inner(value: Any) -> Any:
    """Return the object that a string holds as JSON, such as the arguments of a tool call."""
    if isinstance(value, str) and value.startswith('{"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return None


def _dumped(value: Any, like: str) -> str:
    """Return the value as JSON in the format of `like`."""
    ascii_only = like.isascii()
    if "\n" in like:
        second = like.split("\n", 2)[1]
        return json.dumps(value, indent=len(second) - len(second.lstrip()) or 2, ensure_ascii=ascii_only)
    separators = (", ", ": ") if '": ' in like else (",", ":")
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only)


def _sort_keys(survey: LogSurvey, message: LogMessage) -> LogMessage:
    if message.role == TOOLS:
        return survey.log.tools([json.dumps(_sorted(tool)) for tool in tools_of(survey, message)])
    if not survey.has_json(message):
        return message
    text = survey.log.text(message)
    repaired = with_sorted_keys(text)
    return message if repaired == text else survey.log.message(message.role, repaired)


def key_spot(survey: LogSurvey, later: int, earlier: int) -> SpotPair | None:
    """Return the first JSON object whose keys stand in another order in two requests."""
    one, other = (survey.tools_message(request) for request in (later, earlier))
    if one is not None and other is not None:
        old = {tool_name(tool): tool for tool in tools_of(survey, other)}
        for at, tool in enumerate(tools_of(survey, one)):
            found = _first_difference(tool, old.get(tool_name(tool)))
            if found is not None:
                path, keys, old_keys = found
                path = f"tools[{at}]{path}"
                return Spot(path=path, text=", ".join(keys)), Spot(path=path, text=", ".join(old_keys))
    return _message_key_spot(survey, later, earlier)


def _first_difference(value: Any, other: Any) -> tuple[str, list[str], list[str]] | None:
    """Return the path where two equal values differ in the order of keys, and both orders."""
    parts: list[tuple[str, Any, Any]] = []
    if isinstance(value, dict) and isinstance(other, dict) and set(value) == set(other):
        if list(value) != list(other):
            return "", list(value), list(other)
        parts = [(f".{key}", value[key], other[key]) for key in value]
    elif isinstance(value, list) and isinstance(other, list):
        parts = [(f"[{at}]", each, old) for at, (each, old) in enumerate(zip(value, other, strict=False))]
    for path, each, old in parts:
        found = _first_difference(each, old)
        if found is not None:
            return path + found[0], found[1], found[2]
    return None


def _message_key_spot(survey: LogSurvey, later: int, earlier: int) -> SpotPair | None:
    old: dict[str, tuple[int, int, str]] = {}
    for at, start, raw, key in _message_values(survey, earlier):
        old.setdefault(key, (at, start, raw))
    for at, start, raw, key in _message_values(survey, later):
        old_at, old_start, old_raw = old.get(key, (at, start, raw))
        if raw != old_raw:
            common = common_length(raw, old_raw) % min(len(raw), len(old_raw))  # 0 if one is the start of the other
            return Spot(at, start + common, 1), Spot(old_at, old_start + common, 1)
    return None


def _message_values(survey: LogSurvey, request: int) -> Iterator[tuple[int, int, str, str]]:
    """Yield message index, start and text of each JSON value in a request's messages, and a key for its contents."""
    for at, message in enumerate(survey.log.requests[request].messages):
        if message.role != TOOLS and survey.has_json(message):
            text = survey.log.text(message)
            for start, end, value in _values(text):
                yield at, start, text[start:end], json.dumps(_sorted(value))


TOOL_ORDER = MessageRepair("tool-order", _sort_tools)
JSON_KEYS = MessageRepair("json-key-order", _sort_keys)
