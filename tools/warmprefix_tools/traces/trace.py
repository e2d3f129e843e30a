"""A retrieval trace in memory."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from typing import Any

from warmprefix import ContextBlock

__all__ = ["BlockId", "Trace", "TraceRequest", "stand_in"]

BlockId = str | int

_WORDS = (
    "after april begin black bread bridge bright brown cattle chair change church clear clock close cloud coast count "
    "cover craft cross dance doubt dream drive early earth eight enter equal event every field final first floor force "
    "found fresh front fruit glass grand grass great green group guard happy heart heavy horse hotel house human judge "
    "knife labor large later laugh level light local lower lucky major march metal might minor model money month motor"
)
"""The beginnings of stand-ins. A quote of two of them takes as many tokens as one of a real passage:
`benchmarks/note_forms.py` counts both."""


def stand_in(name: str) -> str:
    """Return a text for a block of which a trace has only a name."""
    ordinary = _WORDS.split()
    words = [ordinary[byte % len(ordinary)] for byte in blake2b(name.encode(), digest_size=5).digest()]
    return f"{' '.join(words)} {name}"


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
    k: int | None = None
    """Blocks that relevance alone would feed, if the request has more candidates."""
    gold: tuple[BlockId, ...] = ()
    """Blocks with the answer, or those that were clicked or cited; they need not be among the request's."""


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
    texts: Mapping[BlockId, str] = field(default_factory=dict)
    """Text of each block that has one; no two have the same."""

    def block(self, id: BlockId) -> ContextBlock:
        """Return a block of that length, with its text or a stand-in for it."""
        return ContextBlock(self.texts.get(id) or stand_in(json.dumps(id)), id=id, tokens=self.tokens[id])

    @property
    def conversations(self) -> int:
        """Number of conversations with more than one request."""
        turns = Counter(request.conversation for request in self.requests if request.conversation is not None)
        return sum(count > 1 for count in turns.values())
