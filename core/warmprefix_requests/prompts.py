"""The prompt in a request's body, without cache marks and differences of shape. Pure: no I/O.

A mark moves from request to request, and clients change the shape of a content to set one. So what depends on text that
was sent before is decided on this form alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

__all__ = [
    "GivenResult",
    "HistoryCut",
    "MadeCall",
    "Path",
    "PromptMessage",
    "RewriteRoute",
    "canonical_front",
    "canonical_messages",
    "hides_text",
    "is_cut_elsewhere",
    "items_name",
    "tool_events",
]

RewriteRoute = Literal["chat", "messages", "responses"]
"""The shape of a body: OpenAI's Chat Completions, Anthropic's Messages, OpenAI's Responses."""

Path = tuple[str | int, ...]
"""Where a value stands in a body."""

_MARKS = frozenset({"cache_control", "prompt_cache_breakpoint"})
"""Fields with which a part asks the cache to write here."""

_MARK_PARTS = ("cachePoint", "cache_point")
"""Parts that are nothing but a mark, as Bedrock has them."""

_TEXT_PARTS = ("text", "input_text", "output_text")
_UNSEEN_FIELDS = frozenset({"id", "status"})
"""Fields of a message that no engine shows to the model, and that may change from request to request."""

_HIDDEN = ("previous_response_id", "conversation", "session_params")
"""Fields with which the API adds text that the body does not show."""
_CUT_BEHIND_US = ("truncate_prompt_tokens", "transforms")
"""Fields with which it cuts some. Of `truncate_prompt_tokens`, -1 cuts too."""

_CUTTING_PLUGINS = ("context-compression",)
_INSTRUCTIONS = ("system", "developer")
_CALLS = ("function_call", "custom_tool_call", "tool_use")
_RESULTS = ("function_call_output", "custom_tool_call_output", "tool_result")
_MODEL_ITEMS = ("function_call", "custom_tool_call", "reasoning")
_MAPPING = (dict, Mapping)
"""A plain dict is recognised several times faster than another mapping."""


class MadeCall(NamedTuple):
    """A tool call in a body."""

    id: str | None
    name: str
    arguments: object


class GivenResult(NamedTuple):
    """A tool's result in a body."""

    call_id: str | None
    path: Path
    """Where its text stands in the body."""
    text: str | None
    """None for an error, and for anything but a single text."""


class HistoryCut(NamedTuple):
    """A place behind which the API shows the model nothing of what stands in front."""


class PromptMessage(NamedTuple):
    """One message of a canonical prompt."""

    role: Literal["instructions", "user", "model", "tool"]
    """Who wrote it, whatever the API calls that role."""
    text: str
    """All that the model sees of the message."""
    user_text: str
    """Text of the user in it, without results of tools."""


def items_name(route: str) -> str:
    """Return the name of the field with the messages."""
    return "input" if route == "responses" else "messages"


def hides_text(body: Mapping[str, Any], *, after_response: bool = False) -> bool:
    """Return True if the API adds text that the body does not show; `after_response` if only another field counts."""
    return any(body.get(name) not in (None, []) for name in _HIDDEN[after_response:])


def is_cut_elsewhere(body: Mapping[str, Any]) -> bool:
    """Return True if the API may cut the prompt.

    `context_management` is judged by its edits: those that clear only thinking leave all results in the prompt.
    """
    if any(body.get(name) not in (None, []) for name in _CUT_BEHIND_US):
        return True
    if body.get("truncation") not in (None, "disabled"):
        return True
    if any(isinstance(plugin, _MAPPING) and plugin.get("id") in _CUTTING_PLUGINS for plugin in _list(body, "plugins")):
        return True
    edits = body.get("context_management")
    if isinstance(edits, _MAPPING):
        if not edits.keys() <= {"edits"}:
            return True
        edits = edits.get("edits")
    return edits is not None and not (isinstance(edits, list | tuple) and all(map(_clears_thinking, edits)))


def _clears_thinking(edit: object) -> bool:
    return isinstance(edit, _MAPPING) and str(edit.get("type")).startswith("clear_thinking_")


# -- calls and results -------------------------------------------------------------------------------------------------


def tool_events(
    route: RewriteRoute, body: Mapping[str, Any], begin: int, end: int | None
) -> Iterator[MadeCall | GivenResult | HistoryCut]:
    """Yield the tool calls and results of the messages from one to another, in their order.

    What is not understood is left out.
    """
    name = items_name(route)
    for number, message in enumerate(_list(body, name)[begin:end], begin):
        if not isinstance(message, _MAPPING):
            continue
        path = (name, number)
        if route == "responses":
            yield from _item_events(path, message, "call_id", "call_id", "output")
        elif route == "messages":
            for place, block in enumerate(_list(message, "content")):
                if isinstance(block, _MAPPING):
                    yield from _item_events((*path, "content", place), block, "id", "tool_use_id", "content")
        elif message.get("role") == "assistant":
            for call in _list(message, "tool_calls"):
                inner = call.get("function", call.get("custom")) if isinstance(call, _MAPPING) else None
                if isinstance(inner, _MAPPING) and isinstance(inner.get("name"), str):
                    yield MadeCall(_id(call.get("id")), inner["name"], inner.get("arguments", inner.get("input", "")))
        elif message.get("role") == "tool":
            yield _result((*path, "content"), message.get("tool_call_id"), message.get("content"), message)


def _item_events(
    path: Path, item: Mapping[str, Any], call_id: str, answered_id: str, text: str
) -> Iterator[MadeCall | GivenResult | HistoryCut]:
    """Yield the event that an item is, if any; the last three are the names of its fields."""
    kind = item.get("type")
    if kind in _CALLS and isinstance(item.get("name"), str):
        yield MadeCall(_id(item.get(call_id)), item["name"], item.get("arguments", item.get("input", "")))
    elif kind in _RESULTS:
        yield _result((*path, text), item.get(answered_id), item.get(text), item)
    elif isinstance(kind, str) and "compaction" in kind:  # in place of a history: the API ignores all in front of it
        yield HistoryCut()


def _result(path: Path, call_id: object, content: object, holder: Mapping[str, Any]) -> GivenResult:
    if isinstance(content, list):
        places = [at for at, part in enumerate(content) if not _is_mark(part)]
        part = content[places[0]] if len(places) == 1 else None
        is_text = isinstance(part, _MAPPING) and part.get("type") in _TEXT_PARTS
        content = part.get("text") if is_text and part is not None else None
        path = (*path, places[0], "text") if places else path
    is_text = isinstance(content, str) and not holder.get("is_error") and holder.get("status") != "error"
    return GivenResult(_id(call_id), path, content if is_text and isinstance(content, str) else None)


# -- the canonical prompt ----------------------------------------------------------------------------------------------


def canonical_front(body: Mapping[str, Any]) -> str:
    """Return what stands in front of the messages of a prompt. O(characters)."""
    front = [_bare(body[name]) for name in ("tools", "system", "instructions") if body.get(name)]
    return repr(front) if front else ""


def canonical_messages(
    route: str, body: Mapping[str, Any], begin: int = 0, end: int | None = None
) -> Iterator[PromptMessage]:
    """Yield messages of a prompt. O(characters).

    A content that is one text is the same as a list of this one part. Marks are left out, and ids of messages and
    items: engines do not show them to the model.
    """
    given = body.get("prompt" if route == "completions" else items_name(route))
    messages = given if isinstance(given, list) else [given]
    return map(_message, messages[begin:end])


def _message(message: object) -> PromptMessage:
    if not isinstance(message, _MAPPING):
        text = message if isinstance(message, str) else repr(message)
        return PromptMessage("user", text, text)
    role, content = message.get("role"), message.get("content") or ""
    if type(content) is not str:
        content = _bare(content)
    kind: Literal["instructions", "user", "model", "tool"] = "tool"
    user_text = ""
    if role in _INSTRUCTIONS:
        kind = "instructions"
    elif role == "assistant" or message.get("type") in _MODEL_ITEMS:
        kind = "model"
    elif role == "user":
        parts = [content] if isinstance(content, str) else content
        user_text = (
            repr([part for part in parts if not _is_tool_result(part)]) if isinstance(parts, list) else repr(parts)
        )
        kind = "tool" if user_text == "[]" and content else "user"
    text = content if isinstance(content, str) else repr(content)
    if message.keys() <= _PLAIN:
        return PromptMessage(kind, f"{role}\n{text}\n{message.get('tool_call_id', '')}", user_text)
    rest = {name: value for name, value in message.items() if name not in _NOT_WRITTEN}
    if rest.get("type") == "message":  # an item of this type is the same without it
        del rest["type"]
    if "output" in rest:
        rest["output"] = _bare(rest["output"])
    return PromptMessage(kind, f"{role}\n{text}\n{rest or ''}", user_text)


_NOT_WRITTEN = _MARKS | _UNSEEN_FIELDS | {"role", "content"}
_PLAIN = _NOT_WRITTEN | {"tool_call_id"}
"""Fields of most messages."""


def _is_tool_result(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "tool_result"


def _bare(value: object, depth: int = 2) -> object:
    """Return a content, or a list of tools, without marks; one text in a list is that text.

    Marks stand at most in a part of a part: in the content of a tool's result. `depth` bounds the recursion.
    """
    if isinstance(value, _MAPPING):
        return _bare_part(value, depth)
    if not isinstance(value, list):
        return value
    parts = [_bare_part(part, depth) if isinstance(part, _MAPPING) else part for part in value if not _is_mark(part)]
    return parts[0] if len(parts) == 1 and isinstance(parts[0], str) else parts


def _bare_part(part: Mapping[str, Any], depth: int) -> object:
    bare = {name: value for name, value in part.items() if name not in _MARKS}
    if len(bare) == 2 and isinstance(bare.get("text"), str) and bare.get("type") in _TEXT_PARTS:
        return bare["text"]
    for name in ("content", "function") if depth else ():  # of a tool's result, and of a tool
        if name in bare:
            bare[name] = _bare(bare[name], depth - 1)
    return bare


def _is_mark(part: object) -> bool:
    return isinstance(part, dict) and (part.get("type") in _MARK_PARTS or (len(part) == 1 and "cachePoint" in part))


def _list(holder: Mapping[str, Any], name: str) -> Sequence[Any]:
    value = holder.get(name)
    return value if isinstance(value, list | tuple) else ()


def _id(value: object) -> str | None:
    return value if isinstance(value, str) else None
