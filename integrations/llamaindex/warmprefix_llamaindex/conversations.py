"""Conversations of requests with tail placement: a name, a branch, or the messages themselves."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import accumulate, dropwhile
from typing import Any, TypeAlias

from llama_index.core.base.llms.types import ChatMessage, MessageRole, TextBlock
from llama_index.core.memory import BaseMemory, ChatMemoryBuffer, Memory
from llama_index.core.schema import QueryBundle
from llama_index.core.storage.chat_store.base_db import MessageStatus

from warmprefix import Branch, ContextBlock

__all__ = ["AFTER_TURN", "Conversation", "ConversationRule", "check_rule", "history_options", "stored", "surviving"]

AFTER_TURN = "after_turn"
"""Instrument tag with the id of the turn that a request continues; None begins a history."""

Conversation: TypeAlias = str | Branch | BaseMemory | Sequence[ChatMessage] | None
"""What is known of the history in front of a new context."""

ConversationRule: TypeAlias = str | BaseMemory | Callable[[QueryBundle | None], Conversation | Awaitable[Conversation]]

_MESSAGE_TOKENS = 8
"""Tokens that a message takes besides its text."""


def history_options(known: object) -> dict[str, Any]:
    """Return the arguments of `ContextPlanner.plan` that say what a history holds; `known` is no memory.

    Raises:
        TypeError: It is no conversation.
    """
    if known is None or isinstance(known, str | Branch):
        return {"conversation": known or None}
    if isinstance(known, Sequence) and all(isinstance(message, ChatMessage) for message in known):
        return {"history": [_as_mapping(message) for message in known]}
    kind = type(known).__name__
    raise TypeError(f"conversation must be a name, a Branch, a memory, ChatMessages or None, got {kind}")


def check_rule(rule: object) -> None:
    """Check the `conversation` of a postprocessor.

    Raises:
        ValueError: It is something else, or an empty name.
    """
    if rule == "":
        raise ValueError("conversation must have at least one character")
    if isinstance(rule, BaseMemory):
        _limits(rule)
    elif not (rule is None or isinstance(rule, str) or callable(rule)):
        kind = type(rule).__name__
        raise ValueError(
            f"conversation must be a name, a memory, or a function of the query bundle that returns a name, a Branch, "
            f"a memory or messages, got {kind}"
        )


def stored(memory: BaseMemory) -> dict[str, Any]:
    """Return the arguments of `get_all` that leave out what a memory has cut."""
    return {"status": MessageStatus.ACTIVE} if isinstance(memory, Memory) else {}


def surviving(
    memory: BaseMemory, messages: list[ChatMessage], added: Sequence[ContextBlock], query: QueryBundle | None
) -> list[ChatMessage]:
    """Return the messages that a memory will still hold once a new context has been added; the others are unseen.

    A memory cuts its oldest messages at its token limit. Near the limit, messages count only if they fit into half of
    it, because the size of the answer and of system prompts is unknown.

    Raises:
        ValueError: The kind of memory decides by other things than tokens what a prompt holds.
    """
    count, limit, flush = _limits(memory)
    sizes = [count("".join(_texts(message)) + str(message.additional_kwargs)) for message in messages]
    room = -count("\n\n".join([block.text for block in added]) + ("" if query is None else query.query_str))
    if sum(sizes) - room > limit * 3 // 4:
        room += min(limit // 2, limit - flush)
        kept = list(accumulate(reversed(sizes)))
        messages = messages[len(messages) - bisect_right(kept, room) :]
        messages = list(dropwhile(lambda message: message.role != MessageRole.USER, messages))  # where memories cut
    return messages


def _limits(memory: BaseMemory) -> tuple[Callable[[str], int], int, int]:
    """Return a memory's count of tokens, the most tokens of messages that it keeps, and how many it cuts at a time."""
    if isinstance(memory, Memory):
        limit, flush = int(memory.token_limit * memory.chat_history_token_ratio), memory.token_flush_size
    elif isinstance(memory, ChatMemoryBuffer):
        limit, flush = memory.token_limit, 0
    else:
        raise ValueError(
            f"conversation: a {type(memory).__name__} does not show which messages the prompt will hold. Use a Memory "
            "or a ChatMemoryBuffer, or a function that returns the messages"
        )
    return lambda text: len(memory.tokenizer_fn(text)) + _MESSAGE_TOKENS, limit, flush


def _as_mapping(message: ChatMessage) -> Mapping[str, Any]:
    return {"role": message.role.value, "content": _texts(message)}


def _texts(message: ChatMessage) -> list[str]:
    return [block.text for block in message.blocks if isinstance(block, TextBlock)]
