"""Request bodies of hosted APIs: their parts, the marks that they have, and copies of them with more marks. No I/O.

A part is what a mark can stand on: a tool, a text of the system prompt, or a content part of a message. Bodies are
never changed in place, and a mark is the only thing that their copies have in addition. A body whose shape is not
understood has no parts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from warmprefix.cache_profiles import MarkPlace, MarkRules
from warmprefix_requests.marks.mark_planner import MarkedPart, PartKind

__all__ = ["ApiShape", "BodyParts", "read_parts", "with_marks", "without_marks"]

ApiShape = Literal["messages", "chat", "responses", "converse"]
"""The shape of a body: Anthropic's Messages, OpenAI's Chat Completions and Responses, Bedrock's Converse."""

_Path = tuple[str | int, ...]
_FIELDS = {"cache_control", "prompt_cache_breakpoint"}
_CACHE_POINT = "cachePoint"
_SECONDS = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0}
_NAMES = {seconds: name for name, seconds in _SECONDS.items()}
_THINKING = ("thinking", "redacted_thinking", "reasoningContent", "reasoning")
_SYSTEM_ROLES = ("system", "developer")


class _UnknownShapeError(Exception):
    """The body is not of the expected shape."""


class _BodyPart(NamedTuple):
    """One part, and where it stands in the body."""

    path: _Path
    role: str
    message: int
    value: Any
    """The part: a mapping, or the text that stands for a single text part."""
    mark: Any = None
    """The application's mark."""


class BodyParts(NamedTuple):
    """The parts of a body."""

    parts: list[MarkedPart]
    paths: list[_Path]
    """Where each part stands in the body."""


def read_parts(shape: ApiShape, body: Mapping[str, Any], rules: MarkRules) -> BodyParts | None:
    """Return the parts of a body, in the order in which the model reads them; None if the body is not understood.

    None also means that the application's own marks are such that none can be added. O(bytes).
    """
    try:
        places = list(_READERS[shape](body))
        asked = _asked_lifetimes(shape, body, places, rules)
    except (_UnknownShapeError, ValueError, TypeError, AttributeError, RecursionError):
        return None
    if not places:
        return None
    newest = max(place.message for place in places)
    parts: list[MarkedPart] = []
    depth = 0
    for number, place in enumerate(places):
        is_first = number == 0 or (places[number - 1].message, places[number - 1].role) != (place.message, place.role)
        depth = 0 if is_first else depth + 1
        is_last = number + 1 == len(places) or places[number + 1].message != place.message
        kind = _kind(place, is_last=is_last, is_newest=place.message == newest)
        content = f"{place.role}\0{place.message}\0{_written(place.value)}".encode(errors="surrogatepass")
        can_have_mark = _can_have_mark(shape, place, rules)
        parts.append(MarkedPart(content, kind, None, depth, can_have_mark, asked.get(number)))
    return BodyParts(parts, [place.path for place in places])


def with_marks(
    shape: ApiShape, body: Mapping[str, Any], found: BodyParts, lifetimes: Mapping[int, float], rules: MarkRules
) -> dict[str, Any]:
    """Return a copy of a body with marks.

    Args:
        shape: The shape of `body`.
        body: The body that `found` was read from.
        found: Its parts.
        lifetimes: Seconds for the prefix of each part to mark. The application's own marks stay as they are.
        rules: What the API allows.
    """
    marked: Any = body
    text_kind = "input_text" if shape == "responses" else "text"
    for number in sorted(lifetimes, reverse=True):  # from the back, because a cache point moves what follows it
        if found.parts[number].lifetime is None:
            mark = _mark(rules, lifetimes[number])
            marked = _marked(marked, found.paths[number], rules.field, mark, text_kind)
    copy = dict(marked)
    if rules.automatic and shape in ("chat", "responses") and not _has_cache_options(body):
        copy["prompt_cache_options"] = {"mode": "explicit"}
    return copy


def without_marks(value: Any) -> Any:
    """Return a copy of a part, or of a whole body, without marks."""
    if isinstance(value, Mapping):
        return {name: without_marks(inner) for name, inner in value.items() if name not in _FIELDS}
    if isinstance(value, list | tuple):
        return [without_marks(inner) for inner in value if not _is_cache_point(inner)]
    return value


# -- reading -----------------------------------------------------------------------------------------------------------


def _messages_places(body: Mapping[str, Any]) -> Iterator[_BodyPart]:
    yield from _tools(body)
    yield from _content(("system",), "system", -1, body.get("system"))
    yield from _turns(body)


def _chat_places(body: Mapping[str, Any]) -> Iterator[_BodyPart]:
    yield from _tools(body)
    yield from _turns(body)


def _turns(body: Mapping[str, Any]) -> Iterator[_BodyPart]:
    for number, message in enumerate(_list(body.get("messages"))):
        message = _mapping(message)
        role = str(message.get("role"))
        yield from _content(("messages", number, "content"), role, number, message.get("content"))
        others = {name: message[name] for name in message if name not in ("role", "content", "name") and message[name]}
        if others:  # tool calls, refusals, audio
            yield _BodyPart((), "assistant", number, others)


def _responses_places(body: Mapping[str, Any]) -> Iterator[_BodyPart]:
    for name in ("prompt", "previous_response_id", "conversation"):
        if body.get(name) is not None:
            raise _UnknownShapeError(name)  # a prefix that is not in the body
    yield from _tools(body)
    if body.get("instructions"):
        yield _BodyPart((), "instructions", -1, str(body["instructions"]))
    given = body.get("input")
    if isinstance(given, str):
        yield _BodyPart(("input",), "user", 0, given)
        return
    for number, item in enumerate(_list(given)):
        item = _mapping(item)
        kind = str(item.get("type", "message"))
        if kind == "message":
            yield from _content(("input", number, "content"), str(item.get("role")), number, item.get("content"))
        elif kind.endswith("_output") and isinstance(item.get("output"), list):
            yield _BodyPart((), "tool", number, str(item.get("call_id")))
            yield from _content(("input", number, "output"), "tool", number, item["output"])
        else:
            yield _BodyPart((), "assistant", number, item)


def _converse_places(body: Mapping[str, Any]) -> Iterator[_BodyPart]:
    tools = _mapping(body.get("toolConfig") or {}).get("tools") or []
    yield from _pointed(("toolConfig", "tools"), "tools", -2, _list(tools))
    yield from _pointed(("system",), "system", -1, _list(body.get("system") or []))
    for number, message in enumerate(_list(body.get("messages"))):
        message = _mapping(message)
        content = _list(message.get("content"))
        yield from _pointed(("messages", number, "content"), str(message.get("role")), number, content)


_READERS = {
    "messages": _messages_places,
    "chat": _chat_places,
    "responses": _responses_places,
    "converse": _converse_places,
}


def _tools(body: Mapping[str, Any]) -> Iterator[_BodyPart]:
    for number, tool in enumerate(_list(body.get("tools") or [])):
        yield _BodyPart(("tools", number), "tools", -2, _mapping(tool), _mark_on(tool))


def _content(path: _Path, role: str, message: int, content: object) -> Iterator[_BodyPart]:
    if content is None:
        return
    if isinstance(content, str):
        yield _BodyPart(path, role, message, content)
        return
    for number, part in enumerate(_list(content)):
        part = _mapping(part)
        yield _BodyPart((*path, number), role, message, part, _mark_on(part))


def _pointed(path: _Path, role: str, message: int, values: Sequence[Any]) -> Iterator[_BodyPart]:
    """Yield the parts of a list in which marks stand behind parts, as parts of their own."""
    for number, value in enumerate(values):
        value = _mapping(value)
        if _is_cache_point(value):
            continue
        follower = values[number + 1] if number + 1 < len(values) else None
        mark = follower.get(_CACHE_POINT) if isinstance(follower, Mapping) else None
        yield _BodyPart((*path, number), role, message, value, mark)


def _marks_in(value: object) -> int:
    """Return the number of marks anywhere in a body."""
    if isinstance(value, Mapping):
        own = sum(1 for name in value if name in _FIELDS or name == _CACHE_POINT)
        return own + sum(_marks_in(inner) for inner in value.values())
    if isinstance(value, list | tuple):
        return sum(map(_marks_in, value))
    return 0


def _mark_on(part: Mapping[str, Any]) -> Any:
    return next((part[name] for name in _FIELDS if part.get(name) is not None), None)


def _is_cache_point(value: object) -> bool:
    return isinstance(value, Mapping) and _CACHE_POINT in value


def _list(value: object) -> Sequence[Any]:
    if isinstance(value, list | tuple):
        return value
    raise _UnknownShapeError(type(value).__name__)


def _mapping(value: object) -> Mapping[str, Any]:
    if isinstance(value, Mapping):
        return value
    raise _UnknownShapeError(type(value).__name__)


def _kind(place: _BodyPart, *, is_last: bool, is_newest: bool) -> PartKind:
    if place.message == -2:
        return "tools"
    if place.message == -1 or place.role in _SYSTEM_ROLES:
        return "system"
    if not is_last:
        return "inner"
    return "end" if is_newest else "past"


def _written(value: object) -> str:
    """Return what the model reads of a part; a single text in a list reads as the text alone."""
    if isinstance(value, str):
        return value
    bare = without_marks(value)
    if isinstance(bare, Mapping) and isinstance(bare.get("text"), str) and set(bare) <= {"type", "text"}:
        return str(bare["text"])
    return json.dumps(bare, sort_keys=True, default=str)


def _can_have_mark(shape: ApiShape, place: _BodyPart, rules: MarkRules) -> bool:
    if not place.path:
        return False
    value, role = place.value, place.role
    text = value if isinstance(value, str) else value.get("text")
    kind = "text" if isinstance(value, str) else str(value.get("type", ""))
    refused: set[MarkPlace] = set()
    if isinstance(text, str) and not text.strip():
        refused.add("empty")
    if kind in _THINKING or (not isinstance(value, str) and any(name in value for name in _THINKING)):
        refused.add("thinking")
    if role == "assistant":
        refused.add("assistant")
    if role in _SYSTEM_ROLES:
        refused.add("system")
    if place.message == -2:
        refused.add("tools")
    if refused & rules.refused_on:
        return False
    # OpenAI's shapes: texts of any message; tools and other content have no such field.
    is_text = kind in ("text", "input_text") or isinstance(value, str)
    return shape in ("messages", "converse") or (is_text and place.message >= 0 and role != "assistant")


def _asked_lifetimes(
    shape: ApiShape, body: Mapping[str, Any], places: Sequence[_BodyPart], rules: MarkRules
) -> dict[int, float]:
    """Return the lifetime of each mark that the application has set, by the number of its part.

    Raises:
        ValueError: There is no room for another mark, or one of these is not understood.
    """
    asked = {number: _lifetime(place.mark, rules) for number, place in enumerate(places) if place.mark is not None}
    automatic: float | None = None
    if shape == "messages" and body.get("cache_control") is not None:
        automatic = _lifetime(body["cache_control"], rules)
    elif rules.automatic and _has_cache_options(body) and _options_mode(body) == "implicit":
        automatic = rules.lifetimes[0]
    if automatic is not None:
        last = next((i for i in reversed(range(len(places))) if _can_have_mark(shape, places[i], rules)), None)
        if last is not None:
            asked.setdefault(last, automatic)
    in_order = [asked[number] for number in sorted(asked)]
    if _marks_in(body) != len([place for place in places if place.mark is not None]) + ("cache_control" in body):
        raise ValueError("a mark stands inside a part")
    if len(asked) > rules.most or in_order != sorted(in_order, reverse=True):
        raise ValueError("the application's marks are against the rules")
    return asked


def _lifetime(mark: object, rules: MarkRules) -> float:
    name = mark.get("ttl") if isinstance(mark, Mapping) else None
    lifetime = rules.lifetimes[0] if name is None else _SECONDS.get(str(name), 0.0)
    if lifetime not in rules.lifetimes:
        raise ValueError("a mark's lifetime is unknown")
    return lifetime


def _has_cache_options(body: Mapping[str, Any]) -> bool:
    return body.get("prompt_cache_options") is not None or body.get("prompt_cache_retention") is not None


def _options_mode(body: Mapping[str, Any]) -> str:
    options = body.get("prompt_cache_options")
    return str(options.get("mode", "implicit")) if isinstance(options, Mapping) else "implicit"


# -- writing -----------------------------------------------------------------------------------------------------------


def _mark(rules: MarkRules, lifetime: float) -> dict[str, Any]:
    if rules.field == "prompt_cache_breakpoint":
        return {"mode": "explicit"}
    mark = {"type": "default" if rules.field == _CACHE_POINT else "ephemeral"}
    return mark if lifetime == rules.lifetimes[0] else {**mark, "ttl": _NAMES[lifetime]}


def _marked(value: Any, path: _Path, field: str, mark: Mapping[str, Any], text_kind: str) -> Any:
    """Return a copy of `value` in which the part at `path` has a mark; what is not on the path is shared."""
    if not path:
        return {**({"type": text_kind, "text": value} if isinstance(value, str) else value), field: mark}
    first, *rest = path
    copy: Any = list(value) if isinstance(first, int) else dict(value)
    if isinstance(first, int) and field == _CACHE_POINT and not rest:
        copy.insert(first + 1, {field: mark})
        return copy
    inner = copy[first]
    copy[first] = _marked(inner, tuple(rest), field, mark, text_kind)
    if isinstance(inner, str):  # a content that is one text becomes a list of this part
        copy[first] = [copy[first]]
    if path == ("input",):
        copy[first] = [{"role": "user", "content": copy[first]}]
    return copy
