"""Token counts of the short texts that a planner writes: labels, notes and references."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Protocol

__all__ = ["CheckedCounter", "TokenCounter", "as_counter", "estimated_tokens"]

_PIECE = re.compile(r"[A-Za-z]+|[0-9]|[^\x00-\x7f]|[^\sA-Za-z0-9]")


class TokenCounter(Protocol):
    """Counts the tokens of a text."""

    def __call__(self, text: str, /) -> int: ...


def estimated_tokens(text: str) -> int:
    return len(_PIECE.findall(text))


def as_counter(tokenizer: Any) -> TokenCounter:
    return estimated_tokens if tokenizer is None else tokenizer


class CheckedCounter:
    def __init__(self, counter: TokenCounter, on_failure: Callable[[], object]) -> None:
        self._count = lru_cache(4_096)(counter)

    def __call__(self, text: str) -> int:
        return self._count(text)


Tokenizer = Any
