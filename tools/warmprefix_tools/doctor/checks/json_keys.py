"""JSON whose keys come in another order: in the tools, and where it is written into messages."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from warmprefix_tools.doctor.checks.base import MessageCheck, Spot, SpotPair
from warmprefix_tools.doctor.checks.tool_order import tool_name, tools_of
from warmprefix_tools.doctor.prompts import TOOLS, Message

if TYPE_CHECKING:
    from warmprefix_tools.doctor.survey import Survey

__all__ = ["CHECK", "with_sorted_keys"]

_OPENING = re.compile(r"(?:^|[\n:>=(] ?|```(?:json)?\n)[ \t]*(?=\{\s*\"|\[\s*\{)")
_DECODER = json.JSONDecoder()


def with_sorted_keys(text: str) -> str:
    """The text with the keys of all JSON objects in it sorted, where they are not.

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
    """The object that a string holds as JSON: the arguments of a tool call."""
    if isinstance(value, str) and value.startswith('{"'):
        try:
            return json.loads(value)
        except (ValueError, RecursionError):
            return None
    return None


def _dumped(value: Any, like: str) -> str:
    ascii_only = like.isascii()
    if "\n" in like:
        second = like.split("\n", 2)[1]
        return json.dumps(value, indent=len(second) - len(second.lstrip()) or 2, ensure_ascii=ascii_only)
    separators = (", ", ": ") if '": ' in like else (",", ":")
    return json.dumps(value, separators=separators, ensure_ascii=ascii_only)


def _mend(survey: Survey, message: Message) -> Message:
    if message.role == TOOLS:
        return survey.log.tools([json.dumps(_sorted(tool)) for tool in tools_of(survey, message)])
    if not survey.has_json(message):
        return message
    text = survey.log.text(message)
    mended = with_sorted_keys(text)
    return message if mended == text else survey.log.message(message.role, mended)


def _spot(survey: Survey, later: int, earlier: int) -> SpotPair | None:
    one, other = (survey.tools_message(request) for request in (later, earlier))
    if one is not None and other is not None:
        old = {tool_name(tool): tool for tool in tools_of(survey, other)}
        for at, tool in enumerate(tools_of(survey, one)):
            path = _first_difference(tool, old.get(tool_name(tool)))
            if path is not None:
                where, keys, old_keys = path
                full = f"tools[{at}]{where}"
                return Spot(path=full, text=", ".join(keys)), Spot(path=full, text=", ".join(old_keys))
    return _spot_in_messages(survey, later, earlier)


def _first_difference(value: Any, other: Any) -> tuple[str, list[str], list[str]] | None:
    """Where two equal values differ in the order of keys; the path, and both orders."""
    if isinstance(value, dict) and isinstance(other, dict) and set(value) == set(other):
        if list(value) != list(other):
            return "", list(value), list(other)
        for key in value:
            found = _first_difference(value[key], other[key])
            if found is not None:
                return f".{key}{found[0]}", found[1], found[2]
    elif isinstance(value, list) and isinstance(other, list):
        for at, (each, old) in enumerate(zip(value, other, strict=False)):
            found = _first_difference(each, old)
            if found is not None:
                return f"[{at}]{found[0]}", found[1], found[2]
    return None


def _spot_in_messages(survey: Survey, later: int, earlier: int) -> SpotPair | None:
    old: dict[str, tuple[int, int, int]] = {}
    for at, message in enumerate(survey.log.requests[earlier].messages):
        if message.role != TOOLS and survey.has_json(message):
            for start, end, value in _values(survey.log.text(message)):
                old.setdefault(json.dumps(_sorted(value)), (at, start, end))
    for at, message in enumerate(survey.log.requests[later].messages):
        if message.role == TOOLS or not survey.has_json(message):
            continue
        text = survey.log.text(message)
        for start, end, value in _values(text):
            match = old.get(json.dumps(_sorted(value)))
            if match is None:
                continue
            raw = text[start:end]
            other = survey.log.text(survey.log.requests[earlier].messages[match[0]])[match[1] : match[2]]
            if raw != other:
                common = next((i for i, (a, b) in enumerate(zip(raw, other, strict=False)) if a != b), 0)
                return Spot(at, start + common, 1), Spot(match[0], match[1] + common, 1)
    return None


CHECK = MessageCheck(
    "json-key-order",
    "The same JSON comes with its keys in another order",
    "Write JSON with json.dumps(value, sort_keys=True), in tools, schemas and tool results alike.",
    _mend,
    _spot,
)
