"""Repairs of tools and JSON: order, definitions that change, tools that come late, and keys in changing order."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from warmprefix_tools.doctor.request_log import TOOLS, LogMessage, LogVersion, Memo, Prompt
from warmprefix_tools.doctor.survey import LogSurvey

__all__ = ["keep_definitions", "sort_keys", "sort_tools", "tool_name", "unite_tools", "with_sorted_keys"]

_LEAST_SIMILARITY = 0.6
"""Share of words that two definitions of one tool have in common; others belong to different applications."""
_OPENING = re.compile(r"(?:^|[\n:>=(] ?|```(?:json)?\n)[ \t]*(?=\{\s*\"|\[\s*\{)")
_DECODER = json.JSONDecoder()


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


def sort_tools(survey: LogSurvey, message: LogMessage) -> LogMessage:
    """Return the message of tools with its tools sorted by name; any other message as it is."""
    if message.role != TOOLS:
        return message
    tools = sorted(survey.tools_of(message), key=lambda tool: f"{tool_name(tool)}\n{json.dumps(_sorted(tool))}")
    return survey.log.tools(list(map(json.dumps, tools)))


def keep_definitions(survey: LogSurvey, version: LogVersion) -> None:
    """Give each tool the definition that it had first, in its conversation or in one with a similar definition."""
    first: dict[tuple[int, str], Any] = {}
    of_name: defaultdict[str, list[Any]] = defaultdict(list)
    words = Memo[str, frozenset[str]](lambda text: frozenset(re.findall(r"\w+", text)))

    def are_similar(one: Any, other: Any) -> bool:
        some, others = words[json.dumps(one)], words[json.dumps(other)]
        return len(some & others) >= _LEAST_SIMILARITY * max(len(some), len(others), 1)

    for index, prompt in enumerate(version.prompts):
        tools = _tools(survey, prompt)
        kept = []
        for tool in tools:
            key = (survey.roots[index], tool_name(tool))
            if key not in first:
                alike = [each for each in of_name[key[1]] if are_similar(each, tool)]
                of_name[key[1]] += [] if alike else [tool]
                first[key] = alike[0] if alike else tool
            kept.append(tool if tool == first[key] else first[key])  # equal ones may differ in the order of keys
        if kept != tools:
            version.prompts[index] = (survey.log.tools(list(map(json.dumps, kept))), *prompt[1:])


def unite_tools(survey: LogSurvey, version: LogVersion) -> None:
    """Give each request all tools that its conversation ever has, in the order in which they came up."""
    named = [{tool_name(tool): tool for tool in _tools(survey, prompt)} for prompt in version.prompts]
    united: defaultdict[int, dict[str, Any]] = defaultdict(dict)
    for root, own in zip(survey.roots, named, strict=True):
        for name, tool in own.items():
            united[root].setdefault(name, tool)
    changing = {root for root, own in zip(survey.roots, named, strict=True) if own.keys() != united[root].keys()}
    for index, (root, own) in enumerate(zip(survey.roots, named, strict=True)):
        if root in changing:
            tools = [json.dumps(own.get(name, tool)) for name, tool in united[root].items()]
            prompt = version.prompts[index]
            version.prompts[index] = (survey.log.tools(tools), *(prompt[1:] if own else prompt))


def _tools(survey: LogSurvey, prompt: Prompt) -> list[Any]:
    return survey.tools_of(prompt[0]) if prompt and prompt[0].role == TOOLS else []


# -- keys of objects ---------------------------------------------------------------------------------------------------


def sort_keys(survey: LogSurvey, message: LogMessage) -> LogMessage:
    """Return the message with the keys of all JSON objects in it sorted."""
    if message.role == TOOLS:
        return survey.log.tools([json.dumps(_sorted(tool)) for tool in survey.tools_of(message)])
    text = survey.log.text(message)
    repaired = with_sorted_keys(text)
    return message if repaired == text else survey.log.message(message.role, repaired)


def with_sorted_keys(text: str) -> str:
    """Return the text with the keys of all JSON objects in it sorted, where they are not.

    >>> with_sorted_keys('Result: {"b": 1, "a": {"d": 2, "c": 3}}')
    'Result: {"a": {"c": 3, "d": 2}, "b": 1}'
    """
    pieces, done = [], 0
    for start, end, value in _values(text):
        ordered = _sorted(value)
        if json.dumps(value) != json.dumps(ordered):
            pieces += [text[done:start], _dumped(ordered, text[start:end])]
            done = end
    return "".join([*pieces, text[done:]])


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


def _sorted(value: Any) -> Any:
    """Return a value with sorted keys, also within texts that are JSON, such as the arguments of a tool call."""
    if isinstance(value, dict):
        return {key: _sorted(value[key]) for key in sorted(value)}
    if isinstance(value, list):
        return [_sorted(each) for each in value]
    if isinstance(value, str) and value.startswith('{"'):
        try:
            inner = json.loads(value)
        except (ValueError, RecursionError):
            return value
        ordered = json.dumps(_sorted(inner))
        return value if ordered == json.dumps(inner) else ordered
    return value


def _dumped(value: Any, like: str) -> str:
    """Return the value as JSON in the format of `like`."""
    ascii_only = like.isascii()
    if "\n" in like:
        second = like.split("\n", 2)[1]
        return json.dumps(value, indent=len(second) - len(second.lstrip()) or 2, ensure_ascii=ascii_only)
    separators = (", ", ": ") if '": ' in like else (",", ":")
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only)
