"""A retrieval trace in memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["BlockId", "Trace", "TraceRequest"]

BlockId = str | int


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One retrieval, and its place in a conversation."""

    request: BlockId
    """Its id in the trace."""
    blocks: tuple[BlockId, ...]
    """In relevance order."""
    conversation: BlockId | None = None
    turn: int = 0
    """Counts from 1 within a conversation; 0 outside any."""
    query_tokens: int = 0
    scores: tuple[float, ...] = ()
    """The retriever's, one per block, or empty."""
    scope: str | None = None
    """Requests of different scopes never share a prefix."""
    seconds: float | None = None
    """Since the start of the trace."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory."""

    name: str
    requests: tuple[TraceRequest, ...]
    """In order of arrival."""
    tokens: Mapping[BlockId, int]
    """Length of every block that a request names."""
    k: int | None = None
    """Most blocks of a request, from the header."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """All fields of the first line."""

    @property
    def conversations(self) -> int:
        """Number of conversations with more than one request."""
        turns = Counter(request.conversation for request in self.requests if request.conversation is not None)
        return sum(count > 1 for count in turns.values())
