"""A trace prepared for replays: cut to its `k`, with blocks for a planner."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from warmprefix.blocks import ContextBlock
from warmprefix_tools.traces.trace import BlockId, Trace, TraceRequest

__all__ = ["DEFAULT_K", "ReplayRequest", "Workload"]

DEFAULT_K = 15


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One retrieval; each tuple describes its distinct blocks in relevance order."""

    source: TraceRequest
    ids: tuple[BlockId, ...]
    """Names of the blocks in the trace."""
    blocks: tuple[ContextBlock, ...]
    keys: tuple[int, ...]
    """Numbers of the blocks in the cache: one per block and scope, so that scopes share no prefix."""
    tokens: tuple[int, ...]
    relevance: tuple[int, ...]
    """Relevance order, as a planned order."""
    context_tokens: int
    new_tokens: int
    """Tokens of blocks that no earlier request of the scope had. No order can save them."""
    conversation: str | None
    """Name of the conversation for the planner."""


class Workload:
    """Requests of one trace, prepared once for any number of runs."""

    def __init__(self, trace: Trace, k: int | None = None) -> None:
        """Take the first `k` blocks of each request; None for at most `DEFAULT_K`.

        Raises:
            ValueError: `k` is below 1.
        """
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        most = max((len(request.blocks) for request in trace.requests), default=0)
        self.name = trace.name
        self.k = min(DEFAULT_K if k is None else k, max(most, trace.k or 0))
        self.requests = tuple(_requests(trace, self.k))
        self.scopes = len({request.source.scope for request in self.requests})
        self.conversations = len({(request.source.scope, request.conversation) for request in self.requests})
        self.keys = 1 + max((key for request in self.requests for key in request.keys), default=-1)
        """No block has this number or a higher one."""


def _requests(trace: Trace, k: int) -> Iterator[ReplayRequest]:
    blocks: dict[BlockId, ContextBlock] = {}
    keys: dict[tuple[str | None, BlockId], int] = {}
    numbers = count()
    for source in trace.requests:
        ids = tuple(dict.fromkeys(source.blocks[:k]))
        for id in ids:
            if id not in blocks:
                blocks[id] = trace.block(id)
        tokens = tuple([trace.tokens[id] for id in ids])
        new = [id for id in ids if (source.scope, id) not in keys]
        keys.update({(source.scope, id): next(numbers) for id in new})
        yield ReplayRequest(
            source=source,
            ids=ids,
            blocks=tuple([blocks[id] for id in ids]),
            keys=tuple([keys[source.scope, id] for id in ids]),
            tokens=tokens,
            relevance=tuple(range(len(ids))),
            context_tokens=sum(tokens),
            new_tokens=sum(trace.tokens[id] for id in new),
            conversation=None if source.conversation is None else json.dumps(source.conversation),
        )
