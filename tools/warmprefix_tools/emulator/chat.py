"""The chat template: messages to prompt tokens, in the manner of ChatML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from warmprefix_tools.emulator.tokenizer import MESSAGE_END, MESSAGE_START, encode

__all__ = ["ChatMessage", "render_chat"]


@dataclass(frozen=True, slots=True)
class ChatMessage:
    """A message as the template sees it: content parts joined, tool calls already written out in `text`."""

    role: str
    text: str


def render_chat(messages: Sequence[ChatMessage], *, add_generation_prompt: bool = True) -> list[int]:
    r"""Give `<|im_start|>role\ntext<|im_end|>\n` for each message, then the head of the answer, as tokens.

    Header, text and markers are encoded apart from each other. So nothing in a text can look like a marker,
    and an answer that comes back as an assistant message has the very tokens that were generated: chats hit
    the cache.

    >>> turn = [ChatMessage("user", "Hello.")]
    >>> longer = [*turn, ChatMessage("assistant", "Hi!"), ChatMessage("user", "Bye.")]
    >>> render_chat(longer)[: len(render_chat(turn))] == render_chat(turn)
    True
    """
    tokens: list[int] = []
    for message in messages:
        tokens += (
            MESSAGE_START,
            *encode(f"{message.role}\n"),
            *encode(message.text),
            MESSAGE_END,
            *encode("\n"),
        )
    if add_generation_prompt:
        tokens += (MESSAGE_START, *encode("assistant\n"))
    return tokens
