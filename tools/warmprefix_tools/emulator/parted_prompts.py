"""Prompts whose content parts stay apart, so that marks can stand between them."""

from __future__ import annotations

from dataclasses import dataclass

from warmprefix_tools.caches import Mark, MarkedPrompt
from warmprefix_tools.emulator.tokenizer import MESSAGE_END, MESSAGE_START, ChatMessage, encode

__all__ = ["PartedMessage", "PromptPart", "render_parts"]


@dataclass(frozen=True, slots=True)
class PromptPart:
    """One content part, a tool definition, or another thing that a mark can stand on."""

    text: str
    marked: bool = False
    lifetime: float | None = None
    """Seconds that a mark asks for; None for the API's default."""


@dataclass(frozen=True, slots=True)
class PartedMessage:
    """One message, or all tools or system texts."""

    role: str
    parts: tuple[PromptPart, ...]
    has_automatic_mark: bool = False
    """True for messages at whose end the API sets marks of its own."""

    @property
    def joined(self) -> ChatMessage:
        """The message as the model reads it."""
        return ChatMessage(self.role, "\n".join([part.text for part in self.parts]))


def render_parts(
    messages: list[PartedMessage], *, salt: str | None = None, automatic: bool = True, marks: bool = True
) -> MarkedPrompt:
    """Return the prompt of a chat: the template of `render_chat`, with each part's tokens apart from the next one's.

    Args:
        messages: The chat, in the order in which the model reads it.
        salt: What keeps its cache apart.
        automatic: False if the request turns automatic marks off.
        marks: False if the API ignores marks.
    """
    tokens: list[int] = []
    part_ends: list[int] = []
    set_marks: list[Mark] = []
    message_ends: list[int] = []
    for message in messages:
        tokens += (MESSAGE_START, *encode(f"{message.role}\n"))
        for place, part in enumerate(message.parts):
            if place:
                tokens += encode("\n")
            tokens += encode(part.text)
            if part.marked and marks:
                set_marks.append(Mark(len(part_ends), part.lifetime))
            part_ends.append(len(tokens))
        if message.has_automatic_mark and message.parts:
            message_ends.append(len(part_ends) - 1)
        tokens += (MESSAGE_END, *encode("\n"))
    tokens += (MESSAGE_START, *encode("assistant\n"))
    return MarkedPrompt(tokens, salt, tuple(part_ends), tuple(set_marks), tuple(message_ends), automatic)
