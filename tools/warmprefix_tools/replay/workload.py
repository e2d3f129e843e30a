"""A trace prepared for replays: blocks for a planner, cut to `k`, or all candidates to choose from."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count

from warmprefix import Choice
from warmprefix.blocks import ContextBlock
from warmprefix.errors import TraceError
from warmprefix_tools.choice_option import ChoiceOption
from warmprefix_tools.traces.trace import BlockId, Trace, TraceRequest

__all__ = ["DEFAULT_K", "ReplayRequest", "Workload", "first_blocks"]

DEFAULT_K = 15


def first_blocks(request: TraceRequest, k: int | None) -> Sequence[BlockId]:
    """Return the blocks that relevance feeds: the first `k`; None for the request's own `k`, or `DEFAULT_K`."""
    return request.blocks[: (request.k or DEFAULT_K) if k is None else k]


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """One retrieval; each tuple describes its distinct blocks in relevance order, with a choice all candidates."""

    source: TraceRequest
    ids: tuple[BlockId, ...]
    """Names of the blocks in the trace."""
    blocks: tuple[ContextBlock, ...]
    """With scores if there is a choice."""
    keys: tuple[int, ...]
    """Numbers of the blocks in the cache: one per block and scope, so that scopes share no prefix."""
    tokens: tuple[int, ...]
    relevance: tuple[int, ...]
    """Relevance order, as a planned order: all blocks, or the first `k` candidates."""
    context_tokens: int
    """Tokens of the blocks in relevance order."""
    conversation: str | None
    """Name of the conversation for the planner."""
    choice: Choice | None = None


class Workload:
    """Requests of one trace, prepared once for any number of runs."""

    def __init__(self, trace: Trace, k: int | None = None, choose: ChoiceOption | None = None) -> None:
        """Take the first `k` blocks of each request; None for the request's own `k`, or at most `DEFAULT_K`.

        With a choice, these are the candidates; None for all.

        Raises:
            TraceError: A request has no places or scores to choose by, or the scores are out of order.
            ValueError: `k` is below 1.
        """
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        self.name = trace.name
        self.choose = choose
        self.requests = tuple(_requests(trace, k, choose))
        most = max((len(request.blocks) for request in trace.requests), default=0)
        if choose is not None:
            self.k = max((len(request.relevance) for request in self.requests), default=0)
        elif k is not None:
            self.k = min(k, max(most, trace.k or 0))
        else:
            own = max((request.k or DEFAULT_K for request in trace.requests), default=DEFAULT_K)
            self.k = min(own, max(most, trace.k or 0))
        self.candidates = max((len(request.blocks) for request in self.requests), default=0)
        """Most blocks of a request, with a choice also those that relevance does not feed."""
        self.scopes = len({request.source.scope for request in self.requests})
        self.conversations = len({(request.source.scope, request.conversation) for request in self.requests})
        self.keys = 1 + max((key for request in self.requests for key in request.keys), default=-1)
        """No block has this number or a higher one."""


def _requests(trace: Trace, k: int | None, choose: ChoiceOption | None) -> Iterator[ReplayRequest]:
    blocks: dict[BlockId, ContextBlock] = {}
    keys: dict[tuple[str | None, BlockId], int] = {}
    numbers = count()
    for source in trace.requests:
        ids = tuple(dict.fromkeys(first_blocks(source, k) if choose is None else source.blocks[:k]))
        for id in ids:
            if id not in blocks:
                blocks[id] = trace.block(id)
        own = [blocks[id] for id in ids]
        choice = None if choose is None else _choice(trace.name, source, choose)
        if choice is not None:
            scores = dict(zip(reversed(source.blocks), reversed(source.scores), strict=True))  # of equal ones the first
            own = [replace(blocks[id], score=scores[id]) for id in ids]
        fed = len(ids) if choice is None else min(choice.k, len(ids))
        tokens = tuple([trace.tokens[id] for id in ids])
        keys.update({(source.scope, id): next(numbers) for id in ids if (source.scope, id) not in keys})
        yield ReplayRequest(
            source=source,
            ids=ids,
            blocks=tuple(own),
            keys=tuple([keys[source.scope, id] for id in ids]),
            tokens=tokens,
            relevance=tuple(range(fed)),
            context_tokens=sum(tokens[:fed]),
            conversation=None if source.conversation is None else json.dumps(source.conversation),
            choice=choice,
        )


def _choice(trace: str, request: TraceRequest, choose: ChoiceOption) -> Choice:
    """Return the choice of a request whose blocks have scores in order."""
    name = f"request {json.dumps(request.request)}"
    choice = choose.of(request.k)
    if choice is None:
        raise TraceError(trace, None, f"{name} has no k, the number of blocks that it feeds; add it as --choose k=8")
    if len(request.scores) != len(request.blocks):
        raise TraceError(trace, None, f"{name} has no scores to choose by; `record` writes them if each block has one")
    try:
        choice.losses(request.scores)
    except ValueError as error:
        raise TraceError(trace, None, f"{name}: {error}") from error
    return choice
