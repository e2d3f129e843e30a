"""Tail placement: what the tools of one prompt said twice becomes a reference to the first time."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Any

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock

from warmprefix import ContextBlock, Templates, Transcript

__all__ = ["refer_to_repeats"]


def refer_to_repeats(
    messages: Sequence[ChatMessage],
    *,
    tools: Collection[str] | None = None,
    separator: str | None = None,
    min_tokens: int = 64,
    templates: Templates | None = None,
) -> Iterator[ChatMessage]:
    """One prompt's messages, with the context blocks in tool messages labelled, or referred to where they repeat.

    A pure function: what becomes of a message depends on those before it alone. Messages that change are copies, the
    others are the ones given. `ContextReuseLLM` explains the arguments.
    """
    transcript = Transcript(templates=templates, min_tokens=min_tokens)
    tool_names: dict[str, str] = {}
    for message in messages:
        if tools is not None:
            tool_names.update(_tool_calls(message))
        if message.role == MessageRole.TOOL and (tools is None or _tool_name(message, tool_names) in tools):
            message = _written(message, transcript, separator, min_tokens)
        else:
            for block in message.blocks:
                if isinstance(block, TextBlock):
                    transcript.read(block.text)
        yield message


def _written(message: ChatMessage, transcript: Transcript, separator: str | None, min_tokens: int) -> ChatMessage:
    blocks = list(message.blocks)
    changed, opens_line = False, True
    for i, block in enumerate(blocks):
        if not isinstance(block, TextBlock):
            continue
        text = "".join(
            [
                piece if isinstance(piece, str) else transcript.write(piece)
                for piece in _cut(block.text, separator, min_tokens)
            ]
        )
        if text != block.text:
            # Some clients put the text blocks of a message together with nothing in between.
            text = text if opens_line else f"\n{text}"
            blocks[i] = block.model_copy(update={"text": text})
            changed = True
        opens_line = text.endswith("\n")
    return message.model_copy(update={"blocks": blocks}) if changed else message


def _cut(text: str, separator: str | None, min_tokens: int) -> Iterator[ContextBlock | str]:
    """A tool's text as context blocks and what stands between them; joined again, the pieces are `text`.

    Where no part between two separators is worth a label, the whole text is one block.
    """
    parts = [text] if separator is None else text.split(separator)
    blocks = [ContextBlock(part.strip("\r\n")) for part in parts]
    if separator is not None and all(block.tokens < min_tokens for block in blocks):
        parts, blocks = [text], [ContextBlock(text.strip("\r\n"))]
    for i, (part, block) in enumerate(zip(parts, blocks, strict=True)):
        start = len(part) - len(part.lstrip("\r\n"))
        yield part[:start] if i == 0 or separator is None else separator + part[:start]
        if block.text:
            yield block
        yield part[start + len(block.text) :]


def _tool_name(message: ChatMessage, tool_names: dict[str, str]) -> str | None:
    """By the message's own word, or by the call that it answers."""
    kwargs = message.additional_kwargs
    return kwargs.get("name") or tool_names.get(kwargs.get("tool_call_id", ""))


def _tool_calls(message: ChatMessage) -> Iterator[tuple[str, str]]:
    """The id and the tool's name of each call in a message, as newer and older packages of models write them."""
    for call in (*message.blocks, *(message.additional_kwargs.get("tool_calls") or ())):
        key = _get(call, "id") or _get(call, "tool_call_id")
        name = _get(call, "name") or _get(call, "tool_name") or _get(_get(call, "function"), "name")
        if key and name:
            yield key, name


def _get(call: object, key: str) -> Any:
    """Of an object, or of the mapping that it is once it was stored."""
    return call.get(key) if isinstance(call, dict) else getattr(call, key, None)
