"""What a trace holds.

A trace file is JSONL, gzipped when its name ends in `.gz`: a header line, then a line for each block and a line for
each request, each block before the first request that names it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

__all__ = ["MAX_TRACE_TOKENS", "RECORDED_FIELD", "BlockId", "Trace", "TraceRequest"]

BlockId = str | int

MAX_TRACE_TOKENS = 1_000_000_000
"""The greatest length that a trace may give: longer than any prompt, and small enough to add up anywhere."""

RECORDED_FIELD = "recorded"
"""The header field in which a recorder notes the date."""


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One retrieval, and where in a conversation it happened."""

    request: BlockId
    """Its id in the trace."""
    blocks: tuple[BlockId, ...]
    """In relevance order."""
    conversation: BlockId | None = None
    turn: int = 0
    """Counts from 1 within a conversation; 0 outside any."""
    query_tokens: int = 0
    scores: tuple[float, ...] = ()
    """The retriever's, one a block, or none."""
    scope: str | None = None
    """Names what may share a prefix; requests of different scopes never do."""
    seconds: float | None = None
    """Since the start of the trace."""


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace in memory."""

    name: str
    requests: tuple[TraceRequest, ...]
    """In the order in which they came."""
    tokens: Mapping[BlockId, int]
    """The length of every block that a request names."""
    k: int | None = None
    """Most blocks of a request, as the header has it."""
    header: Mapping[str, Any] = field(default_factory=dict)
    """The first line, whole."""

    @property
    def conversations(self) -> int:
        """How many conversations have more than one request."""
        seen: dict[BlockId, int] = {}
        for request in self.requests:
            if request.conversation is not None:
                seen[request.conversation] = seen.get(request.conversation, 0) + 1
        return sum(count > 1 for count in seen.values())
