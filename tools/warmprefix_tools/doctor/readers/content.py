"""The text of a message, as a chat template gets it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

__all__ = ["UnreadableBodyError", "message_text", "tool_texts"]

_TEXT_KINDS = {"text", "input_text", "output_text", "refusal"}


class UnreadableBodyError(ValueError):
    """The record is a request, but not one with text in it; the message names the field."""


def message_text(message: Mapping[str, object], at: int) -> str:
    """Content parts joined, then the tool calls, as the emulator's chat template has them.

    Images, sounds and files are a short placeholder with their digest: what they cost is up to the model.
    """
    content = message.get("content")
    if content is None:
        text = ""
    elif isinstance(content, str):
        text = content
    elif isinstance(content, list):
        text = "\n".join(_parts(content, at))
    else:
        raise UnreadableBodyError(f"messages[{at}].content is {type(content).__name__}, neither text nor parts")
    calls = message.get("tool_calls")
    if isinstance(calls, list):
        text += "".join(f"\n<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)
    return text


def _parts(content: Sequence[object], at: int) -> Iterator[str]:
    for position, part in enumerate(content):
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping):
            text = part.get("text") if part.get("type") in _TEXT_KINDS else None
            yield text if isinstance(text, str) else _placeholder(part)
        else:
            raise UnreadableBodyError(f"messages[{at}].content[{position}] is {type(part).__name__}, not a part")


def _placeholder(part: Mapping[str, object]) -> str:
    data = json.dumps(part, sort_keys=True)
    digest = blake2b(data.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()
    return f"<{part.get('type', 'part')} of {len(data)} characters, {digest}>"


def tool_texts(body: Mapping[str, object]) -> list[str]:
    """Each tool as JSON, in the order of the body; OpenAI's older `functions` too."""
    tools = body.get("tools")
    if not tools and isinstance(body.get("functions"), list):
        tools = [{"type": "function", "function": function} for function in body["functions"]]  # type: ignore[attr-defined]
    return [json.dumps(tool) for tool in tools] if isinstance(tools, list) else []
