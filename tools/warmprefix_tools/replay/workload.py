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

__all__ = ["DEFAULT_K", "ReplayRequest", "Workload", "check_texts", "first_blocks"]

DEFAULT_K = 15


def first_blocks(request: TraceRequest, k: int | None) -> Sequence[BlockId]:
    """Return the blocks that relevance feeds: the first `k`; None for the request's own `k`, or `DEFAULT_K`."""
    return request.blocks[: (request.k or DEFAULT_K) if k is None else k]


def check_texts(trace: Trace) -> None:
    """Check that a trace has texts, by which twins are found.

    Raises:
        TraceError: It has none.
    """
    if not trace.texts:
        raise TraceError(trace.name, None, "it has no texts, by which twins are found; record it with --text")


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

        With a choice, these are the candidates; None for all. A request that has no places or scores to choose by, or
        scores out of order, is fed its first blocks.

        Raises:
            TraceError: There is nothing to choose by in any request, or there are no texts to find twins by.
            ValueError: `k` is below 1.
        """
        if k is not None and k < 1:
            raise ValueError(f"k must be 1 or more, got {k}")
        self.name = trace.name
        self.choose = choose
        choices, errors = _choices(trace, choose)
        self.errors = errors
        """Why nothing can be chosen for some requests, with a choice."""
        self.requests = tuple(_requests(trace, k, choose, choices))
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


def _requests(
    trace: Trace, k: int | None, choose: ChoiceOption | None, choices: Sequence[Choice | None]
) -> Iterator[ReplayRequest]:
    blocks: dict[BlockId, ContextBlock] = {}
    keys: dict[tuple[str | None, BlockId], int] = {}
    numbers = count()
    for source, choice in zip(trace.requests, choices, strict=True):
        given = first_blocks(source, k) if choose is None else source.blocks[:k]
        if choice is None and choose is not None:
            given = given[: choose.fields.get("k", source.k)]  # without a number of places, all were fed
        ids = tuple(dict.fromkeys(given))
        for id in ids:
            if id not in blocks:
                blocks[id] = trace.block(id)
        own = [blocks[id] for id in ids]
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


def _choices(trace: Trace, choose: ChoiceOption | None) -> tuple[Sequence[Choice | None], Sequence[str]]:
    """Return the choice of each request, None for those without, and what is wrong with the others."""
    if choose is None:
        return [None] * len(trace.requests), ()
    if choose.fields.get("twins"):
        check_texts(trace)
    choices: list[Choice | None] = []
    errors: list[str] = []
    for request in trace.requests:
        choice = choose.of(request.k)
        error = _error(request, choice)
        if error is not None:
            choice = None
            errors.append(f"request {json.dumps(request.request)}{error}")
        choices.append(choice)
    pairs = zip(choices, trace.requests, strict=True)
    if errors and not any(choice is not None and len(request.blocks) > 1 for choice, request in pairs):
        raise TraceError(trace.name, None, errors[0])
    return choices, errors


def _error(request: TraceRequest, choice: Choice | None) -> str | None:
    """Return why nothing can be chosen for a request; None if it has places, and scores in order."""
    if choice is None:
        return " has no k, the number of blocks that it feeds; add it as --choose k=8"
    if len(request.scores) != len(request.blocks):
        return " has no scores to choose by; `record` writes them if each block has one"
    try:
        choice.losses(request.scores)
    except ValueError as error:
        return f": {error}"
    return None
