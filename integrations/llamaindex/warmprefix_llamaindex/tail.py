"""Tail placement: repeated tool results in one prompt become references to earlier calls."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from warmprefix import Transcript
from warmprefix.dedup import RepeatTemplates

__all__ = ["refer_to_repeats"]


class _ToolCall(NamedTuple):
    id: str
    name: str
    arguments: object


def refer_to_repeats(
    messages: Sequence[ChatMessage],
    *,
    tools: Collection[str] | None = None,
    separator: str | None = None,
    min_tokens: int = 64,
    templates: RepeatTemplates | None = None,
) -> Iterator[ChatMessage]:
    """Yield one prompt's messages, with references in place of repeated tool results.

    A pure function: each output depends only on the messages up to it. Messages that change are copies, the others
    are the given ones. `ContextReuseLLM` explains the arguments.
    """
    transcript = Transcript(templates=templates, separator=separator, min_tokens=min_tokens)
    names: dict[str, str] = {}
    for message in messages:
        for call in _tool_calls(message):
            transcript.call(*call)
            names[call.id] = call.name
        if message.role == MessageRole.TOOL:
            call_id = message.additional_kwargs.get("tool_call_id")
            name = message.additional_kwargs.get("name") or names.get(call_id or "")
            if tools is None or name in tools:
                message = _rewritten(message, call_id, transcript)
            else:
                transcript.skip(call_id)
        yield message


def _rewritten(message: ChatMessage, call_id: str | None, transcript: Transcript) -> ChatMessage:
    parts = [block.text if isinstance(block, TextBlock) else None for block in message.blocks]
    sent = transcript.parts(call_id, parts)
    if sent == parts:
        return message
    blocks = [
        block if text == part else block.model_copy(update={"text": text})
        for block, part, text in zip(message.blocks, parts, sent, strict=True)
        if text or text == part  # a reference in an earlier block covers this one
    ]
    return message.model_copy(update={"blocks": blocks})


def _tool_calls(message: ChatMessage) -> list[_ToolCall]:
    """Return the calls in a message, as newer packages of models write them, or as older ones do."""
    for listed in (message.blocks, message.additional_kwargs.get("tool_calls") or ()):
        if calls := [call for item in listed if (call := _tool_call(item)) is not None]:
            return calls
    return []


def _tool_call(item: object) -> _ToolCall | None:
    function = _get(item, "function")
    key = _first(_get(item, "tool_call_id"), _get(item, "call_id"), _get(item, "id"))
    name = _first(_get(item, "tool_name"), _get(item, "name"), _get(function, "name"))
    if not key or not name:
        return None
    arguments = (_get(item, "tool_kwargs"), _get(item, "arguments"), _get(item, "input"), _get(function, "arguments"))
    return _ToolCall(key, name, _first(*arguments, ""))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _get(item: object, key: str) -> Any:
    """Read from an object, or from the mapping that storing makes of it."""
    return item.get(key) if isinstance(item, dict) else getattr(item, key, None)
