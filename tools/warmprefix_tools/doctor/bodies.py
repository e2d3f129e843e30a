"""Request bodies of every API as one list of messages, with the ends of their content parts and the cache marks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

from warmprefix_requests.marks import without_marks
from warmprefix_tools.doctor.formats import plain_message

__all__ = ["BodyMessage", "MessagePart", "UnreadableBodyError", "body_messages", "is_response_item", "tool_parts"]

_Json: TypeAlias = Mapping[str, object]

_TEXT_KINDS = {"text", "input_text", "output_text", "refusal", "None"}
_THOUGHTS = {"thinking", "reasoning"}
_CALLS = ("tool_use", "function_call", "custom_tool_call", "toolUse", "tool_call", "functionCall", "tool-call")
_RESULTS = ("tool_result", "toolResult", "tool_call_response", "functionResponse", "tool-result")
_RESULT_TEXTS = ("content", "output", "response", "result")
_ITEMS_WITHOUT_ROLE = {"reasoning", "item_reference", "compaction", "mcp_list_tools", "mcp_approval_request"}
_LIFETIMES = {"5m": 300.0, "30m": 1_800.0, "1h": 3_600.0}


class UnreadableBodyError(ValueError):
    """A request without readable text; the message names the field."""


@dataclass(frozen=True, slots=True)
class MessagePart:
    """A content part of a message, as the emulator's chat template shows it."""

    text: str
    marked: bool = False
    lifetime: float | None = None
    """Seconds that its mark asks for; None without a mark, or if that leaves it to the API."""


@dataclass(frozen=True, slots=True)
class BodyMessage:
    """A message; its text is that of the parts, each on lines of its own."""

    role: str
    parts: tuple[MessagePart, ...]
    in_list: bool = True
    """False for a system prompt that the body has outside its list of messages."""


def body_messages(body: _Json) -> list[BodyMessage]:
    """Return the system prompt and the messages of a body of any API; its tools are apart, in `tool_parts`.

    Pictures, sounds and files become a short placeholder with their digest: their cost depends on the model.

    Raises:
        UnreadableBodyError: A message has no role, or its content is neither text nor parts.
    """
    found: list[BodyMessage] = []
    system = body.get("system") or body.get("instructions")
    if isinstance(system, str | list):
        found.append(BodyMessage("system", _content(system, "system"), in_list=False))
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UnreadableBodyError("messages is empty")
    for at, each in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(each, Mapping):
            raise UnreadableBodyError(f"{where} is {type(each).__name__}, not a message")
        message = plain_message(each)
        role, kind = message.get("role"), str(message.get("type"))
        if isinstance(role, str) and role:
            parts = [*_content(message.get("content"), f"{where}.content"), *_calls(message)]
        elif kind.endswith("_output"):
            role, parts = "tool", [*_content(message.get("output"), f"{where}.output")]
        elif is_response_item(message):
            role, parts = "assistant", [MessagePart(_call_text(message))]
        else:
            raise UnreadableBodyError(f"{where} has no role")
        found.append(BodyMessage(role, tuple(parts)))
    if body.get("cache_control") is not None:  # Anthropic: the end of the last part is a mark
        last = found[-1]
        mark = MessagePart(last.parts[-1].text, True, _lifetime(body["cache_control"]))
        found[-1] = BodyMessage(last.role, (*last.parts[:-1], mark), last.in_list)
    return found


def is_response_item(message: _Json) -> bool:
    """Return whether a message is an item of OpenAI's Responses, which has a type in place of a role."""
    kind = message.get("type")
    return isinstance(kind, str) and (kind.endswith(("_call", "_output")) or kind in _ITEMS_WITHOUT_ROLE)


def tool_parts(body: _Json) -> list[MessagePart]:
    """Return each tool as JSON, in the order of the body; OpenAI's older `functions` too."""
    tools, functions = body.get("tools"), body.get("functions")
    config = body.get("toolConfig")
    if not tools and isinstance(config, Mapping):
        tools = config.get("tools")
    if not tools and isinstance(functions, list):
        tools = [{"type": "function", "function": function} for function in functions]
    return list(_with_points(tools, lambda tool: json.dumps(without_marks(tool)))) if isinstance(tools, list) else []


def _content(content: object, where: str) -> tuple[MessagePart, ...]:
    if content is None:
        return (MessagePart(""),)
    if isinstance(content, str):
        return (MessagePart(content),)
    if not isinstance(content, list):
        raise UnreadableBodyError(f"{where} is {type(content).__name__}, neither text nor parts")
    for position, part in enumerate(content):
        if not isinstance(part, str | Mapping):
            raise UnreadableBodyError(f"{where}[{position}] is {type(part).__name__}, not a part")
    return tuple(_with_points(content, _part_text)) or (MessagePart(""),)


def _with_points(parts: Sequence[object], text_of: Callable[[object], str]) -> Iterator[MessagePart]:
    """Yield the parts, each with the mark that it has, or that stands behind it as a part of its own."""
    for position, part in enumerate(parts):
        if isinstance(part, Mapping):
            if "cachePoint" in part:
                continue
            behind = parts[position + 1] if position + 1 < len(parts) else None
            point = behind.get("cachePoint") if isinstance(behind, Mapping) else None
            mark = part.get("cache_control") or part.get("prompt_cache_breakpoint") or point
            yield MessagePart(text_of(part), mark is not None, _lifetime(mark))
        else:
            yield MessagePart(text_of(part))


def _lifetime(mark: object) -> float | None:
    return _LIFETIMES.get(str(mark.get("ttl"))) if isinstance(mark, Mapping) else None


def _calls(message: _Json) -> Iterator[MessagePart]:
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        yield MessagePart(_call_text(call))
    if message.get("function_call"):  # OpenAI's, of 2023
        yield MessagePart(_call_text(message["function_call"]))


def _call_text(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _part_text(part: object) -> str:
    if isinstance(part, str):
        return part
    assert isinstance(part, Mapping)
    kind = str(part.get("type"))
    text = part.get("text", part.get("content", part.get("refusal")))  # the second in OpenTelemetry's parts
    if kind in _TEXT_KINDS and isinstance(text, str):
        return text
    if kind in _THOUGHTS and isinstance(part.get(kind, text), str):
        return str(part.get(kind, text))
    if kind in _CALLS or not part.keys().isdisjoint(_CALLS):
        return _call_text(without_marks(part))
    for name in _RESULTS:
        if kind == name or name in part:
            return _result_text(part.get(name, part), name)
    return _placeholder(without_marks(part))


def _result_text(result: object, name: str) -> str:
    fields = result if isinstance(result, Mapping) else {}
    content = next((fields[key] for key in _RESULT_TEXTS if fields.get(key) is not None), None)
    is_list = isinstance(content, list) and all(isinstance(each, str | Mapping) for each in content)
    if content is None or isinstance(content, str) or is_list:
        return "\n".join([each.text for each in _content(content, name)])
    return json.dumps(content)


def _placeholder(part: _Json) -> str:
    data = json.dumps(part, sort_keys=True)
    digest = blake2b(data.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"<{part.get('type', 'part')} of {len(data)} characters, {digest}>"
