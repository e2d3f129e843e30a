"""Primes: requests for one token, which leave a checkpoint at the end of a prefix that later requests share. No I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from warmprefix.cache_profiles import Checkpoints

__all__ = ["cut_chat", "prime_gain"]

_SYSTEM = ("system", "developer")

_REQUEST_TOKENS = 32
"""Price of one more request for an engine, in tokens of prefill."""


def cut_chat(messages: Sequence[Mapping[str, Any]], shared: str) -> list[dict[str, Any]] | None:
    """Return the chat up to the end of `shared`, and what follows it up to the first visible character.

    That character is the token behind the boundary which a checkpoint needs. It is the real prompt's own, so that the
    tokens in front of it are too. An empty `shared` ends in front of the first message that is no system prompt. None
    if no message has the text, or only as one of several content parts. O(text).
    """
    for i, message in enumerate(messages):
        content = message.get("content")
        if not isinstance(content, str) or (not shared and message.get("role") in _SYSTEM):
            continue
        begin = content.find(shared)
        if begin < 0:
            continue
        end = begin + len(shared)
        rest = content[end:]
        visible = rest.lstrip()
        if visible:
            end += len(rest) - len(visible) + 1
        return [*map(dict, messages[:i]), {**message, "content": content[:end]}] if end else None
    return None


def prime_gain(checkpoints: Checkpoints, shared: int, covered: int, visits: int) -> int:
    """Return the tokens of prefill that a prime saves net; 0 or less if it does not pay.

    Without it, the second request behind the prefix finds what is covered, and the third and later ones a junction.

    Args:
        checkpoints: Where the engine keeps them.
        shared: Tokens of the prefix.
        covered: Of these, tokens up to a checkpoint that is there already.
        visits: Number of requests that begin with the prefix, 1 or more.
    """
    unit = checkpoints.unit or checkpoints.block
    reached = shared - shared % unit
    if reached <= covered:
        return 0
    junction = max(shared - shared % checkpoints.block, covered)
    saved = (reached - covered) * min(visits - 1, 1) + (reached - junction) * max(visits - 2, 0)
    return saved - (shared - reached) - 1 - _REQUEST_TOKENS
