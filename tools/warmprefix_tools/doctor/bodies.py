"""Request bodies of every API as one list of messages, in the text that the emulator's chat template shows."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from hashlib import blake2b
from typing import NamedTuple, TypeAlias

from warmprefix_requests.marks import without_marks
from warmprefix_tools.doctor.formats import plain_message

__all__ = ["BodyMessage", "UnreadableBodyError", "body_messages", "has_marks", "is_response_item", "tool_texts"]

_Json: TypeAlias = Mapping[str, object]

_PROMPT_FIELDS = ("tools", "toolConfig", "system", "instructions", "messages", "cache_control")
_TEXT_KINDS = {"text", "input_text", "output_text", "refusal", "None"}
_THOUGHTS = {"thinking", "reasoning"}
_CALLS = ("tool_use", "function_call", "custom_tool_call", "toolUse", "tool_call", "functionCall", "tool-call")
_RESULTS = ("tool_result", "toolResult", "tool_call_response", "functionResponse", "tool-result")
_RESULT_TEXTS = ("content", "output", "response", "result")
_ITEMS_WITHOUT_ROLE = {"reasoning", "item_reference", "compaction", "mcp_list_tools", "mcp_approval_request"}


class UnreadableBodyError(ValueError):
    """A request without readable text; the message names the field."""


class BodyMessage(NamedTuple):
    """A message; its text is that of the content parts, each on lines of its own."""

    role: str
    text: str
    in_list: bool = True
    """False for a system prompt that the body has outside its list of messages."""


def body_messages(body: _Json) -> Iterator[BodyMessage]:
    """Yield the system prompt and the messages of a body of any API; its tools are apart, in `tool_texts`.

    Pictures, sounds and files become a short placeholder with their digest: their cost depends on the model.

    Raises:
        UnreadableBodyError: A message has no role, or its content is neither text nor parts.
    """
    system = without_marks(body.get("system") or body.get("instructions"))
    if isinstance(system, str | list):
        yield BodyMessage("system", _content(system, "system"), in_list=False)
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        raise UnreadableBodyError("messages is empty")
    for at, each in enumerate(messages):
        where = f"messages[{at}]"
        if not isinstance(each, Mapping):
            raise UnreadableBodyError(f"{where} is {type(each).__name__}, not a message")
        message = plain_message(without_marks(each))
        role, kind = message.get("role"), str(message.get("type"))
        if isinstance(role, str) and role:
            yield BodyMessage(role, "\n".join([_content(message.get("content"), f"{where}.content"), *_calls(message)]))
        elif kind.endswith("_output"):
            yield BodyMessage("tool", _content(message.get("output"), f"{where}.output"))
        elif is_response_item(message):
            yield BodyMessage("assistant", _call_text(message))
        else:
            raise UnreadableBodyError(f"{where} has no role")


def is_response_item(message: _Json) -> bool:
    """Return whether a message is an item of OpenAI's Responses, which has a type in place of a role."""
    kind = message.get("type")
    return isinstance(kind, str) and (kind.endswith(("_call", "_output")) or kind in _ITEMS_WITHOUT_ROLE)


def tool_texts(body: _Json) -> list[str]:
    """Return each tool as JSON, in the order of the body; OpenAI's older `functions` too."""
    tools, functions, config = body.get("tools"), body.get("functions"), body.get("toolConfig")
    if not tools and isinstance(config, Mapping):
        tools = config.get("tools")
    if not tools and isinstance(functions, list):
        tools = [{"type": "function", "function": function} for function in functions]
    return list(map(json.dumps, without_marks(tools))) if isinstance(tools, list) else []


def has_marks(body: _Json) -> bool:
    """Return whether a body asks the API to cache any part of its prompt."""
    prompt = {name: body[name] for name in _PROMPT_FIELDS if name in body}
    return bool(without_marks(prompt) != prompt)


def _content(content: object, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        raise UnreadableBodyError(f"{where} is {type(content).__name__}, neither text nor parts")
    for position, part in enumerate(content):
        if not isinstance(part, str | Mapping):
            raise UnreadableBodyError(f"{where}[{position}] is {type(part).__name__}, not a part")
    return "\n".join(map(_part_text, content))


def _calls(message: _Json) -> Iterator[str]:
    calls = message.get("tool_calls")
    yield from map(_call_text, calls if isinstance(calls, list) else ())
    if message.get("function_call"):  # OpenAI's, of 2023
        yield _call_text(message["function_call"])


def _call_text(call: object) -> str:
    return f"<tool_call>\n{json.dumps(call)}\n</tool_call>"


def _part_text(part: str | _Json) -> str:
    if isinstance(part, str):
        return part
    kind = str(part.get("type"))
    text = part.get("text", part.get("content", part.get("refusal")))  # the second in OpenTelemetry's parts
    if kind in _THOUGHTS:
        text = part.get(kind, text)
    if kind in _TEXT_KINDS | _THOUGHTS and isinstance(text, str):
        return text
    if kind in _CALLS or not part.keys().isdisjoint(_CALLS):
        return _call_text(part)
    for name in _RESULTS:
        if kind == name or name in part:
            return _result_text(part.get(name, part), name)
    data = json.dumps(part, sort_keys=True)
    digest = blake2b(data.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"<{part.get('type', 'part')} of {len(data)} characters, {digest}>"


def _result_text(result: object, name: str) -> str:
    fields = result if isinstance(result, Mapping) else {}
    content = next((fields[key] for key in _RESULT_TEXTS if fields.get(key) is not None), None)
    is_list = isinstance(content, list) and all(isinstance(each, str | Mapping) for each in content)
    return _content(content, name) if content is None or isinstance(content, str) or is_list else json.dumps(content)
