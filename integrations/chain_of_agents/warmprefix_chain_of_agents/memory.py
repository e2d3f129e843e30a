"""Chats of each agent in each conversation, so that documents are not sent twice."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, runtime_checkable

from warmprefix import ContextBlock
from warmprefix.errors import check_count
from warmprefix.forks import fork_safe_lock

__all__ = ["Chat", "ChatKey", "ChatMemory", "ChatMessage", "InMemoryChats"]

ChatMessage = dict[str, str]
"""An OpenAI-style message: `role` and `content`."""


class ChatKey(NamedTuple):
    """Key of a chat."""

    tenant: str | None
    """Name of the tenant; None without one."""
    conversation: str
    """The id of the conversation."""
    agent: str
    """Name of the agent."""


@dataclass(frozen=True)
class Chat:
    """The messages of one chat after the system prompt. Immutable: a longer one replaces it."""

    messages: tuple[ChatMessage, ...] = ()
    """The messages, oldest first."""
    tokens: int = field(init=False, compare=False)
    """Approximate number of tokens: a quarter of the UTF-8 bytes."""

    def __post_init__(self) -> None:
        tokens = sum(ContextBlock(message["content"]).tokens for message in self.messages)
        object.__setattr__(self, "tokens", tokens)

    def extended(self, question: str, answer: str) -> Chat:
        """Return this chat with one more turn."""
        turn = ({"role": "user", "content": question}, {"role": "assistant", "content": answer})
        return Chat((*self.messages, *turn))


@runtime_checkable
class ChatMemory(Protocol):
    """Store of chats. Called from any thread, and from event loops, so no method may wait for long.

    A lost chat loses earlier turns and sends documents again, and no more: a prompt refers only to its own messages. So
    a store elsewhere returns an empty chat when that place fails.
    """

    def load(self, key: ChatKey) -> Chat:
        """Return the chat; an empty one without any."""
        ...

    def save(self, key: ChatKey, chat: Chat, *, instead_of: Chat) -> bool:
        """Store `chat`; return False if the stored chat is not `instead_of`, because another run was faster."""
        ...

    def forget(self, tenant: str | None, conversation: str) -> None:
        """Drop the conversation's chats with all agents."""
        ...


class InMemoryChats:
    """Chats in this process, of the conversations that were used last."""

    def __init__(self, max_conversations: int = 1_024) -> None:
        """Start empty.

        Raises:
            TypeError: `max_conversations` is no int.
            ValueError: `max_conversations` is below 1.
        """
        check_count("max_conversations", max_conversations)
        self._max_conversations = max_conversations
        self._chats: OrderedDict[tuple[str | None, str], dict[str, Chat]] = OrderedDict()
        self._lock = fork_safe_lock()

    def __len__(self) -> int:
        return len(self._chats)

    def load(self, key: ChatKey) -> Chat:
        with self._lock:
            chats = self._chats.get(key[:2])
            if chats is None:
                return Chat()
            self._chats.move_to_end(key[:2])
            return chats.get(key.agent, Chat())

    def save(self, key: ChatKey, chat: Chat, *, instead_of: Chat) -> bool:
        with self._lock:
            chats = self._chats.get(key[:2], {})
            if chats.get(key.agent, Chat()) != instead_of:
                return False
            chats[key.agent] = chat
            self._chats[key[:2]] = chats
            self._chats.move_to_end(key[:2])
            while len(self._chats) > self._max_conversations:
                self._chats.popitem(last=False)
            return True

    def forget(self, tenant: str | None, conversation: str) -> None:
        with self._lock:
            self._chats.pop((tenant, conversation), None)
