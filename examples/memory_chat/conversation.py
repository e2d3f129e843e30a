"""One turn: search the memories, ask the model, and remember what the user wrote."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from openai import OpenAI

from warmprefix_mem0 import ContextReuseMemory, MemoryChat

__all__ = ["Conversation", "TurnUsage"]

SYSTEM = "You are a personal assistant. A [label] marks what you remember of the user."


@dataclass(frozen=True, slots=True)
class TurnUsage:
    """Tokens of one turn, as the engine counts them."""

    prompt_tokens: int
    cached_tokens: int


class Conversation:
    """A chat with one user, whose messages are only ever appended to."""

    def __init__(
        self, client: OpenAI, model: str, memory: ContextReuseMemory, user: str, messages: list[dict[str, Any]]
    ) -> None:
        """Start a chat, or continue the one with these messages."""
        self._client = client
        self._model = model
        self._memory = memory
        self._user = user
        self._chat = MemoryChat(history=messages) if messages else MemoryChat(SYSTEM)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """All messages so far."""
        return self._chat.messages

    def ask(self, text: str) -> Iterator[str | TurnUsage]:
        """Yield the answer in pieces, then its usage. A turn that fails leaves no trace."""
        found = self._memory.search(text, filters={"user_id": self._user}, top_k=5)
        messages: Any = self._chat.ask(text, found)
        pieces: list[str] = []
        usage = TurnUsage(0, 0)
        with self._client.chat.completions.create(
            model=self._model, messages=messages, stream=True, stream_options={"include_usage": True}
        ) as stream:
            for chunk in stream:
                for choice in chunk.choices:
                    pieces.append(choice.delta.content or "")
                    yield pieces[-1]
                if chunk.usage is not None:
                    details = chunk.usage.prompt_tokens_details
                    usage = TurnUsage(chunk.usage.prompt_tokens, (details and details.cached_tokens) or 0)
        self._chat.commit(messages, "".join(pieces))
        if not text.rstrip().endswith("?"):
            self.remember(text)
        yield usage

    def remember(self, text: str) -> None:
        """Add a memory as it is. With `infer=True`, Mem0 would have its own model extract facts from the text."""
        self._memory.add(text, user_id=self._user, infer=False)
